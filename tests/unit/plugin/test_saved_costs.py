"""Costs from a file: what one engine measured, another one uses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang import plugin
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.http.calibration import calibrate, read_costs
from flashmoa_sglang.saturation import Saturation

from tests.unit.plugin.test_calibration import FakeEngine

MEASURED = Costs(((1, 0.01), (512, 0.04)), 0.008, ((1, 0, 0.008), (1, 31, 0.009)))
SATURATED = Saturation(700, 8192, 0.003, ((64, 0.001), (512, 0.002)))


def save(folder: Path, **info: Any) -> str:
    """Save an answer of ``GET /flashmoa/info``, which has more fields than those that count."""
    file = folder / "info.json"
    file.write_text(json.dumps({"plugin": {"version": "9"}, "prompt_streams": 2, **info}))
    return str(file)


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    file = save(tmp_path, costs=asdict(MEASURED), saturation=asdict(SATURATED))
    assert read_costs(file) == (MEASURED, SATURATED)
    assert read_costs(save(tmp_path, costs=asdict(MEASURED), saturation=None)) == (MEASURED, None)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "costs: Field required"),
        ({"costs": None}, "had not measured its costs yet"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1]]}}, "two different sizes"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1], [2]]}}, "costs.points.1.1"),
        ({"costs": asdict(MEASURED) | {"decode_step": -1}}, "not numbers from 0 on"),
        ({"costs": asdict(MEASURED) | {"mixed": [[1, 31, float("inf")]]}}, "not numbers from 0 on"),
    ],
)
def test_a_file_without_costs_is_refused_with_the_reason(
    tmp_path: Path, info: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_costs(save(tmp_path, **info))


@pytest.mark.parametrize("content", [None, b"", b"costs", b"\xff\xfe"])
def test_an_engine_does_not_start_if_its_file_has_no_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "info.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("FLASHMOA_COSTS", str(file))
    with pytest.raises(SystemExit, match=r"--flashmoa-costs .*info\.json"):
        plugin.attach_api(None, SimpleNamespace(server_args=arguments()))


def arguments() -> SimpleNamespace:
    return SimpleNamespace(tokenizer_worker_num=1)


@pytest.mark.anyio
async def test_an_engine_with_a_file_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path, costs=asdict(MEASURED), saturation=asdict(SATURATED))
    monkeypatch.setenv("FLASHMOA_COSTS", file)
    engine: Any = FakeEngine(lambda _tokens, _before: 1.0)
    await calibrate(engine)
    assert engine.costs == MEASURED and engine.saturation == SATURATED
    assert engine.waits_for == SATURATED.tokens
    assert not engine.asked
