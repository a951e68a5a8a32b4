"""Engines of a PD pair on a CPU leave the cores to others while they wait for KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_cpu import pd_pairs


@pytest.mark.parametrize(("fully_idle", "naps"), [(False, 1), (True, 0)])
def test_a_waiting_scheduler_sleeps(
    monkeypatch: pytest.MonkeyPatch, fully_idle: bool, naps: int
) -> None:
    slept: list[float] = []
    housekeeping: list[object] = []
    monkeypatch.setattr(pd_pairs, "time", SimpleNamespace(sleep=slept.append))
    scheduler = SimpleNamespace(is_fully_idle=lambda: fully_idle)
    pd_pairs._sleep_if_busy(housekeeping.append)(scheduler)
    assert housekeeping == [scheduler]
    assert len(slept) == naps


def test_nixl_waits_for_events() -> None:
    agents: list[tuple[str, Any]] = []
    make = pd_pairs._wait_for_events(lambda name, config: agents.append((name, config)))
    make("agent", SimpleNamespace(pthrDelay=0))
    [(name, config)] = agents
    assert name == "agent" and config.pthrDelay >= 1000


def test_other_engines_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_pairs, "_patch_nixl", lambda: pytest.fail("nixl was patched"))
    for mode in (None, "null"):
        pd_pairs.prepare_pd_pairs(SimpleNamespace(disaggregation_mode=mode))
