"""Messages to a user who lacks a package, a file or an engine, or has a wrong URL."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.cli import bench, trace
from flashmoa.engine import EngineClient
from flashmoa.engine.connections import engine_url
from flashmoa.errors import BadAnswer, EngineUnreachable, PluginMissing, RequestRefused
from flashmoa.observe import LinkClosed
from flashmoa.observe.trace import Trace

NOWHERE = "http://127.0.0.1:9"


def error_without(package: str, script: str) -> str:
    """Return the last line that a script writes to standard error without a package."""
    command = [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "package", "needs", "extra"),
    [
        ("flashmoa.autogen", "autogen_agentchat", "AutoGen", "autogen"),
        ("flashmoa.autogen", "openai", "AutoGen", "autogen"),
        ("flashmoa.openai", "openai", "OpenAI's client", "openai"),
        ("flashmoa.adk", "openai", "Google's ADK", "adk"),
        ("flashmoa.agent_framework", "agent_framework", "Agent Framework", "agent-framework"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, package: str, needs: str, extra: str
) -> None:
    error = error_without(package, f"import {module}")
    assert error.startswith(f"ModuleNotFoundError: {module} needs {needs} (")
    assert package in error and error.endswith(f": pip install 'flashmoa[{extra}]'")


def test_a_benchmark_without_plugin_asks_for_urls() -> None:
    script = "from flashmoa.cli import bench; sys.exit(bench(['chunk']))"
    assert error_without("flashmoa_sglang", script).endswith("give engines' URLs")


def test_missing_or_binary_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["score-accuracy", str(tmp_path / "no.txt")]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert trace.main([str(tmp_path / "binary")]) == 1
    assert "is not a trace: it is not text" in capsys.readouterr().err


def test_a_full_disk_ends_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    write = Trace("/dev/full")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write(LinkClosed(agent="a", engine="e", stream_id=None, reason="used"))
    (record,) = caplog.records
    assert "ends here" in record.getMessage()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        *[
            (url, "give http://HOST:PORT")
            for url in ("localhost:1", "http:/x", "http://h:port", "http://[::1", "ftp://h")
        ],
        ("http://user:SECRET@host:1/v1", r"URL of host has .* password; give them in a header"),
    ],
)
def test_a_text_that_is_not_a_url(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        engine_url(url)
    assert "SECRET" not in str(error.value)


def test_schemes_may_be_in_capitals() -> None:
    assert engine_url("HTTPS://Host:1/v1/") == "https://Host:1"


async def test_a_team_whose_engine_cannot_be_reached() -> None:
    client = FlashMoAChatCompletionClient(model="m", base_url=NOWHERE, max_retries=0)
    team = RoundRobinGroupChat([AssistantAgent("a", model_client=client)], max_turns=1)
    try:
        with pytest.raises(RuntimeError, match=f"{NOWHERE} cannot be reached.*`flashmoa serve`"):
            await team.run(task="x")
    finally:
        await client.close()


def lose(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("")


@pytest.mark.parametrize(
    ("handler", "kind", "problem"),
    [
        (None, EngineUnreachable, "`flashmoa serve` starts one"),
        (lose, EngineUnreachable, r"cannot be reached \(ReadError\)"),
        ((200, "<html>"), BadAnswer, "flashmoa doctor --engine"),
        ((404, "<html>"), PluginMissing, "or it is not an engine"),
        ((401, '{"error": "Unauthorized"}'), RequestRefused, "give it as api_key"),
    ],
)
async def test_a_server_that_is_not_an_engine(handler: Any, kind: Any, problem: str) -> None:
    async with EngineClient(NOWHERE) as client:
        if isinstance(handler, tuple):
            status, text = handler
            handler = lambda _: httpx.Response(status, text=text)  # noqa: E731
        if handler is not None:
            transport = httpx.MockTransport(handler)
            client._http = httpx.AsyncClient(base_url=NOWHERE, transport=transport)
        with pytest.raises(kind, match=problem):
            await client.info()
        if kind is BadAnswer:
            with pytest.raises(BadAnswer, match="Is the URL right"):
                async with client.chat([]) as deltas:
                    [delta async for delta in deltas]
