"""Test how the router watches engines, by what fake ones answer to its probes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import EngineMonitor, RoutedEngine
from flashmoa.router.prefix_aware import PrefixAware

pytestmark = pytest.mark.anyio
SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128
}  # fmt: skip


class Engines:
    """Answers probes of several engines, each with its own settings.

    Attributes:
        settings: each engine's ``/server_info`` by host; an engine without is not there.
        settings_status: the status of these answers.
        probes: the number of probes of each host.
    """

    def __init__(self, **settings: dict[str, Any]) -> None:
        self.settings = settings
        self.settings_status = 200
        self.probes: dict[str, int] = {}
        self.engines = {host: RoutedEngine(f"http://{host}") for host in settings}
        self.dispatcher = Dispatcher(PrefixAware())

    @asynccontextmanager
    async def monitored(self) -> AsyncGenerator[EngineMonitor]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(self._answer)) as http:
            yield EngineMonitor(http, self.dispatcher)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        await anyio.lowlevel.checkpoint()
        if host not in self.settings:
            raise httpx.ConnectError("refused")
        if request.url.path == "/health/ready":
            self.probes[host] = self.probes.get(host, 0) + 1
        if request.url.path == "/server_info":
            return httpx.Response(self.settings_status, json=self.settings[host])
        return httpx.Response(200, json={})


def config_at(folder: Path, config: object) -> dict[str, Any]:
    """Return the settings of an engine whose model has this config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return {"model_path": str(folder)}


async def test_work_of_all_engines_is_counted_in_the_measure_of_the_first(tmp_path: Path) -> None:
    rig = Engines(first=config_at(tmp_path, SHAPE), unreadable={"model_path": "/nowhere"})
    first, unreadable = rig.engines.values()
    async with rig.monitored() as monitor:
        await monitor.probe(first)
        await monitor.probe(unreadable)
        assert (first.unit, unreadable.unit) == ("FLOPs", "FLOPs")
        # If nothing is left to be compared with, the next one decides.
        settings, rig.settings = rig.settings, {}
        await monitor.probe(first)
        await monitor.probe(unreadable)
        rig.settings = settings
        await monitor.probe(unreadable)
        await monitor.probe(first)
    assert (first.unit, unreadable.unit) == ("tokens", "tokens")


@pytest.mark.parametrize(
    "config", [[], "text", 3, SHAPE | {"layer_types": 7}, SHAPE | {"layer_types": [{}, []]}, None]
)
async def test_engine_with_an_odd_config_joins_and_counts_tokens(
    tmp_path: Path, config: object
) -> None:
    rig = Engines(odd=config_at(tmp_path, config))
    async with rig.monitored() as monitor:
        await monitor.probe(rig.engines["odd"])
    assert rig.engines["odd"].is_up and rig.engines["odd"].unit == "tokens"


async def test_config_of_the_working_folder_is_not_an_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_at(tmp_path, SHAPE)
    monkeypatch.chdir(tmp_path)
    rig = Engines(silent={})
    async with rig.monitored() as monitor:
        await monitor.probe(rig.engines["silent"])
    assert rig.engines["silent"].unit == "tokens"


async def test_engine_that_fails_to_tell_its_settings_is_asked_again() -> None:
    rig = Engines(one={"chunked_prefill_size": 100})
    engine, rig.settings_status = rig.engines["one"], 500
    async with rig.monitored() as monitor:
        await monitor.probe(engine)
        assert not engine.is_up
        rig.settings_status = 200
        await monitor.probe(engine)
    assert engine.is_up and engine.saturation == 120


async def test_engine_that_never_answers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Engines(gone={})
    rig.settings.clear()
    with caplog.at_level(logging.WARNING):
        async with rig.monitored() as monitor:
            for _ in range(3):
                await monitor.probe(rig.engines["gone"])
    assert [record.getMessage() for record in caplog.records] == [
        "http://gone is not ready; it gets no requests until it is"
    ]


async def test_connections_that_break_together_cause_two_probes_at_most() -> None:
    rig = Engines(one={})
    engine = rig.engines["one"]
    async with rig.monitored() as monitor:
        await monitor.probe(engine)
        rig.probes.clear()
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(monitor.recheck, engine)
    assert engine.is_up and 1 <= rig.probes["one"] <= 2


async def test_events_at_no_port_are_not_followed_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    published = {"publisher": "zmq", "endpoint": "ipc:///tmp/events"}
    rig = Engines(one={"kv_events_config": json.dumps(published)})
    async with rig.monitored() as monitor:
        await monitor.probe(rig.engines["one"])
    assert rig.engines["one"].is_up and not rig.engines["one"].events
    assert "ipc:///tmp/events" in caplog.text and '"endpoint": "tcp://*:5557"' in caplog.text
