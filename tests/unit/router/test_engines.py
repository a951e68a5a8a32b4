"""Test how the router watches engines, places prompts on them and learns from answers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from flashmoa.router.cache_tables import EngineTraits, token_blocks
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import EnginePool, RoutedEngine, RouterOptions
from flashmoa.router.flops import TOKENS
from flashmoa.router.forwarding import EngineLost, LimitReached, RouterError
from flashmoa.router.policy import PrefixAware
from flashmoa.router.saturation import FullLoad
from tests.unit.router.support import FakeConnections, FakeEngine, routing

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128
}  # fmt: skip
EVENTS = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7"})
RANKS = {"dp_size": 2, "chunked_prefill_size": 100, "max_total_num_tokens": 1600}
IPC = json.dumps({"publisher": "zmq", "endpoint": "ipc:///tmp/events"})
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
        failures: their answers instead, or the errors that requests raise, by path.
        asked: the paths that they were asked for.
    """

    def __init__(self, **settings: dict[str, Any]) -> None:
        self.settings: Mapping[str, Any] = settings
        self.plugin: object = {}
        self.failures: dict[str, object] = {}
        self.asked: list[str] = []
        self.policy = RecordingPolicy()
        self.dispatcher = Dispatcher(self.policy)
        options = RouterOptions([f"http://{host}" for host in settings])
        self.pool = EnginePool(FakeConnections(self._answer), self.dispatcher, options)

    def _answer(self, host: str, path: str) -> object:
        if host not in self.settings:
            raise EngineLost("refused", reached=False)
        self.asked.append(path)
        if isinstance(failure := self.failures.get(path, {}), RouterError):
            raise failure
        usual = {"/server_info": self.settings[host], "/flashmoa/info": self.plugin}
        return failure if path in self.failures else usual.get(path, {})

    def units(self) -> list[str]:
        return [traits.measure.unit for traits in self.policy.joined.values()]

    async def probe(self, host: str = "one") -> RoutedEngine:
        engine = self.pool.engines[f"http://{host}"]
        await self.pool.probe(engine)
        return engine


def config_at(folder: Path, config: object) -> dict[str, Any]:
    """Return the settings of an engine whose model has this config."""
    folder.mkdir(exist_ok=True)
    # Some editors begin a file with a mark of its encoding.
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    return {"model_path": str(folder)}


async def test_all_work_has_the_first_engines_measure(tmp_path: Path) -> None:
    engines = {"one": config_at(tmp_path, SHAPE), "unreadable": {"model_path": "/nowhere"}}
    rig = Rig(**engines)
    for host in engines:
        await rig.probe(host)
    assert rig.units() == ["FLOPs", "FLOPs"]
    rig = Rig(**engines)
    async with rig.pool.running():  # Both join at the same time.
        assert rig.units() in (["FLOPs", "FLOPs"], ["tokens", "tokens"])


@pytest.mark.parametrize("config", [[], 3, SHAPE | {"layer_types": [{}, []]}, None, ...])
async def test_an_engine_without_config_counts_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: object
) -> None:
    # Without a path from the engine, the config in the working folder must not be used.
    settings = config_at(tmp_path, SHAPE if config is ... else config)
    monkeypatch.chdir(tmp_path)
    rig = Rig(one={} if config is ... else settings)
    assert (await rig.probe()).is_up and rig.units() == ["tokens"]


@pytest.mark.parametrize("failure", [(500, {}), None, EngineLost("closed")])
async def test_an_engine_is_asked_again_for_settings(failure: object) -> None:
    rig = Rig(one={"chunked_prefill_size": 100, "kv_events_config": EVENTS})
    rig.failures["/server_info"] = failure
    async with rig.pool.running():
        assert not rig.policy.engines
        rig.failures.clear()
        engine = await rig.probe()
    assert engine.is_up and rig.policy.joined[URL].full == FullLoad(120)
    assert engine.events == "tcp://one:7"


async def test_engine_that_never_answers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(one={})
    rig.settings = {}
    async with rig.pool.running():
        for _ in range(3):
            await rig.probe()
    assert caplog.messages == ["http://one is not ready; it gets no requests until it is"]


@pytest.mark.parametrize(
    ("answer", "stays", "stays_after_a_failure"),
    [
        (None, True, False),
        (EngineLost("closed"), True, False),
        (EngineLost("refused", reached=False), False, False),
        (LimitReached("Too many open files"), True, True),
        ((503, {}), False, False),
        ((404, {}), True, True),  # A stock engine has no such route.
        ({}, True, True),
    ],
)
async def test_draining_and_failing_engines_leave(
    answer: object, stays: bool, stays_after_a_failure: bool
) -> None:
    rig = Rig(one={})
    for check, expected in (rig.pool.probe, stays), (rig.pool.recheck, stays_after_a_failure):
        rig.failures.clear()
        engine = await rig.probe()
        rig.failures["/health/ready"] = answer
        await check(engine)
        assert engine.is_up == bool(rig.policy.engines) == expected


@pytest.mark.parametrize(("answer", "most"), [({}, 2), (None, 1)])
async def test_failures_together_cause_two_probes(answer: object, most: int) -> None:
    rig = Rig(one={})
    engine = await rig.probe()
    rig.failures["/health/ready"] = answer
    rig.asked.clear()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(rig.pool.recheck, engine)
    assert engine.is_up == (answer is not None) and 1 <= rig.asked.count("/health/ready") <= most


