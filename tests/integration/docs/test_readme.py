"""Test that each program in the README runs as it is written there."""

import ast
import inspect
import re
from types import CodeType
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.conftest import ROOT
from tests.integration.support import wait_until_idle

README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```", README, re.DOTALL | re.M)

(REPORT,) = re.findall(r"```\n(Calls;.*?)```", README, re.DOTALL)


def shape(report: str) -> list[str]:
    """Return the first words of a report's lines, up to the summary."""
    lines = report.partition("end to end")[0].splitlines()
    return [re.sub(r"─+", "─", line).strip().partition(" ")[0] for line in lines]


def compiled(program: str) -> CodeType:
    return compile(program, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_can_be_read_in_a_minute() -> None:
    assert len(README.splitlines()) < 150


def test_every_program_is_found() -> None:
    assert len(PROGRAMS) == README.count("```python")


@pytest.mark.parametrize(("title", "program"), PROGRAMS, ids=[title for title, _ in PROGRAMS])
async def test_a_program_runs(
    title: str,
    program: str,
    engine: LocalEngine,
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{engine.url}/v1")
    program = program.replace("http://127.0.0.1:30000", engine.url)
    # An untrained model seldom ends an answer by itself.
    program = re.sub(r"(max_tokens\W+)[24]00", r"\g<1>16", program)
    names: dict[str, Any] = {}
    done = eval(compiled(program), names)
    if inspect.isawaitable(done):
        await done
    if "client" in names:
        await names["client"].close()
    if title == "AutoGen":
        assert shape(capsys.readouterr().out) == shape(REPORT)
    await wait_until_idle(client)
