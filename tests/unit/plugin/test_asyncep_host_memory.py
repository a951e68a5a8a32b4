"""A start ends with a sentence where the host has no memory for the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from flashmoa_sglang.asyncep import host_memory
from flashmoa_sglang.asyncep.experts import Experts

from tests.unit.plugin.asyncep_choosing import QWEN3_235B, choose


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "the experts of 93 layers need 423.0 GiB of host memory, but"),
        ("--tp 4", "the experts of 93 layers need 423.0 GiB of host memory, but"),
        ("--dp 2", "the experts of 93 layers need, in 2 servers (--dp-size), 846.0 GiB of host"),
        (
            "--flashmoa-asyncep d2d --flashmoa-asyncep-replica 0/8",
            "while they are loaded, the experts of 93 layers need 423.0 GiB of host memory, but",
        ),
        (
            "--chunked-prefill-size 8192 --max-prefill-tokens 8192 --mem-fraction-static 0.5",
            "423.0 GiB of host memory, but this machine or container has 256.0 GiB left",
        ),
    ],
)
def test_a_host_without_memory_for_the_experts_ends_the_start(given: str, problem: str) -> None:
    for_model = {"read_config": lambda _: QWEN3_235B, "host_bytes": 256 << 30}
    with pytest.raises(SystemExit) as refused:
        choose(given, **for_model)
    assert problem in str(refused.value)
    if "--dp" not in given:
        stored = QWEN3_235B | {"quantization_config": {"quant_method": "fp8"}}
        choose(given, **for_model | {"read_config": lambda _: stored})
        choose(given, **for_model | {"host_bytes": 424 << 30})


def write_group(root: Path, path: str, limit: str, used: int, cached: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    tenth = cached // 10
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {6 * tenth}\nactive_file {3 * tenth}\nslab_reclaimable {tenth}\n"
    )


@pytest.mark.parametrize(
    ("own", "limit_of_parent", "available"),
    [("/", "max", 600), ("/", "500", 300), ("/a/b", "max", 70), ("/a/b", "100", 50)],
)
def test_a_containers_limit_counts_without_what_the_kernel_has_cached(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    limit_of_parent: str,
    available: int,
) -> None:
    class Machine:
        available = 600

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    assert host_memory.available_bytes(tmp_path) == 600
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::{own}\n")
    if own == "/":
        write_group(tmp_path, "", limit_of_parent, 300, 100)
    else:
        write_group(tmp_path, "a", limit_of_parent, 60, 10)
        write_group(tmp_path, "a/b", "90", 30, 10)
    assert host_memory.available_bytes(tmp_path) == available


def test_experts_for_which_there_is_no_room_are_refused_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer: Any = torch.nn.Linear(64, 64)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4 * (64 * 64 + 64))
    Experts(layer).move_to_host()
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4 * (64 * 64 + 64) - 1)
    with pytest.raises(SystemExit, match="the next layer's experts need"):
        Experts(layer).move_to_host()
