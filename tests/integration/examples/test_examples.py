"""The programs of docs/recipes.md answer the same linked, and hit their streams."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import pytest

from flashmoa import EngineClient
from tests.conftest import ROOT
from tests.integration.support import slow, wait_until_idle

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("openai_client", ['"status": ?"hit"']),
        ("agent_framework_chain", ["local: hit", "summary: hit"]),
        ("own_framework", [r"[12] of 3 calls linked"]),
        slow("langgraph_chain", [r"LinkClosed\(agent='summary'.*reason='used'"]),
        slow("openai_runs", [r"[1-9]\d* tokens of the prompts were streamed"]),
    ],
)
async def test_a_program_says_that_its_answers_are_the_same_linked(
    program: str,
    shown: list[str],
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # They import each other.
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--engine", client.url])
    await client.flush_cache()
    example: Any = importlib.import_module(program)
    await example.main()
    printed = capsys.readouterr().out
    assert "The same unlinked: True" in printed
    assert all(re.search(text, printed) for text in shown), printed
    await wait_until_idle(client)
