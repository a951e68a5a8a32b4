"""How costs are learned while an engine starts and serves, or read from a file; without engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang import plugin  # noqa: E402
from flashmoa_sglang.costs import UNMEASURED, Costs, TimedForward  # noqa: E402
from flashmoa_sglang.http import calibration  # noqa: E402
from flashmoa_sglang.http.calibration import (  # noqa: E402
    LearnedCosts,
    WarmUp,
    calibrate,
    learn_costs,
    read_costs,
)
from flashmoa_sglang.http.errors import EngineBusy, EngineFailed  # noqa: E402
from flashmoa_sglang.messages import ForwardTimes, RequestMark  # noqa: E402
from flashmoa_sglang.saturation import LayerTimes, Saturation  # noqa: E402

pytestmark = pytest.mark.anyio
SIZES = [1, 4, 16, 64, 128, 256, 512, 1024]


def seconds(decodes: int, kv: int, tokens: int, pairs: int) -> float:
    """Return how long a forward takes: 64 tokens each take 1 ms, and the first 5 ms."""
    blocks = ceil((decodes + tokens) / 64) if tokens else 0
    return 0.005 + 0.001 * blocks + 3e-8 * kv + 1e-9 * pairs


class FakeEngine:
    """An engine that runs the requests that measure it, each in a forward of its own.

    Args:
        after: how many of its forwards a client's request comes.
        refuses: how many answers it has no place for.
        replaced: in place of the class's own attributes.
    """

    max_unchunked_prompt = 2048
    max_prompt_tokens = 6000
    vocabulary = 100
    role = None
    steps_together = False
    draining = warming_up = False
    waits_for: int | None = None
    saturation: Any = None
    no_rides = ""
    max_running = (64, 32)
    finish_reason: Any = None
    # The times of layers with their experts, by the tokens of a forward.
    layers: Callable[[int], LayerTimes | None] = staticmethod(lambda _: None)

    def __init__(self, *, after: int = 1 << 30, refuses: int = 0, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self.costs = UNMEASURED
        self.told: list[Costs] = []
        self.forwards: list[TimedForward] = []
        self.marks: list[RequestMark] = []
        self._after = after
        self._refuses = refuses
        self._cached: set[tuple[int, ...]] = set()
        self._decoding: dict[str, int] = {}

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        assert kind is ForwardTimes
        self.report = handler

    def others_active(self) -> bool:
        return len(self.forwards) >= self._after

    def why_no_kv(self) -> str | None:
        return None

    def largest_forward(self, _ranks: list[Any]) -> int:
        return self.max_unchunked_prompt

    def use_costs(self, costs: Costs, waits_for: int | None) -> None:
        if costs is not self.costs:
            self.told.append(costs)
        self.costs, self.waits_for = costs, waits_for

    async def kv(self) -> list[Any]:
        off = {"no_rides": self.no_rides, "late_kv": ""}
        return [SimpleNamespace(max_running=most, total=8000, **off) for most in self.max_running]

    def abort(self, rid: str) -> None:
        self._decoding.pop(rid, None)

    def run(self, tokens: int, pairs: int, *, rides: bool = False) -> None:
        decodes = len(self._decoding) if rides else 0
        what = decodes, sum(self._decoding.values()), tokens, pairs
        forward = TimedForward(*what, seconds(*what))
        self.forwards.append(forward)
        self.report(ForwardTimes((forward,), self.layers(tokens)))

    async def generate(
        self,
        input_ids: list[int],
        mark: RequestMark,
        *,
        rid: str = "",
        new_tokens: int = 0,
        on_token: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        assert mark.timed
        assert len(input_ids) <= self.max_prompt_tokens
        self.marks.append(mark)
        known = (n for n in range(len(input_ids), 1, -1) if tuple(input_ids[:n]) in self._cached)
        cached = next(known, 0)
        if new_tokens:
            await self._decode(rid, len(input_ids), on_token)
        elif cached < len(input_ids):
            tokens = len(input_ids) - cached
            self._cached.add(tuple(input_ids))
            self.run(tokens, tokens * cached, rides=mark.rides and not self.no_rides)
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(input_ids),
            "cached_tokens": cached,
        }

    async def _decode(
        self, rid: str, prompt: int, on_token: Callable[[dict[str, Any]], None] | None
    ) -> None:
        if self._refuses:
            self._refuses -= 1
            raise EngineBusy("no place")
        self._decoding[rid] = prompt
        written = 0
        while rid in self._decoding:
            written += 1
            if on_token is not None:
                # The last answer has this; so all decode.
                what = len(self._decoding), sum(self._decoding.values()), 0, 0
                self.report(ForwardTimes((TimedForward(*what, seconds(*what)),)))
                on_token({"completion_tokens": written})
            await asyncio.sleep(0)


@pytest.fixture
def engine() -> Any:
    return FakeEngine()


@asynccontextmanager
async def learning(engine: Any) -> AsyncGenerator[None]:
    """Let an engine learn its costs while it serves."""
    async with anyio.create_task_group() as group:
        group.start_soon(learn_costs, engine)
        await anyio.wait_all_tasks_blocked()
        yield
        group.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def test_an_engine_knows_its_costs_before_the_first_request(engine: Any) -> None:
    await calibrate(engine)
    assert len(engine.told) == 1 and engine.waits_for is None
    for tokens in SIZES:
        for context in (0, 4000):
            expected = seconds(0, 0, tokens, tokens * context)
            assert engine.costs.prefill(tokens, context) == pytest.approx(expected, rel=0.02)
    for decodes in (1, 8, 32):
        for context in (0, 4000):
            expected = seconds(decodes, decodes * context, 0, 0)
            assert engine.costs.decode(decodes, decodes * context) == pytest.approx(
                expected, rel=0.02
            )
        for size in (64, 128, 256, 512):
            added = engine.costs.added(decodes, size - decodes)
            assert added == pytest.approx(0.001 * size / 64, rel=0.02)
    # Nothing is left that decodes.
    assert not engine._decoding


@pytest.mark.parametrize(
    ("replaced", "decodes"),
    [({}, {1, 8, 32}), ({"max_running": (32, 31)}, {1, 8}), ({"no_rides": "it cannot"}, set())],
)
async def test_steps_run_with_as_many_decodes_as_each_rank_has_places_for(
    replaced: dict[str, Any], decodes: set[int]
) -> None:
    engine: Any = FakeEngine(**replaced)
    await calibrate(engine)
    assert {forward.decodes for forward in engine.forwards if forward.tokens > 1} - {0} == decodes
    assert {n for n, tokens, _ in engine.costs.mixed if not tokens} > {1, 8}


@pytest.mark.parametrize("no_rides", ["it cannot", ""], ids=["cannot", "slow"])
async def test_answers_run_once_if_nothing_can_ride_with_them(
    no_rides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps are many, and slow where nothing rides: on a CPU core."""
    monkeypatch.setattr(calibration, "_LONG_SECONDS", 0.08)

    class Counting(FakeEngine):
        answers = 0

        async def _decode(self, *args: Any) -> None:
            self.answers += 1
            await super()._decode(*args)

        def run(self, tokens: int, pairs: int, *, rides: bool = False) -> None:
            if rides:
                time.sleep(0.1)
            super().run(tokens, pairs, rides=rides)

    engine: Any = Counting(no_rides=no_rides)
    await calibrate(engine)
    behind_a_context = 1 + 32
    assert engine.answers == 1 + 8 + 32 + behind_a_context


