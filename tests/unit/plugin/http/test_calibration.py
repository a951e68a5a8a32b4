"""How costs are measured when an engine starts, or read from a file; without engines."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import cycle
from math import ceil, inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.costs import UNMEASURED, Costs, TimedForward
from flashmoa_sglang.http import calibration
from flashmoa_sglang.http.calibration import Measurement, Times, calibrate, read_costs
from flashmoa_sglang.http.errors import EngineBusy, EngineFailed
from flashmoa_sglang.messages import ForwardTimes, RequestMark
from flashmoa_sglang.moe.saturation import LayerTimes, Saturation
from flashmoa_sglang.scheduler.plan import Budget
from flashmoa_sglang.sglang import hooks as plugin
from flashmoa_sglang.sglang.releases import RELEASE

SIZES = [1, 4, 16, 64, 128, 256, 512, 1024]


def seconds(decodes: int, kv: int, tokens: int, pairs: int) -> float:
    """Return how long a forward takes: 64 tokens each take 1 ms, and the first 5 ms more."""
    blocks = ceil((decodes + tokens) / 64) if tokens else 0
    return 0.005 + 0.001 * blocks + 3e-8 * kv + 1e-9 * pairs


class FakeEngine:
    """An engine that runs each measuring request in a forward of its own.

    Args:
        refuses: number of answers that it refuses.
        replaced: replace the class's attributes.
    """

    max_unchunked_prompt = 2048
    max_prompt_tokens = 6000
    vocabulary = 100
    role = None
    steps_together = False
    may_measure = True
    waits_for: int | None = None
    saturation: Any = None
    no_rides = ""
    max_running = (64, 32)
    # How long a forward takes: see ``seconds``.
    seconds: Callable[[int, int, int, int], float] = staticmethod(seconds)
    # The times of layers with their experts, by the tokens of a forward.
    layers: Callable[[int], LayerTimes | None] = staticmethod(lambda _: None)

    def __init__(self, *, refuses: int = 0, **replaced: Any) -> None:
        vars(self).update(replaced)
        self.costs, self.answers, self._refuses = UNMEASURED, 0, refuses
        self.told, self.forwards, self.marks = (
            list[Costs](),
            list[TimedForward](),
            list[RequestMark](),
        )
        self._cached: set[tuple[int, ...]] = set()
        self._decoding: dict[str, int] = {}

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        assert kind is ForwardTimes
        self.report = handler

    def why_no_kv(self) -> str | None:
        return None

    def largest_forward(self, _ranks: list[Any]) -> int:
        return self.max_unchunked_prompt

    def use_costs(self, costs: Costs | None, waits_for: int | None) -> None:
        if costs is not None:
            self.told.append(costs)
        self.costs, self.waits_for = costs or UNMEASURED, waits_for

    async def kv(self) -> list[Any]:
        rank = {"total": 8000, "no_rides": self.no_rides, "late_kv": ""}
        rank["steps_together"] = self.steps_together
        return [SimpleNamespace(max_running=most, **rank) for most in self.max_running]

    def abort(self, rid: str) -> None:
        self._decoding.pop(rid, None)

    def run(self, tokens: int, pairs: int, *, rides: bool = False) -> None:
        decodes = len(self._decoding) if rides else 0
        what = decodes, sum(self._decoding.values()), tokens, pairs
        forward = TimedForward(*what, self.seconds(*what))
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
        self.answers += 1
        written = 0
        while rid in self._decoding:
            written += 1
            if on_token is not None:
                # The last answer has this; so all decode.
                what = len(self._decoding), sum(self._decoding.values()), 0, 0
                self.report(ForwardTimes((TimedForward(*what, self.seconds(*what)),)))
                on_token({"completion_tokens": written})
            await asyncio.sleep(0)


@pytest.fixture
def engine() -> Any:
    return FakeEngine()


async def calibrated(kind: type[FakeEngine] = FakeEngine, **replaced: Any) -> Any:
    """Return an engine that has measured its costs."""
    engine: Any = kind(**replaced)
    await calibrate(engine)
    return engine


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_PAUSE_SECONDS", 0.0)


async def test_an_engine_measures_its_costs(engine: Any) -> None:
    await calibrate(engine)
    assert len(engine.told) == 1 and engine.waits_for is None
    for tokens in SIZES:
        for context in (0, 4000):
            expected = seconds(0, 0, tokens, tokens * context)
            assert engine.costs.prefill(tokens, context) == pytest.approx(expected, rel=0.02)
    for decodes in (1, 8, 32):
        for context in (0, 4000):
            expected = seconds(decodes, decodes * context, 0, 0)
            decode = engine.costs.decode(decodes, decodes * context)
            assert decode == pytest.approx(expected, rel=0.02)
        for size in (64, 128, 256, 512):
            added = engine.costs.added(decodes, size - decodes)
            assert added == pytest.approx(0.001 * size / 64, rel=0.02)
    # Nothing is left that decodes.
    assert not engine._decoding


@pytest.mark.parametrize(
    ("replaced", "decodes"),
    [({}, {1, 8, 32}), ({"max_running": (32, 31)}, {1, 8}), ({"no_rides": "it cannot"}, set())],
)
async def test_each_rank_has_room_for_decodes(replaced: dict[str, Any], decodes: set[int]) -> None:
    engine = await calibrated(**replaced)
    assert {forward.decodes for forward in engine.forwards if forward.tokens > 1} - {0} == decodes
    assert {n for n, tokens, _ in engine.costs.mixed if not tokens} > {1, 8}


async def test_answers_run_once_if_nothing_rides() -> None:
    """Their steps are many, and slow where nothing rides: on a CPU core."""
    engine = await calibrated(no_rides="it cannot")
    behind_a_context = 1 + 32
    assert engine.answers == 1 + 8 + 32 + behind_a_context


def largest_forward(engine: Any) -> int:
    return max(forward.tokens for forward in engine.forwards if not forward.decodes)


@pytest.mark.parametrize(("token", "largest"), [(0.001, 128), (0.0001, 1024), (0.00001, 2048)])
async def test_sizes_grow_until_tokens_get_no_cheaper(token: float, largest: int) -> None:
    """A forward may take seconds there."""
    engine = await calibrated(seconds=lambda _decodes, _kv, tokens, _pairs: 0.005 + token * tokens)
    assert largest_forward(engine) == largest
    assert engine.costs.prefill(10_000) == pytest.approx(0.005 + token * 10_000)
    # No step has more tokens than a forward that ran.
    mixed = {tokens + decodes for decodes, tokens, _ in engine.costs.mixed if tokens}
    assert mixed == {size for size in (32, 64, 128, 256, 512) if size <= largest}
    # Sizes also grow until transfers of experts are hidden, if all tokens cost the same.
    engine = await calibrated(
        layers=lambda tokens: LayerTimes(tokens, tokens * 1e-5, 0.003),
        seconds=lambda _decodes, _kv, tokens, _pairs: 0.001 * (tokens + 1),
    )
    assert largest_forward(engine) == 512


async def test_forwards_that_compile_kernels_change_nothing() -> None:
    ran: set[tuple[int, int]] = set()

    def compiling(decodes: int, kv: int, tokens: int, pairs: int) -> float:
        is_first = bool(tokens) and (decodes, tokens) not in ran
        ran.add((decodes, tokens))
        return seconds(decodes, kv, tokens, pairs) + 2.0 * is_first

    engine, usual = await calibrated(seconds=compiling), await calibrated()
    assert engine.costs.points == usual.costs.points and engine.costs.mixed == usual.costs.mixed


def test_times_of_disturbed_forwards_do_not_count() -> None:
    times = Times(slowdown=2.0)
    for size in (64, 512):
        for disturbed in (1.0, 9.0, 1.0, 1.3, 5.0):
            times.add([TimedForward(0, 0, size, 0, 2 * disturbed * seconds(0, 0, size, 0))])
        times.add([TimedForward(0, 0, size, 0, broken) for broken in (nan, inf, 0.0, -1.0)])
    # A forward that ran once, and what tells nothing.
    times.add([TimedForward(0, 0, 300, 0, 7.0), TimedForward(0, 0, 0, 0, 1.0)])
    expected = [(size, seconds(0, 0, size, 0)) for size in (64, 512)]
    assert [*times.costs().points] == [pytest.approx(point) for point in expected]


@pytest.mark.parametrize("asyncep", [False, True])
async def test_an_engine_measures_while_no_client_uses_it(*, asyncep: bool) -> None:
    def layers(tokens: int) -> LayerTimes | None:
        return LayerTimes(tokens, tokens * 1e-5, 0.003) if asyncep else None

    class Used(FakeEngine):
        free = cycle([False, False, True])
        may_measure = property(lambda self: next(self.free))

    engine = await calibrated(Used, layers=layers)
    assert engine.costs.prefill(1024) == pytest.approx(seconds(0, 0, 1024, 0), rel=0.02)
    if asyncep:
        assert engine.saturation.tokens == pytest.approx(361, abs=1)
        assert engine.waits_for == engine.saturation.tokens


async def test_nothing_is_measured_while_nothing_may_be(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_PAUSE_SECONDS", 1.0)
    monkeypatch.setenv("FLASHMOA_SATURATION", "500")
    engine.may_measure = False
    async with anyio.create_task_group() as group:
        group.start_soon(calibrate, engine)
        await anyio.wait_all_tasks_blocked()
        assert not engine.marks and engine.costs is UNMEASURED
        # What the operator has given does not wait.
        assert engine.waits_for == 500
        group.cancel_scope.cancel()


async def test_aborted_forwards_leave_costs_unknown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But prefills wait for forwards of the size that the operator has given."""
    monkeypatch.setenv("FLASHMOA_SATURATION", "500")

    def run(*_: object, **__: object) -> None:
        raise EngineFailed("too late")

    engine = await calibrated(run=run)
    assert "too late" in caplog.text and engine.costs is UNMEASURED
    assert engine.waits_for == 500
    # Each size was tried some times.
    assert len(engine.marks) == 6 * 8


