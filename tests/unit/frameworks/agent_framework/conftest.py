"""A runner of chats."""

import pytest

from tests.unit.frameworks.agent_framework.forecasts import ChatRunner


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> ChatRunner:
    return ChatRunner(monkeypatch)