async def test_a_slow_engine_runs_small_forwards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LONG_SECONDS", 0.0)
    engine: Any = FakeEngine()
    await calibrate(engine)
    assert max(forward.tokens for forward in engine.forwards if not forward.decodes) == 4
    assert len(engine.costs.points) >= 2


async def test_first_forwards_that_compile_kernels_do_not_end_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "_LONG_SECONDS", 0.08)

    class Compiling(FakeEngine):
        compiled: set[tuple[bool, int]]

        def run(self, tokens: int, pairs: int, *, rides: bool = False) -> None:
            if (rides, tokens) in self.compiled:
                self.compiled.remove((rides, tokens))
                time.sleep(0.1)
            super().run(tokens, pairs, rides=rides)

    first = {(False, 4), (False, 16), (True, 31), (True, 64 - 8), (True, 128 - 32)}
    engine: Any = Compiling(compiled=set(first))
    await calibrate(engine)
    assert not engine.compiled
    assert max(forward.tokens for forward in engine.forwards if not forward.decodes) == 1024
    for decodes in (1, 8, 32):
        ran = [forward.tokens for forward in engine.forwards if forward.decodes == decodes]
        assert {ran.count(size - decodes) for size in (64, 128, 256, 512)} <= {3, 4}


@pytest.mark.parametrize("after", [0, 1, 5, 40])
async def test_the_first_request_of_a_client_ends_what_an_engine_measures_on_its_own(
    after: int,
) -> None:
    engine: Any = FakeEngine(after=after)
    learned = await calibrate(engine)
    assert len(engine.forwards) == after and not engine._decoding
    # It goes on with what ran before, and with the forwards of clients.
    assert (engine.costs is not UNMEASURED) == (after == 40)
    engine.report(ForwardTimes((TimedForward(0, 0, 300, 0, 0.01),) * 64))
    engine.report(ForwardTimes((TimedForward(0, 0, 900, 0, 0.02),) * 64))
    await learned.learn()
    assert engine.costs is not UNMEASURED


