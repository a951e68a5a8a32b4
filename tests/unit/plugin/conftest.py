"""Fixtures of the plugin's unit tests."""

from __future__ import annotations

from typing import Any

import pytest
from flashmoa_sglang.scheduler import queue


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reason for each request that is dropped from a fake scheduler's queue."""
    reasons: list[str] = []

    def drop(scheduler: Any, positions: set[int], reason: str) -> None:
        reasons.extend([reason] * len(positions))
        scheduler.waiting_queue = queue._without(scheduler.waiting_queue, positions)

    monkeypatch.setattr(queue, "_drop", drop)
    return reasons
