"""Test the messages that a newcomer gets if something is missing or in the wrong place."""

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
from flashmoa.engine import BadAnswer, EngineClient, EngineUnreachable, PluginMissing, engine_url
from flashmoa.errors import RequestRefused
from flashmoa.observe import LinkClosed
from flashmoa.observe.trace import Trace

pytestmark = pytest.mark.anyio
NOWHERE = "http://127.0.0.1:9"


def without(package: str, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_importing_without_autogen_says_what_to_install() -> None:
    said = without("autogen_agentchat", "import flashmoa.autogen")
    assert said.startswith("ModuleNotFoundError: flashmoa.autogen needs AutoGen")
    assert said.endswith("pip install 'flashmoa[autogen]'")


def test_a_benchmark_without_the_plugin_asks_for_engine_urls() -> None:
    script = "from flashmoa.cli import bench; sys.exit(bench.main(['chunk']))"
    assert without("flashmoa_sglang", script).endswith("give engines' URLs")


@pytest.mark.anyio
async def test_missing_and_unreadable_files_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This runs in another thread, because the session's event loop may run in this one.
    command = ["handoff", "--upstream-decodes", "--text", str(tmp_path / "no.md")]
    assert await anyio.to_thread.run_sync(bench.main, command) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert trace.main([str(tmp_path / "binary")]) == 1
    assert "is not a trace: it is not text" in capsys.readouterr().err


def test_a_full_disk_ends_a_trace_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    write = Trace("/dev/full")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write(LinkClosed(agent="a", engine="e", stream_id=None, reason="used"))
    (record,) = caplog.records
    assert "ends here" in record.getMessage()


@pytest.mark.parametrize(
    "url", ["localhost:1", "http:/x", "http://h:port", "http://[::1", "ftp://h"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give http://HOST:PORT"):
        engine_url(url)


async def test_a_team_without_its_engine_names_the_command_that_starts_one() -> None:
    client = FlashMoAChatCompletionClient(model="m", base_url=NOWHERE, max_retries=0)
    team = RoundRobinGroupChat([AssistantAgent("a", model_client=client)], max_turns=1)
    try:
        with pytest.raises(RuntimeError, match=f"{NOWHERE} cannot be reached.*`flashmoa serve`"):
            await team.run(task="x")
    finally:
        await client.close()


def answering(status: int, **content: object) -> EngineClient:
    """Return a client of a server that gives every request the same answer."""
    client = EngineClient(NOWHERE)
    client._http = httpx.AsyncClient(
        base_url=NOWHERE,
        transport=httpx.MockTransport(lambda _: httpx.Response(status, **content)),  # type: ignore[arg-type]
    )
    return client


async def test_a_lost_connection_is_reported_with_its_reason() -> None:
    def lost(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("")

    async with EngineClient(NOWHERE) as client:
        client._http = httpx.AsyncClient(base_url=NOWHERE, transport=httpx.MockTransport(lost))
        with pytest.raises(EngineUnreachable, match=r"cannot be reached \(ReadError\)"):
            await client.info()


async def test_servers_that_are_not_engines_are_reported_with_advice() -> None:
    async with EngineClient(NOWHERE) as client:
        with pytest.raises(EngineUnreachable, match="`flashmoa serve` starts one"):
            await client.info()
    async with answering(200, html="<html>") as client:
        with pytest.raises(BadAnswer, match="flashmoa doctor --engine"):
            await client.info()
        with pytest.raises(BadAnswer, match="Is the URL right"):
            async with client.chat([]) as deltas:
                async for _ in deltas:
                    pass
    async with answering(404, html="<html>") as client:
        with pytest.raises(PluginMissing, match="or it is not an engine"):
            await client.info()
    async with answering(401, json={"error": "Unauthorized"}) as client:
        with pytest.raises(RequestRefused, match="give it as api_key"):
            await client.info()