@pytest.mark.parametrize("asyncep", ["off", "h2d"])
async def test_an_engine_that_is_never_idle_learns_from_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, asyncep: str
) -> None:
    """Also one that waits until it is idle, in order to measure what clients' forwards do not."""
    monkeypatch.setenv("FLASHMOA_ASYNCEP", asyncep)
    monkeypatch.setattr(calibration, "_LEARN_SECONDS", 0.0)
    engine: Any = FakeEngine(after=0)
    async with learning(engine):
        assert engine.costs is UNMEASURED
        for tokens in (300, 1500) * 40:
            engine.run(tokens, tokens * 1000)
        await until(lambda: engine.costs is not UNMEASURED)
    assert engine.costs.prefill(300, 1000) == pytest.approx(seconds(0, 0, 300, 300000), rel=0.02)


@pytest.mark.parametrize("changes", [False, True])
async def test_costs_are_told_again_if_they_have_changed(engine: Any, changes: bool) -> None:
    learned = await calibrate(engine)
    before = engine.costs
    forward = TimedForward(0, 0, 512, 0, seconds(0, 0, 512, 0) * (1.5 if changes else 1))
    for _ in range(64):
        engine.report(ForwardTimes((forward,)))
    await learned.learn()
    assert len(engine.told) == 1 + changes
    ratio = engine.costs.prefill(512) / before.prefill(512)
    assert ratio == pytest.approx(1.5 if changes else 1)


async def test_costs_are_not_learned_more_often_than_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    monkeypatch.setattr(calibration, "_LEARN_SECONDS", 3600.0)
    async with learning(engine):
        await until(lambda: len(engine.told) == 1)
        for times in (1.0, 5.0, 9.0):
            engine.report(ForwardTimes((TimedForward(0, 0, 512, 0, times),) * 64))
            await until(lambda: len(engine.told) == 2)
            await anyio.wait_all_tasks_blocked()
    assert len(engine.told) == 2


async def test_an_engine_that_copies_experts_waits_until_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It measures what the clients' forwards do not tell: the times of layers."""
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "h2d")
    monkeypatch.setattr(calibration, "_IDLE_POLL", 0.0)

    class Busy(FakeEngine):
        polls = 0

        def others_active(self) -> bool:
            self.polls += 1
            return self.polls % 3 != 0

    engine: Any = Busy(layers=lambda tokens: LayerTimes(tokens, tokens * 1e-5, 0.003))
    await calibrate(engine)
    assert engine.saturation.tokens == pytest.approx(361, abs=1)
    assert engine.waits_for == engine.saturation.tokens
    assert engine.costs.prefill(1024) == pytest.approx(seconds(0, 0, 1024, 0), rel=0.02)


async def test_forwards_that_hide_no_transfers_are_followed_by_larger_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "h2d")
    monkeypatch.setattr(calibration, "_LONG_SECONDS", 0.0)
    engine: Any = FakeEngine(layers=lambda tokens: LayerTimes(tokens, tokens * 1e-5, 0.003))
    await calibrate(engine)
    assert max(forward.tokens for forward in engine.forwards if not forward.decodes) == 512


async def test_nothing_more_is_measured_once_the_engine_drains(engine: Any) -> None:
    engine.draining = True
    await calibrate(engine)
    assert not engine.marks and engine.costs is UNMEASURED


@pytest.mark.parametrize(("together", "expected"), [(False, 500), (True, None)])
async def test_an_engine_says_for_how_many_tokens_prefills_wait(
    monkeypatch: pytest.MonkeyPatch, together: bool, expected: int | None
) -> None:
    monkeypatch.setenv("FLASHMOA_SATURATION", "500")
    engine: Any = FakeEngine(steps_together=together)
    await calibrate(engine)
    assert engine.waits_for == expected and engine.costs is not UNMEASURED


async def test_an_engine_says_at_start_what_it_does_not_do_for_streams(
    caplog: pytest.LogCaptureFixture, engine: Any
) -> None:
    await calibrate(engine)
    assert "off, because" not in caplog.text
    ranks = await engine.kv()
    for rank in ranks:
        rank.no_rides, rank.late_kv = "it decodes speculatively", "the tree copies it"
    calibration._log_what_is_off(ranks)
    assert caplog.text.count("rides: off, because it decodes speculatively.") == 1
    assert caplog.text.count("sharing: off, because the tree copies it.") == 1


