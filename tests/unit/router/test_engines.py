"""Test how the router watches engines and their data-parallel ranks, and what it asks of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from flashmoa.router.cache_tables import EngineTraits
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import EnginePool, RoutedEngine, RouterOptions, merge_info, split_place
from flashmoa.router.errors import EngineLost
from flashmoa.router.flops import TOKENS
from flashmoa.router.kv_events import EventSource
from flashmoa.router.policy import PrefixAware
from tests.unit.router.support import KEY, FakeConnections, FakeEngine, routing

pytestmark = pytest.mark.anyio
SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128
}  # fmt: skip
EVENTS = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7"})
RANKS = {"dp_size": 2, "chunked_prefill_size": 100, "max_total_num_tokens": 1600}
URL = "http://one"


class RecordingPolicy(PrefixAware):
    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[str, EngineTraits] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.joined[engine] = traits
        super().join(engine, traits)


class Rig:
    """A pool of fake engines.

    Attributes:
        settings: each engine's ``/server_info`` by host; an engine without is not there.
        plugin: what their ``/flashmoa/info`` answers.
        failures: what they answer instead at a path, or the error that is raised.
    """

    def __init__(self, **settings: dict[str, Any]) -> None:
        self.settings: Mapping[str, Any] = settings
        self.plugin: object = {}
        self.failures: dict[str, object] = {}
        self.probes = 0
        self.policy = RecordingPolicy()
        self.dispatcher = Dispatcher(self.policy)
        options = RouterOptions([f"http://{host}" for host in settings])
        self.pool = EnginePool(FakeConnections(self._answer), self.dispatcher, options)
        self.engines = {host: self.pool.engines[f"http://{host}"] for host in settings}

    def _answer(self, host: str, path: str) -> object:
        if host not in self.settings:
            raise EngineLost("refused", reached=False)
        self.probes += path == "/health/ready"
        if path in self.failures:
            if isinstance(failure := self.failures[path], EngineLost):
                raise failure
            return failure
        return {"/server_info": self.settings[host], "/flashmoa/info": self.plugin}.get(path, {})

    def units(self) -> list[str]:
        return [traits.measure.unit for traits in self.policy.joined.values()]

    async def probe(self, host: str = "one") -> RoutedEngine:
        await self.pool.probe(self.engines[host])
        return self.engines[host]


def config_at(folder: Path, config: object) -> dict[str, Any]:
    """Return the settings of an engine whose model has this config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return {"model_path": str(folder)}


async def test_work_of_all_engines_is_counted_in_the_measure_of_the_first(tmp_path: Path) -> None:
    rig = Rig(first=config_at(tmp_path, SHAPE), unreadable={"model_path": "/nowhere"})
    hosts = ("first", "unreadable")
    for host in hosts:
        await rig.probe(host)
    assert rig.units() == ["FLOPs", "FLOPs"]
    # If nothing is left to be compared with, the next one decides.
    settings, rig.settings = rig.settings, {}
    for host in hosts:
        await rig.probe(host)
    rig.settings = settings
    for host in reversed(hosts):
        await rig.probe(host)
    assert rig.units() == ["tokens", "tokens"]


@pytest.mark.parametrize("config", [[], 3, SHAPE | {"layer_types": [{}, []]}, None, ...])
async def test_engine_without_a_config_that_can_be_read_joins_and_counts_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: object
) -> None:
    # If the engine does not tell where its config is, that of the working folder is not it.
    settings = config_at(tmp_path, SHAPE if config is ... else config)
    monkeypatch.chdir(tmp_path)
    rig = Rig(one={} if config is ... else settings)
    assert (await rig.probe()).is_up and rig.units() == ["tokens"]


@pytest.mark.parametrize("failure", [(500, {}), None, EngineLost("closed")])
async def test_engine_that_fails_to_tell_its_settings_is_asked_again(failure: object) -> None:
    rig = Rig(one={"chunked_prefill_size": 100, "kv_events_config": EVENTS})
    rig.failures["/server_info"] = failure
    assert not (await rig.probe()).is_up and not rig.dispatcher.engines
    rig.failures.clear()
    engine = await rig.probe()
    assert engine.is_up and rig.policy.joined[URL].saturation == 120
    assert engine.events == (EventSource("tcp://one:7"),)


async def test_engine_that_never_answers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(one={})
    rig.settings = {}
    async with anyio.create_task_group() as group:
        group.start_soon(rig.pool.watch, rig.engines["one"])
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            await rig.probe()
        group.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "http://one is not ready; it gets no requests until it is"
    ]


async def test_connections_that_break_together_cause_two_probes_at_most() -> None:
    rig = Rig(one={})
    engine = await rig.probe()
    rig.probes = 0
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(rig.pool.recheck, engine)
    assert engine.is_up and 1 <= rig.probes <= 2


@pytest.mark.parametrize(
    ("answer", "stays", "stays_after_a_loss"),
    [
        (None, True, False),
        (EngineLost("closed"), True, False),
        (EngineLost("refused", reached=False), False, False),
        ((503, {}), False, False),
        ((404, {}), True, True),  # A stock engine has no such route.
        ({}, True, True),
    ],
)
async def test_engine_that_drains_leaves_and_a_silent_one_if_it_also_lost_a_connection(
    answer: object, stays: bool, stays_after_a_loss: bool
) -> None:
    rig = Rig(one={})
    for check, expected in ((rig.pool.probe, stays), (rig.pool.recheck, stays_after_a_loss)):
        rig.failures.clear()
        engine = await rig.probe()
        rig.failures["/health/ready"] = answer
        await check(engine)
        assert engine.is_up == bool(rig.dispatcher.engines) == expected