@pytest.mark.parametrize("how", ["refused", "failed", "beside another request"])
async def test_forwards_that_fail_now_and_then_run_again(how: str) -> None:
    class Failing(FakeEngine):
        def run(self, tokens: int, pairs: int, *, rides: bool = False) -> None:
            if len(self.marks) % 7:
                super().run(tokens, pairs, rides=rides)
            elif how == "refused":
                raise EngineBusy("no place")
            elif how == "failed":
                raise EngineFailed("too late")
            else:
                super().run(tokens + 7, pairs, rides=rides)

    engine, undisturbed = await calibrated(Failing), await calibrated()
    # A forward beside another request counts, too.
    assert {*engine.costs.points} >= {*undisturbed.costs.points}
    assert {*engine.costs.mixed} >= {*undisturbed.costs.mixed}


async def test_sizes_that_keep_failing_are_left_out() -> None:
    class Failing(FakeEngine):
        def run(self, tokens: int, pairs: int, *, rides: bool = False) -> None:
            if tokens in (64, 120):
                raise EngineFailed("out of memory")
            super().run(tokens, pairs, rides=rides)

    engine = await calibrated(Failing)
    assert [size for size, _ in engine.costs.points] == [1, 16, 128, 256, 512, 1024, 2048]
    mixed = {tokens for decodes, tokens, _ in engine.costs.mixed if decodes == 8 and tokens}
    assert mixed == {24, 56, 248, 504}
    assert not engine._decoding