async def test_if_a_forward_is_aborted_costs_are_learned_from_clients_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: Any = FakeEngine(finish_reason={"type": "abort", "message": "too late"})
    learned = await calibrate(engine)
    assert "too late" in caplog.text and engine.costs is UNMEASURED
    for tokens in (300, 1500) * 40:
        engine.run(tokens, 0)
    await learned.learn()
    assert engine.costs.prefill(300) == pytest.approx(seconds(0, 0, 300, 0), rel=0.02)


@pytest.mark.parametrize("longest", [100, 1100, 2100, 2500, 4000])
async def test_no_context_is_longer_than_a_prompt_may_be(longest: int) -> None:
    engine: Any = FakeEngine(max_prompt_tokens=longest, max_unchunked_prompt=longest // 2)
    await calibrate(engine)
    size = max(size for size in SIZES if size <= longest // 4)
    expected = seconds(0, 0, size, size * longest // 2)
    assert engine.costs.prefill(size, longest // 2) == pytest.approx(expected, rel=0.02)


async def test_answers_that_find_no_place_hold_up_nothing() -> None:
    engine: Any = FakeEngine(refuses=2)
    with anyio.fail_after(5):
        async with WarmUp(engine, LearnedCosts(engine))._decoding(3, [0]):
            assert len(engine._decoding) == 1
    assert not engine._decoding


async def test_answers_end_if_what_rides_with_them_fails(engine: Any) -> None:
    with anyio.fail_after(5), pytest.raises(ExceptionGroup):
        async with WarmUp(engine, LearnedCosts(engine))._decoding(3, [0]):
            raise EngineFailed("it failed")
    assert not engine._decoding


MEASURED = Costs(((1, 0.01), (512, 0.04)), 0.008, ((1, 0, 0.008), (1, 31, 0.009)), 3e-8, 1e-9)
SATURATED = Saturation(700, 8192, 0.003, ((64, 0.001), (512, 0.002)))


def save(folder: Path, **info: Any) -> str:
    """Save an answer of ``GET /flashmoa/info``, which has more fields than those that count."""
    file = folder / "info.json"
    file.write_text(json.dumps({"plugin": {"version": "9"}, "prompt_streams": 2, **info}))
    return str(file)


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    file = save(tmp_path, costs=asdict(MEASURED), saturation=asdict(SATURATED))
    assert read_costs(file) == (MEASURED, SATURATED)
    assert read_costs(save(tmp_path, costs=asdict(MEASURED), saturation=None)) == (MEASURED, None)
    # Engines of older versions say nothing of what contexts cost.
    old = {name: asdict(MEASURED)[name] for name in ("points", "decode_step", "mixed")}
    assert read_costs(save(tmp_path, costs=old))[0] == replace(MEASURED, per_kv_token=0, per_pair=0)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "costs: Field required"),
        ({"costs": None}, "had not measured its costs yet"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1]]}}, "two different sizes"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1], [2]]}}, "costs.points.1.1"),
        ({"costs": asdict(MEASURED) | {"decode_step": -1}}, "not numbers from 0 on"),
        ({"costs": asdict(MEASURED) | {"per_pair": -1}}, "not numbers from 0 on"),
        ({"costs": asdict(MEASURED) | {"mixed": [[1, 31, float("inf")]]}}, "not numbers from 0 on"),
    ],
)
def test_a_file_without_costs_is_refused_with_the_reason(
    tmp_path: Path, info: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_costs(save(tmp_path, **info))


@pytest.mark.parametrize("content", [None, b"", b"costs", b"\xff\xfe"])
def test_an_engine_does_not_start_if_its_file_has_no_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "info.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("FLASHMOA_COSTS", str(file))
    with pytest.raises(SystemExit, match=r"--flashmoa-costs .*info\.json"):
        arguments = SimpleNamespace(tokenizer_worker_num=1)
        plugin.attach_api(None, SimpleNamespace(server_args=arguments))


async def test_an_engine_with_a_file_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path, costs=asdict(MEASURED), saturation=asdict(SATURATED))
    monkeypatch.setenv("FLASHMOA_COSTS", file)
    engine: Any = FakeEngine()
    await calibrate(engine)
    assert engine.costs == MEASURED and engine.saturation == SATURATED
    assert engine.waits_for == SATURATED.tokens
    assert not engine.marks
