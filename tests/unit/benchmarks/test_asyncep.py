"""Test the pure parts of ``flashmoa bench asyncep``."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_bench.harness.report import make_table, terminal
from flashmoa_bench.prefill.asyncep import (
    H2D,
    RESIDENT,
    EngineMemory,
    _fetch_memory,
    flops,
    make_batch,
    summarise,
)

from flashmoa.errors import EngineError

QWEN = Path(__file__).parents[3] / "examples" / "models" / "qwen3-30b-a3b" / "config.json"
OPTIONS = argparse.Namespace(tokens=[100, 200], prompt=64, peak_tflops=989.0)
SECONDS = {
    RESIDENT: {100: [1.0, 2.0, 3.0], 200: [4.0, 4.0, 4.0]},
    H2D: {100: [4.0, 4.0, 9.0], 200: [4.0, 5.0, 5.0]},
}


def test_a_batch_has_exactly_its_tokens() -> None:
    assert [len(ids) for ids in make_batch(150, 64, random.Random(0))] == [64, 64, 22]
    assert [len(ids) for ids in make_batch(64, 1000, random.Random(0))] == [64]


def test_exposed_seconds_are_added_by_copying(capsys: pytest.CaptureFixture[str]) -> None:
    rows = summarise(SECONDS, OPTIONS, QWEN)
    assert [(row.tokens, row.way, row.exposed) for row in rows] == [
        (100, RESIDENT, 0.0),
        (100, H2D, 2.0),
        (200, RESIDENT, 0.0),
        (200, H2D, 1.0),
    ]
    assert [row.of_resident for row in rows] == [1.0, 0.5, 1.0, 0.8]
    assert rows[0].mfu == pytest.approx((rows[0].teraflops or 0) / 989)
    memory = [
        EngineMemory(RESIDENT, 1 << 20, 0, 0, 1 << 20),
        EngineMemory(H2D, 1 << 19, 1 << 19, 3, 1 << 30),
    ]
    for each in (rows, memory):
        terminal().print(make_table("", each))
    assert "1,024.0" in capsys.readouterr().out


async def test_sglangs_offloaded_experts_are_unknown() -> None:
    def engine(**kv: Any) -> Any:
        async def info() -> Any:
            return SimpleNamespace(kv=[SimpleNamespace(**{"experts": None, "kv_bytes": 7, **kv})])

        return SimpleNamespace(info=info)

    experts = SimpleNamespace(resident=1, in_slots=2, on_host=4, misses=3)
    clients = {RESIDENT: engine(), H2D: engine(experts=experts), "cpu_offload": engine()}
    engines: Any = SimpleNamespace(clients=clients)
    assert await _fetch_memory(engines) == [
        EngineMemory(RESIDENT, 5, 0, 0, 7),
        EngineMemory(H2D, 3, 4, 3, 7),
        EngineMemory("cpu_offload", None, None, 0, 7),
    ]


def test_flops_are_those_of_the_model(tmp_path: Path) -> None:
    # 3.3 billion parameters are used for each token; the vocabulary's are not counted.
    assert (flops(QWEN, 1000, 1000) or 0) / 1000 == pytest.approx(2 * 3.0e9, rel=0.1)
    assert flops(None, 10, 10) is None
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(EngineError, match="is not a model"):
        flops(tmp_path / "odd.json", 10, 10)
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "mamba"}))
    assert flops(tmp_path / "other.json", 10, 10) is None
    assert all(row.teraflops is row.mfu is None for row in summarise(SECONDS, OPTIONS, None))
