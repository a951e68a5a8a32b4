"""Messages to a user who lacks a package, a file or an engine, or has a wrong URL."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import anyio
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
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
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
        ("flashmoa.moa", "numpy", "numpy", "moa"),
        ("flashmoa.observe.opentelemetry", "opentelemetry", "OpenTelemetry", "opentelemetry"),
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


async def test_missing_or_binary_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # anyio.run() needs a thread without the session's event loop.
    command = ["score-accuracy", str(tmp_path / "no.txt")]
    assert await anyio.to_thread.run_sync(bench, command) == 1
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
    "url", ["localhost:1", "http:/x", "http://h:port", "http://[::1", "ftp://h"]
)
def test_a_text_that_is_not_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="give http://HOST:PORT"):
        engine_url(url)


def test_a_refused_password_is_not_shown() -> None:
    with pytest.raises(
        ValueError, match=r"URL of host has .* password; give them in a header"
    ) as e:
        engine_url("http://user:SECRET@host:1/v1")
    assert "SECRET" not in str(e.value)


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


def client_of_server(status: int, **content: object) -> EngineClient:
    """Return a client of a server that gives every request the same answer."""
    client = EngineClient(NOWHERE)
    client._http = httpx.AsyncClient(
        base_url=NOWHERE,
        transport=httpx.MockTransport(lambda _: httpx.Response(status, **content)),  # type: ignore[arg-type]
    )
    return client


async def test_a_lost_connection_has_a_reason() -> None:
    def lost(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("")

    async with EngineClient(NOWHERE) as client:
        client._http = httpx.AsyncClient(base_url=NOWHERE, transport=httpx.MockTransport(lost))
        with pytest.raises(EngineUnreachable, match=r"cannot be reached \(ReadError\)"):
            await client.info()


async def test_a_server_that_is_not_an_engine() -> None:
    async with EngineClient(NOWHERE) as client:
        with pytest.raises(EngineUnreachable, match="`flashmoa serve` starts one"):
            await client.info()
    async with client_of_server(200, html="<html>") as client:
        with pytest.raises(BadAnswer, match="flashmoa doctor --engine"):
            await client.info()
        with pytest.raises(BadAnswer, match="Is the URL right"):
            async with client.chat([]) as deltas:
                async for _ in deltas:
                    pass
    async with client_of_server(404, html="<html>") as client:
        with pytest.raises(PluginMissing, match="or it is not an engine"):
            await client.info()
    async with client_of_server(401, json={"error": "Unauthorized"}) as client:
        with pytest.raises(RequestRefused, match="give it as api_key"):
            await client.info()
