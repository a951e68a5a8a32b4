"""A runner of chats."""

from __future__ import annotations

import pytest

from tests.unit.frameworks.agent_framework.forecasts import ChatRunner


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> ChatRunner:
    return ChatRunner(monkeypatch)
