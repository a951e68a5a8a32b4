"""How costs are measured, with noise, or read from a file; without engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang import plugin  # noqa: E402
from flashmoa_sglang.costs import Costs  # noqa: E402
from flashmoa_sglang.http import calibration  # noqa: E402
from flashmoa_sglang.http.calibration import TimedRequests, calibrate, measure, read_costs  # noqa: E402
from flashmoa_sglang.http.errors import EngineBusy, EngineFailed  # noqa: E402
from flashmoa_sglang.messages import MEASURED_STEPS, ForwardTime, RequestMark  # noqa: E402
from flashmoa_sglang.saturation import Saturation  # noqa: E402

pytestmark = pytest.mark.anyio

# Tokens of the prefills that are measured here, and of the steps in which tokens ride.
SIZES = (1, 4, 16, 64, 128, 256, 512, 1024)
STEPS = (32, 64, 128, 256, 512)


def riding(decodes: int) -> list[int]:
    return [step - decodes for step in STEPS if step > decodes]


class FakeEngine:
    """An engine whose forwards take given times, and which measures them itself.

    Args:
        seconds: by the tokens of a forward, and how many of that length there were before.
        most_decodes: the most requests that decode in a forward that also prefills.
        ride_seconds: what a token adds to such a forward.
    """

    max_unchunked_prompt = 2048
    vocabulary = 100
    role = "null"
    # The most requests that decode together, of each data-parallel rank.
    max_running = (64, 32)

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        *,
        steps_together: bool = False,
        most_decodes: int = 0,
        ride_seconds: float = 1e-4,
        **replaced: Any,
    ) -> None:
        # In place of the class's own attributes.
        self.__dict__.update(replaced)
        self.steps_together = steps_together
        self._most_decodes = most_decodes
        self._ride_seconds = ride_seconds
        self.decodes = 0
        self.rides: list[tuple[int, int]] = []
        self._seconds = seconds
        self.asked: list[int] = []
        self.prompts: set[tuple[int, ...]] = set()
        self.forwards_until_drain = 1 << 30

    def others_active(self) -> bool:
        return False

    @property
    def draining(self) -> bool:
        return len(self.asked) >= self.forwards_until_drain

    def largest_forward(self, _ranks: list[Any]) -> int:
        return self.max_unchunked_prompt

    def use_costs(self, costs: Any, waits_for: int | None) -> None:
        self.costs, self.waits_for = costs, waits_for

    async def kv(self) -> list[Any]:
        off = {"no_rides": "", "late_kv": ""}
        return [SimpleNamespace(max_running=most, total=8000, **off) for most in self.max_running]

    async def time_answer(self, tokens: int) -> float:
        return 0.01 + 0.002 * tokens

    @asynccontextmanager
    async def decoding(self, requests: int) -> AsyncGenerator[None]:
        assert not self.decodes
        self.decodes = requests
        yield
        self.decodes = 0

    async def time_forward(self, input_ids: Sequence[int], rides: bool = False) -> ForwardTime:
        tokens = len(input_ids)
        if tokens > 1:
            # It would be found in the cache.
            assert tuple(input_ids) not in self.prompts
            self.prompts.add(tuple(input_ids))
        if not rides:
            assert not self.decodes
            self.asked.append(tokens)
            return ForwardTime("", self._seconds(tokens, self.asked.count(tokens) - 1), None)
        assert self.decodes
        mixed = min(self.decodes, self._most_decodes)
        step = 0.01 + 0.001 * mixed
        self.rides.append((self.decodes, tokens))
        # The first result comes late, and makes the steps before look shorter.
        first = sum(decodes == self.decodes for decodes, _ in self.rides) == 1
        early = step / 2 if first else 0.0
        return ForwardTime("", step + self._ride_seconds * tokens, None, mixed, step - early)


async def costs(seconds: Callable[[int, int], float], **more: Any) -> tuple[Any, FakeEngine]:
    engine: Any = FakeEngine(seconds, **more)
    measured, layers = await measure(engine, engine)
    assert not layers
    return measured, engine


@pytest.mark.parametrize("busy", [20, 27], ids=["some rounds", "all rounds"])
async def test_costs_are_measured_again_if_another_process_slowed_some_of_them_down(
    busy: int,
) -> None:
    measured: list[int] = []

    def seconds(tokens: int, _: int) -> float:
        measured.append(tokens)
        return (2 if len(measured) <= busy else 1) * (1e-3 + 1e-5 * tokens)

    found, _ = await costs(seconds)
    assert found.points == tuple((n, 1e-3 + 1e-5 * n) for n in SIZES)


async def test_costs_under_a_load_that_does_not_end_are_measured_three_times_at_most() -> None:
    """The load grows all the time."""
    _, engine = await costs(lambda tokens, before: (1e-3 + 1e-6 * tokens) * 1.05**before)
    assert engine.asked.count(SIZES[-1]) == 3 * 3


async def test_costs_are_those_without_a_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOA_DEVICE_SLOWDOWN", "4")
    found, _ = await costs(lambda tokens, _: 1e-4 * tokens)
    # All sizes are measured: the largest takes 0.1 s, and less than 0.03 without the slowdown.
    assert found.points == tuple((n, 1e-4 * n / 4) for n in SIZES)
    assert found.decode_step == pytest.approx(0.002 / 4)


async def test_costs_are_the_least_of_several_rounds() -> None:
    found, engine = await costs(lambda tokens, before: 1e-3 + 1e-5 * tokens + 0.001 * (before == 1))
    assert found.points == tuple((n, 1e-3 + 1e-5 * n) for n in SIZES)
    assert found.decode_step == pytest.approx(0.002)
    # Each round begins with a forward that is not timed. Three more are compared with the first.
    assert engine.asked == [1, *SIZES] * 3 + [1] * 3


async def test_forwards_of_a_slow_engine_are_measured_up_to_a_limit() -> None:
    found, engine = await costs(lambda tokens, _before: 1e-3 * tokens)
    assert [tokens for tokens, _ in found.points] == [1, 4, 16, 64, 128]
    found, engine = await costs(lambda _tokens, _before: 0.5)
    assert [tokens for tokens, _ in found.points] == [1, 4] and len(engine.asked) == 12


ALL = {(decodes, tokens) for decodes in (1, 8) for tokens in (0, *riding(decodes))}


@pytest.mark.parametrize(
    ("given", "steps", "rides"),
    [
        # It never decodes 32 requests in a forward that also prefills.
        ({"most_decodes": 8}, ALL, {1, 8, 32}),
        # No more requests decode than may on each rank.
        ({"most_decodes": 32, "max_running": (32, 31)}, ALL, {1, 8}),
        # No larger prefill rides than was measured alone.
        (
            {"most_decodes": 8, "max_unchunked_prompt": 100},
            {(1, 0), (1, 31), (1, 63), (8, 0), (8, 24), (8, 56)},
            {1, 8, 32},
        ),
        # Longer steps of a slow engine are not measured.
        ({"most_decodes": 1, "ride_seconds": 1e-3}, {(1, 0), (1, 31), (1, 63), (1, 127)}, {1, 8}),
        # An engine that mixes nothing is not asked to with more requests.
        ({}, set(), {1}),
    ],
)
async def test_steps_in_which_tokens_ride_are_measured(
    given: dict[str, Any], steps: set[tuple[int, int]], rides: set[int]
) -> None:
    found, engine = await costs(lambda tokens, _: 1e-5 * tokens, **given)
    assert {step[:2] for step in found.mixed} == steps
    assert {decodes for decodes, _ in engine.rides} == rides
    if not steps:
        assert engine.rides == [(1, 31)] and found.decode(1) == pytest.approx(0.002)
    for decodes, tokens in steps:
        assert found.decode(decodes) == pytest.approx(0.01 + 0.001 * decodes)
        added = given.get("ride_seconds", 1e-4) * tokens
        assert found.added(decodes, tokens) == pytest.approx(added)


async def test_nothing_more_is_measured_once_the_engine_drains() -> None:
    engine: Any = FakeEngine(lambda tokens, _: 1e-5 * tokens)
    engine.forwards_until_drain = 3
    async with anyio.create_task_group() as group:
        group.start_soon(measure, engine, engine)
        await anyio.wait_all_tasks_blocked()
        assert engine.asked == [1, 1, 4]
        group.cancel_scope.cancel()


@pytest.mark.parametrize(("together", "expected"), [(False, 500), (True, None)])
async def test_an_engine_says_for_how_many_tokens_prefills_wait(
    monkeypatch: pytest.MonkeyPatch, together: bool, expected: int | None
) -> None:
    monkeypatch.setenv("FLASHMOA_SATURATION", "500")
    monkeypatch.setattr(calibration, "TimedRequests", lambda engine: engine)
    engine: Any = FakeEngine(lambda tokens, _before: 1e-5 * tokens, steps_together=together)
    await calibrate(engine)
    assert engine.waits_for == expected


async def test_an_engine_that_is_never_idle_says_once_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "_IDLE_POLL", 0.0)
    monkeypatch.setattr(calibration, "_LONG_WAIT", 5)
    monkeypatch.setattr(calibration, "TimedRequests", lambda engine: engine)

    class BusyEngine(FakeEngine):
        polls = 0

        def others_active(self) -> bool:
            self.polls += 1
            return self.polls < 9

    engine: Any = BusyEngine(lambda tokens, _before: 1e-5 * tokens)
    await calibrate(engine)
    assert caplog.text.count("has not been idle") == 1 and engine.costs


async def test_an_engine_says_at_start_what_it_does_not_do_for_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "TimedRequests", lambda engine: engine)
    engine: Any = FakeEngine(lambda tokens, _before: 1e-5 * tokens)
    await calibrate(engine)
    assert "off, because" not in caplog.text
    ranks = await engine.kv()
    for rank in ranks:
        rank.no_rides, rank.late_kv = "it decodes speculatively", "the tree copies it"
    calibration._log_what_is_off(ranks)
    assert caplog.text.count("rides: off, because it decodes speculatively.") == 1
    assert caplog.text.count("sharing: off, because the tree copies it.") == 1


class AnsweringEngine:
    """An engine whose answers grow until they are aborted.

    ``refuses``: how many answers it has no place for.
    """

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.marks: list[RequestMark] = []
        self.answers: dict[str, int] = {}
        self.finish_reason: dict[str, str] | None = None

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        assert kind is ForwardTime
        self._report = handler

    def abort(self, rid: str) -> None:
        self.answers.pop(rid, None)

    async def generate(
        self,
        input_ids: list[int],
        mark: RequestMark,
        *,
        rid: str,
        new_tokens: int = 0,
        on_token: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        self.marks.append(mark)
        if on_token is not None:
            await self._decode(rid, new_tokens, on_token)
        else:
            self._report(ForwardTime("another", 9.0))
            self._report(ForwardTime(rid, 0.1))
        tokens = len(input_ids)
        return {"finish_reason": self.finish_reason, "prompt_tokens": tokens, "cached_tokens": 0}

    async def _decode(
        self, rid: str, tokens: int, on_token: Callable[[dict[str, Any]], None]
    ) -> None:
        if self.refuses:
            self.refuses -= 1
            raise EngineBusy("no place")
        assert tokens > 2 * MEASURED_STEPS
        self.answers[rid] = 0
        while rid in self.answers:
            self.answers[rid] += 1
            on_token({"completion_tokens": self.answers[rid]})
            await asyncio.sleep(0)


async def test_the_time_of_a_forward_is_the_one_that_the_scheduler_reports() -> None:
    engine: Any = AnsweringEngine()
    timed = TimedRequests(engine)
    forward = await timed.time_forward([1, 2, 3], rides=True)
    assert forward.seconds == 0.1
    assert engine.marks == [RequestMark(timed=True, rides=True)]


async def test_a_forward_that_was_aborted_has_no_time() -> None:
    engine: Any = AnsweringEngine()
    engine.finish_reason = {"type": "abort", "message": "too late"}
    with pytest.raises(EngineFailed, match="too late"):
        await TimedRequests(engine).time_forward([1, 2, 3])


async def test_answers_decode_for_some_steps_before_something_rides_with_them() -> None:
    engine: Any = AnsweringEngine()
    timed = TimedRequests(engine)
    with anyio.fail_after(5):
        async with timed.decoding(3):
            assert len(engine.answers) == 3
            assert all(steps > MEASURED_STEPS for steps in engine.answers.values())
    assert engine.answers == {}


async def test_answers_that_find_no_place_hold_up_nothing() -> None:
    engine: Any = AnsweringEngine(refuses=2)
    timed = TimedRequests(engine)
    with anyio.fail_after(5):
        async with timed.decoding(3):
            assert len(engine.answers) == 1
    assert engine.answers == {}


async def test_answers_end_if_what_rides_with_them_fails() -> None:
    engine: Any = AnsweringEngine()
    with anyio.fail_after(5), pytest.raises(ExceptionGroup):
        async with TimedRequests(engine).decoding(3):
            raise EngineFailed("it failed")
    assert engine.answers == {}


MEASURED = Costs(((1, 0.01), (512, 0.04)), 0.008, ((1, 0, 0.008), (1, 31, 0.009)))
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


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "costs: Field required"),
        ({"costs": None}, "had not measured its costs yet"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1]]}}, "two different sizes"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1], [2]]}}, "costs.points.1.1"),
        ({"costs": asdict(MEASURED) | {"decode_step": -1}}, "not numbers from 0 on"),
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
    engine: Any = FakeEngine(lambda _tokens, _before: 1.0)
    await calibrate(engine)
    assert engine.costs == MEASURED and engine.saturation == SATURATED
    assert engine.waits_for == SATURATED.tokens
    assert not engine.asked