@pytest.mark.parametrize(
    ("info", "saturation", "blocks"),
    [
        (RANKS, 240, 200),
        ({"dp_size": 1, "chunked_prefill_size": -1}, 9830, 1 << 16),
        ({}, 9830, 1 << 16),
    ],
)
@pytest.mark.parametrize("told", [None, 50])
async def test_settings_of_one_rank_are_multiplied_by_ranks_that_cannot_be_named(
    info: dict[str, int], saturation: int, blocks: int, told: int | None
) -> None:
    """An engine with the plugin tells its largest forward, which may be smaller than its chunks."""
    rig = Rig(one=info)
    rig.plugin = {"largest_forward": told} if told else (404, {"detail": "Not Found"})
    await rig.probe()
    if told is not None:
        saturation = int(1.2 * told) * info.get("dp_size", 1)
    assert rig.policy.joined == {URL: EngineTraits(TOKENS, saturation, blocks)}


async def test_events_at_no_port_are_not_followed_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    published = {"publisher": "zmq", "endpoint": "ipc:///tmp/events"}
    engine = await Rig(one={"kv_events_config": json.dumps(published)}).probe()
    assert engine.is_up and not engine.events
    assert "ipc:///tmp/events" in caplog.text and '"endpoint": "tcp://*:5557"' in caplog.text


async def test_each_rank_joins_with_the_settings_of_one_and_leaves_with_its_engine() -> None:
    rig = Rig(one=RANKS | {"kv_events_config": EVENTS})
    rig.plugin = {"data_parallel_ranks": 2}
    engine = await rig.probe()
    traits = EngineTraits(TOKENS, 120, 100)
    assert rig.policy.joined == {f"{URL}#0": traits, f"{URL}#1": traits}
    assert [split_place(place) for place in engine.places] == [(URL, 0), (URL, 1)]
    assert len(engine.events) == 2 == len(rig.dispatcher.engines)
    rig.failures["/health/ready"] = (503, {})
    await rig.probe()
    assert not rig.dispatcher.engines


@pytest.mark.parametrize("plugin", [(404, {}), {}, {"data_parallel_ranks": 3}])
async def test_engine_whose_ranks_cannot_be_named_or_told_apart_joins_as_one(
    plugin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The third one publishes the events of two ranks and has three."""
    rig = Rig(one=RANKS | {"kv_events_config": EVENTS})
    rig.plugin = plugin
    assert not (await rig.probe()).events
    assert list(rig.policy.joined) == [URL]
    ranks = 3 if "data_parallel_ranks" in plugin else 2
    messages = [record.message for record in caplog.records if "ranks" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(f"{URL} chooses itself among its {ranks} data-parallel ranks")


A, B = "a" * 400, "b" * 400
SEARCH: dict[str, Any] = {"text": B, "prompt_stream_id": "s"}


@pytest.mark.parametrize(
    ("ranks", "requests", "expected"),
    [
        # A stream and all about it name one rank, and another prefix names another one.
        (
            2,
            [
                ("/generate", {"text": A}),
                ("/prompt_streams", {"text": B}),
                ("/prompt_streams/s/append", {"text": "more"}),
                ("/generate", SEARCH),
            ],
            ["0", "1", "1", "1"],
        ),
        # A router that has restarted knows the engine of a stream only, which knows the rank.
        (2, [("/generate", SEARCH)], [None, None]),
        # A client may name a rank of an engine that chooses itself.
        (1, [("/generate", {"text": A})], ["7"]),
    ],
)
async def test_requests_name_a_rank(
    ranks: int, requests: list[tuple[str, dict[str, Any]]], expected: list[str | None]
) -> None:
    engine = FakeEngine("s", ranks=ranks)
    headers = KEY | ({"X-Data-Parallel-Rank": "7"} if ranks == 1 else {})
    async with routing(engine) as router:
        for path, body in requests:
            content = json.dumps(body).encode()
            assert (await router("POST", path or "/generate", content, headers))[0] == 200
    assert engine.named_ranks == expected


class SilentConnections(FakeConnections):
    """One engine has every stream, and the other one never answers."""

    def __init__(self) -> None:
        super().__init__(lambda _host, _path: {})

    async def ask(self, method: str, url: str, *rest: Any, **more: Any) -> Any:
        if url.startswith("http://silent"):
            await anyio.sleep_forever()
        return await super().ask(method, url, *rest, **more)


async def test_a_silent_engine_does_not_delay_the_search_for_a_stream() -> None:
    options = RouterOptions(["http://silent", URL])
    pool = EnginePool(SilentConnections(), Dispatcher(PrefixAware()), options)
    for engine in pool.engines.values():
        engine.is_up = True
    with anyio.fail_after(2):
        assert await pool.place_of_stream("abc", {}) == URL
        # A stream of a rank that is gone is looked for again.
        pool.remember_stream("abc", f"{URL}#1")
        assert await pool.place_of_stream("abc", {}) == URL


def test_merged_info_has_the_abilities_of_all_engines() -> None:
    one = {"capabilities": ["a", "b"], "context_length": 100, "prompt_streams": 1, "kv": [1]}
    other = {"capabilities": ["b"], "context_length": 50, "prompt_streams": 2, "kv": [2]}
    expected = {"capabilities": ["b"], "context_length": 50, "prompt_streams": 3, "kv": [1, 2]}
    assert merge_info([one, other]) == expected | {"data_parallel_ranks": 1}
    # An engine without the plugin has no abilities, and others cannot lend it theirs.
    assert merge_info([{}, one])["capabilities"] == []
    assert merge_info([{}, one])["context_length"] == 100