@pytest.mark.parametrize(("together", "expected"), [(False, 500), (True, None)])
async def test_prefills_wait_unless_ranks_step_together(
    monkeypatch: pytest.MonkeyPatch, together: bool, expected: int | None
) -> None:
    monkeypatch.setenv("FLASHMOA_SATURATION", "500")
    engine = await calibrated(steps_together=together)
    assert engine.waits_for == expected and engine.costs is not UNMEASURED


async def test_what_is_off_is_logged(caplog: pytest.LogCaptureFixture, engine: Any) -> None:
    await calibrate(engine)
    assert "off, because" not in caplog.text
    ranks = await engine.kv()
    for rank in ranks:
        rank.no_rides, rank.late_kv = "it decodes speculatively", "the tree copies it"
    calibration._log_what_is_off(ranks)
    assert caplog.text.count("rides: off, because it decodes speculatively.") == 1
    assert caplog.text.count("sharing: off, because the tree copies it.") == 1


@pytest.mark.parametrize("longest", [100, 1100, 2100, 2500, 4000])
async def test_no_context_is_longer_than_a_prompt_may_be(longest: int) -> None:
    engine = await calibrated(max_prompt_tokens=longest, max_unchunked_prompt=longest // 2)
    size = max(size for size in SIZES if size <= longest // 4)
    expected = seconds(0, 0, size, size * longest // 2)
    assert engine.costs.prefill(size, longest // 2) == pytest.approx(expected, rel=0.02)


async def test_answers_end_whatever_fails() -> None:
    engine: Any = FakeEngine(refuses=2)
    with anyio.fail_after(5):
        async with Measurement(engine)._decoding(3, [0]):
            assert len(engine._decoding) == 1
        assert not engine._decoding
        # A forward that runs beside the answers fails.
        with pytest.raises(ExceptionGroup):
            async with Measurement(engine)._decoding(3, [0]):
                raise EngineFailed("it failed")
    assert not engine._decoding


MEASURED = Costs(((1, 0.01), (512, 0.04)), 0.008, ((1, 0, 0.008), (1, 31, 0.009)), 3e-8, 1e-9)
SATURATED = Saturation(700, 8192, 0.003, ((64, 0.001), (512, 0.002)))


def save(folder: Path, **info: Any) -> str:
    """Save an answer of ``GET /flashmoa/info``, which also has other fields."""
    file = folder / "info.json"
    file.write_text(json.dumps({"plugin": {"version": "9"}, "prompt_streams": 2, **info}))
    return str(file)


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    file = save(tmp_path, costs=asdict(MEASURED), saturation=asdict(SATURATED))
    assert read_costs(file) == (MEASURED, SATURATED)
    assert read_costs(save(tmp_path, costs=asdict(MEASURED), saturation=None)) == (MEASURED, None)
    # Older versions have no costs of contexts.
    old = {name: asdict(MEASURED)[name] for name in ("points", "decode_step", "mixed")}
    assert read_costs(save(tmp_path, costs=old))[0] == replace(MEASURED, per_kv_token=0, per_pair=0)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "costs: Field required"),
        ({"costs": None}, "had not measured its costs yet"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1]]}}, "two different sizes"),
        ({"costs": asdict(MEASURED) | {"points": [[1, 0.1], [2]]}}, "costs.points.1.1"),
        ({"costs": asdict(MEASURED) | {"points": [[0, 0.1], [2, 1]]}}, "points.0.0: .* than 0"),
        ({"costs": asdict(MEASURED) | {"mixed": [[0, 31, 1]]}}, "mixed.0.0: .* than 0"),
        ({"costs": asdict(MEASURED) | {"decode_step": -1}}, "costs.decode_step: .* equal to 0"),
        ({"costs": asdict(MEASURED) | {"per_pair": -1}}, "costs.per_pair: .* equal to 0"),
        ({"costs": asdict(MEASURED) | {"mixed": [[1, 31, inf]]}}, "0.2: .* finite"),
    ],
)
def test_a_file_needs_costs(tmp_path: Path, info: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_costs(save(tmp_path, **info))


@pytest.mark.parametrize("content", [None, b"", b"costs", b"\xff\xfe"])
def test_no_engine_starts_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "info.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("FLASHMOA_COSTS", str(file))
    # SGLang would be imported.
    monkeypatch.setattr(RELEASE, "resolve_arguments", lambda arguments: arguments)
    with pytest.raises(SystemExit, match=r"--flashmoa-costs .*info\.json"):
        arguments = SimpleNamespace(tokenizer_worker_num=1)
        plugin.attach_api(None, SimpleNamespace(server_args=arguments))


async def test_an_engine_with_a_file_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path, costs=asdict(MEASURED), saturation=asdict(SATURATED))
    monkeypatch.setenv("FLASHMOA_COSTS", file)
    engine = await calibrated()
    assert engine.costs == MEASURED and engine.saturation == SATURATED
    assert engine.waits_for == SATURATED.tokens
    assert not engine.marks


async def test_an_engine_that_was_slow_at_first_lets_nothing_ride() -> None:
    """On a CPU, a token costs as much beside a decode as in a forward of its own."""
    slow = 1.3

    def on_a_cpu(decodes: int, kv: int, tokens: int, pairs: int) -> float:
        nonlocal slow
        if decodes:
            slow = 1.0
        return slow * (0.08 + 0.0025 * tokens)

    engine = await calibrated(seconds=on_a_cpu)
    assert not Budget.of(engine.costs, 4.0, 1).rides