@pytest.mark.parametrize(
    ("info", "saturation", "blocks"),
    [(RANKS, 240, 200), ({"dp_size": 1, "chunked_prefill_size": -1}, 9830, 1 << 16),
     ({}, 9830, 1 << 16)],
)  # fmt: skip
@pytest.mark.parametrize("told", [None, 50])
async def test_settings_are_multiplied_by_ranks(
    info: dict[str, int], saturation: int, blocks: int, told: int | None
) -> None:
    """An engine with the plugin tells its largest forward, which may be smaller than its chunks."""
    rig = Rig(one=info)
    rig.plugin = {"largest_forward": told} if told else (404, {"detail": "Not Found"})
    await rig.probe()
    if told is not None:
        saturation = int(1.2 * told) * info.get("dp_size", 1)
    assert rig.policy.joined == {URL: EngineTraits(TOKENS, FullLoad(saturation), blocks)}


@pytest.mark.parametrize(
    ("told", "full"),
    [
        ({"saturation": {"tokens": 90}, "prefills_wait_for": 90}, (120, 190)),
        # The largest forward hides no transfers, so no prefill waits.
        ({"saturation": {"tokens": 240}, "prefills_wait_for": None}, (240, 0)),
        ({"saturation": {"tokens": None}}, (120, 0)),
        ({"saturation": None, "prefills_wait_for": 50}, (120, 150)),
        ({"saturation": "broken", "prefills_wait_for": -1}, (120, 0)),
    ],
)
async def test_measured_forwards_fill_an_engine(
    told: dict[str, Any], full: tuple[int, int]
) -> None:
    """Two ranks have twice the work of a single rank.

    Hiding the transfers takes fewer or more tokens than the largest forward has.
    """
    rig = Rig(one=RANKS)
    rig.plugin = {"largest_forward": 100, "costs": {"decode_step": 1.0}, **told}
    await rig.probe()
    work, tokens = full
    assert rig.policy.joined[URL].full == FullLoad(2 * work, 2 * tokens)


async def test_an_engine_is_asked_until_it_has_measured_its_forwards() -> None:
    rig = Rig(one={"kv_events_config": IPC})
    rig.plugin = {"largest_forward": 10, "costs": None, "saturation": None}
    await rig.probe()
    placed: list[int] = []

    async def ask(number: int) -> None:
        async with rig.dispatcher.place(token_blocks([number] * 20)):
            placed.append(number)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(ask, number)
            await anyio.wait_all_tasks_blocked()
        assert placed == [0]
        # The engine is busy, and does not answer this time.
        rig.failures["/flashmoa/info"] = None
        await rig.probe()
        rig.failures.clear()
        rig.plugin = {"largest_forward": 10, "costs": {}, "saturation": {"tokens": 30}}
        await rig.probe()
        await anyio.wait_all_tasks_blocked()
        # With 30 tokens it is full, and no longer with 12.
        assert placed == [0, 1]
        group.cancel_scope.cancel()
    rig.asked.clear()
    await rig.probe()
    assert rig.asked == ["/health/ready"]


@pytest.mark.parametrize("answer", [{}, (404, {}), (401, {}), {"capabilities": []}])
async def test_an_engine_without_costs_is_asked_once(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(one={})
    rig.failures["/flashmoa/info"] = answer
    for _ in range(3):
        assert (await rig.probe()).is_up
    assert rig.asked.count("/flashmoa/info") == 1 and len(caplog.records) <= 1


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"kv_events_config": IPC}, ["ipc:///tmp/events", '"endpoint": "tcp://*:5557"']),
        (RANKS | {"kv_events_config": EVENTS}, ["each data-parallel rank has its own"]),
    ],
)
async def test_unusable_events_are_logged(
    settings: dict[str, Any], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = await Rig(one=settings).probe()
    assert engine.is_up and engine.events is None
    assert all(text in caplog.text for text in logged)


async def test_prompts_follow_a_stream_like_them() -> None:
    engines = [FakeEngine("s"), FakeEngine("s")]
    async with routing(*engines) as router:
        await router.post("/generate", text="a" * 400)
        await router.post("/prompt_streams", text="b" * 400)
        await router.post("/prompt_streams/s/append", text="more")
        # From now on the other engine has less in its cache, and gets new prompts.
        await router.post("/generate", text="b" * 4000)
        await router.post("/generate", text="c" * 400, prompt_stream_id="s")
        await router.post("/generate", text="c" * 500)
    assert sorted(len(engine.requests) for engine in engines) == [1, 5]


@pytest.mark.parametrize(("margin", "threshold"), [(1e-9, b" 1.0"), (2.0, b" 16384.0"), (0, None)])
async def test_engines_take_requests_at_any_saturation(
    margin: float, threshold: bytes | None
) -> None:
    async with routing(FakeEngine(), saturation_margin=margin) as router:
        with anyio.fail_after(30):
            await router.post("/generate", text="x")
        _status, page = await router("GET", "/metrics")
        lines = [line for line in page.splitlines() if b"engine_threshold{" in line]
        assert (lines == []) if threshold is None else lines[0].endswith(threshold)
