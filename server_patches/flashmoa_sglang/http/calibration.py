"""Measure the costs of an engine's forwards when it starts, or read them from a file.

Forwards of different sizes run three times each, while no client uses the engine. Their KV stays
in the cache until it is evicted: SGLang's own switch to cache nothing of a request loses the KV of
requests that are cut into chunks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Iterable
from contextlib import asynccontextmanager, suppress
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES, Costs, TimedForward
from flashmoa_sglang.http.engine import new_rid
from flashmoa_sglang.http.errors import ApiError
from flashmoa_sglang.messages import ForwardTimes, RequestMark
from flashmoa_sglang.moe.saturation import LayerTimes, Saturation, find_saturation
from flashmoa_sglang.sglang.options import Options, device_slowdown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.messages import KvReport

logger = logging.getLogger(__name__)

# Sizes of prefills in tokens, and numbers of requests that decode in steps with a prefill.
_PREFILL_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
_DECODES = (1, 8, 32, 128)
# Each forward runs three times, because the first of its size may compile kernels. A forward that
# fails, or runs with other requests, is repeated up to twice as often.
_RUNS = 3
_ANSWER_TOKENS = 64
_PAUSE_SECONDS = 1.0


class Times:
    """The times of forwards that ran, divided by the slowdown of a modelled GPU."""

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        # Keys: number of decodes, number of prefilled tokens, number of cached tokens before them.
        self._forwards: dict[tuple[int, int, int], list[TimedForward]] = defaultdict(list)

    def add(self, forwards: Iterable[TimedForward]) -> None:
        for one in forwards:
            if isfinite(one.seconds) and one.seconds > 0 and (one.decodes or one.tokens):
                cached = one.pairs // one.tokens if one.tokens else 0
                timed = one._replace(seconds=one.seconds / self._slowdown)
                self._forwards[one.decodes, one.tokens, cached].append(timed)

    def of(self, decodes: int, tokens: int) -> float | None:
        """Return the seconds of a forward without context, if one ran."""
        forwards = self._forwards.get((decodes, tokens, 0))
        return None if forwards is None else _typical(forwards).seconds

    def count(self, decodes: int, tokens: int) -> int:
        return len(self._forwards.get((decodes, tokens, 0), ()))

    def costs(self) -> Costs:
        """Return the costs. Raises: ValueError if prefills of fewer than two sizes ran."""
        per_pair, per_kv_token = self._per_pair(), self._per_kv_token()
        # A forward that ran once may have compiled its kernels.
        typical = {
            (decodes, tokens): _typical(forwards)
            for (decodes, tokens, cached), forwards in self._forwards.items()
            if not cached and len(forwards) >= _RUNS
        }
        points = sorted((n, one.seconds) for (decodes, n), one in typical.items() if not decodes)
        # A mixed step is compared with the same step without prefill.
        mixed = sorted(
            (decodes, tokens, one.seconds - per_kv_token * one.kv)
            for (decodes, tokens), one in typical.items()
            if decodes and (decodes, 0) in typical
        )
        # A prefill engine of a PD pair decodes nothing.
        decode_step = mixed[0][2] if mixed else points[0][1] if points else 0.0
        return Costs(tuple(points), decode_step, tuple(mixed), per_kv_token, per_pair)

    def _per_pair(self) -> float:
        """Return the seconds of a prefilled token for each token that is cached before it."""
        slopes = [
            (one.pairs, (one.seconds - alone) / one.pairs)
            for (decodes, tokens, cached), forwards in self._forwards.items()
            if cached and not decodes and (alone := self.of(0, tokens)) is not None
            for one in [_typical(forwards)]
        ]
        # Disturbances count least with the longest context.
        return max(0.0, max(slopes, default=(0, 0.0))[1])

    def _per_kv_token(self) -> float:
        """Return the seconds of a decode step for each token whose KV it reads."""
        slopes: list[tuple[int, float]] = []
        for (decodes, tokens, _), forwards in self._forwards.items():
            least, most = min(one.kv for one in forwards), max(one.kv for one in forwards)
            if decodes and not tokens and most - least > _ANSWER_TOKENS * decodes:
                near = _typical(one for one in forwards if one.kv <= (least + most) / 2)
                far = _typical(one for one in forwards if one.kv > (least + most) / 2)
                more = far.kv - near.kv
                slopes.append((more, (far.seconds - near.seconds) / more))
        return max(0.0, max(slopes, default=(0, 0.0))[1])


def _typical(forwards: Iterable[TimedForward]) -> TimedForward:
    """Return one of the quicker forwards of a kind: disturbances make a forward longer."""
    ordered = sorted(forwards, key=lambda one: one.seconds)
    return ordered[max(0, len(ordered) // 2 - 1)]


class Measurement:
    """Runs forwards and answers on an engine, whose schedulers report their times.

    ``layers``: the times of layers whose experts are copied to the device.
    """

    def __init__(self, engine: Engine) -> None:
        self.layers: list[LayerTimes] = []
        self._engine = engine
        self._times = Times(device_slowdown())
        # Prompts are random, so that the cache has none.
        self._dice = random.Random(0)
        self._failure: ApiError | None = None
        engine.handle(ForwardTimes, self._receive)

    def _receive(self, report: ForwardTimes) -> None:
        self._times.add(report.forwards)
        if report.layers is not None:
            self.layers.append(report.layers)

    async def run(self, ranks: Sequence[KvReport]) -> Costs:
        """Run each forward that matters a few times, except forwards that keep failing.

        Raises: ValueError if too few forwards ran.
        """
        sizes = [size for size in _PREFILL_TOKENS if size <= self._engine.max_unchunked_prompt]
        sizes = await self._prefill_all(sizes)
        if len(sizes) < 2:
            raise ValueError(f"prefills of fewer than two sizes ran; {self._failure}")
        # Each decode takes a place, and all together take at most half of the KV pool.
        bounds = (min(rank.max_running, rank.total // (2 * _ANSWER_TOKENS)) for rank in ranks)
        most = min(bounds, default=1)
        mixes = not any(rank.no_rides for rank in ranks)
        for decodes in (number for number in _DECODES if number <= most):
            await self._mix_all(decodes, sizes[-1] if mixes else 0)
            one, step = self._times.of(1, 0), self._times.of(decodes, 0)
            # Steps of 128 decodes would take too long where 32 decodes double a step.
            if decodes == _DECODES[-2] and one and step and step > 2 * one:
                break
        # A machine may be slow for a while. If it was slow before the mixed steps, they seem cheap,
        # and prefills would ride where that gains nothing.
        for size in sizes[-2:] * _RUNS:
            await self._forward(self._tokens(size))
        await self._read_context(sizes, min(most, _DECODES[-2]))
        return self._times.costs()

    async def _prefill_all(self, sizes: list[int]) -> list[int]:
        """Prefill each number of tokens, until tokens get no cheaper; return the numbers."""
        token, ran = inf, list[int]()
        for size in sizes:
            for _ in self._missing(0, [size]):
                await self._forward(self._tokens(size))
            if (seconds := self._times.of(0, size)) is None:
                continue
            ran.append(size)
            before, token = token, seconds / size
            hides_transfers = not self.layers or self.layers[-1].hides_transfers
            if token > 0.95 * before and size >= STEP_SIZES[1] and hides_transfers:
                break
        return ran

    def _missing(self, decodes: int, sizes: list[int]) -> Iterator[list[int]]:
        """Yield the sizes of prefills that have not run often enough, until all have."""
        for _ in range(2 * _RUNS):
            missing = [size for size in sizes if self._times.count(decodes, size) < _RUNS]
            if not missing:
                return
            yield missing

    async def _mix_all(self, decodes: int, largest: int) -> None:
        """Run decode steps, and some with a prefill, of at most ``largest`` tokens in all."""
        sizes = [size - decodes for size in STEP_SIZES if size <= largest]
        sizes = [size for size in sizes if size >= FEWEST_RIDING]
        if not sizes:
            async with self._decoding(decodes, [0]):
                # Schedulers report the times of decode steps with a prefill's time.
                await self._forward([0])
        # The answers would end if all sizes ran three times beside them.
        for missing in self._missing(decodes, sizes):
            async with self._decoding(decodes, [0]):
                for size in missing:
                    await self._forward(self._tokens(size), rides=True)

    async def _read_context(self, sizes: list[int], decodes: int) -> None:
        """Run prefills that have run without context behind a long one, and decodes."""
        if self._engine.why_no_kv() is not None:
            return
        context: list[int] = []
        length = min(2 * sizes[-1], self._engine.max_prompt_tokens // 2)
        while len(context) < length:
            context += self._tokens(min(sizes[-1], length - len(context)))
            await self._forward(context)
        for size in sizes[-3:-1] * _RUNS:
            await self._forward([*context, *self._tokens(size)])
        for number in (1, decodes):
            async with self._decoding(number, context):
                await self._forward([0])

    def _tokens(self, number: int) -> list[int]:
        return self._dice.choices(range(self._engine.vocabulary), k=number)

    async def _generate(self, input_ids: list[int], mark: RequestMark, **options: Any) -> None:
        # SGLang has no event for this. Nothing may wait between the answer and the request.
        while not self._engine.may_measure:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_SECONDS / 20)
        await self._engine.generate(input_ids, mark, **options)

    async def _forward(self, input_ids: list[int], *, rides: bool = False) -> None:
        """Prefill ``input_ids`` in one forward, with a decode step if it ``rides``."""
        try:
            await self._generate(input_ids, RequestMark(timed=True, rides=rides, own=True))
        except ApiError as error:
            self._failure = error
            await asyncio.sleep(_PAUSE_SECONDS)

    @asynccontextmanager
    async def _decoding(self, requests: int, prompt: list[int]) -> AsyncGenerator[None]:
        """Let requests decode in the meantime, and a few steps before."""
        decode = asyncio.Event()
        rids = [new_rid() for _ in range(requests)]
        async with asyncio.TaskGroup() as group:
            for rid in rids:
                group.create_task(self._decode(rid, prompt, decode if rid == rids[-1] else None))
            try:
                await decode.wait()
                yield
            finally:
                for rid in rids:
                    self._engine.abort(rid)

    async def _decode(self, rid: str, prompt: list[int], decodes: asyncio.Event | None) -> None:
        """Decode an answer; set ``decodes`` after eight steps, or if the request is refused."""

        def note(meta: dict[str, Any]) -> None:
            if decodes is not None and meta["completion_tokens"] > 8:
                decodes.set()

        with suppress(ApiError):
            await self._generate(
                prompt,
                RequestMark(timed=True, own=True),
                new_tokens=_ANSWER_TOKENS,
                rid=rid,
                # Reporting a token takes the scheduler time.
                on_token=None if decodes is None else note,
            )
        if decodes is not None:
            decodes.set()


def _log_what_is_off(ranks: Sequence[KvReport]) -> None:
    """Log, once for all ranks, what this engine does not do for prompt streams, and why."""
    rides = "rides: off, because %s. Prompt streams have forwards of their own now and then."
    sharing = "sharing: off, because %s. Requests find a common prefix once it is computed."
    off = {(rides, rank.no_rides) for rank in ranks} | {(sharing, rank.late_kv) for rank in ranks}
    for text, reason in off:
        if reason:
            logger.warning(text, reason)


async def calibrate(engine: Engine) -> None:
    """Measure the costs, or read them from ``--flashmoa-costs``, and send them to the schedulers.

    If that fails, log why; steps then have fixed sizes. ``--flashmoa-saturation`` counts from the
    start, and whether or not the measurement fails.
    """
    if engine.role == "decode":
        return  # Costs are for planning prefills, which a decode engine does not run.
    is_given = Options.from_environment().saturation > 0
    ranks = await engine.kv()
    _log_what_is_off(ranks)
    most, together = engine.largest_forward(ranks), any(rank.steps_together for rank in ranks)
    waits_for = _waits_for(None, most, together=together) if is_given else None
    if is_given:
        engine.use_costs(None, waits_for)
    costs = await _find_costs(engine, ranks, most)
    if not is_given:
        waits_for = _waits_for(engine.saturation, most, together=together)
    engine.use_costs(costs, waits_for)


async def _find_costs(engine: Engine, ranks: Sequence[KvReport], most: int) -> Costs | None:
    """Measure or read the costs, and set the engine's ``saturation``."""
    try:
        if file := Options.from_environment().costs:
            costs, engine.saturation = read_costs(file)
            _log_costs(f"As {file} says", costs)
            return costs
        measurement = Measurement(engine)
        try:
            costs = await measurement.run(ranks)
        finally:
            engine.saturation = find_saturation(measurement.layers, most)
        _log_costs("As measured", costs)
        return costs
    except Exception as error:
        logger.warning("The cost of a forward is not known, and steps have fixed sizes: %s", error)
        return None


def _log_costs(found: str, costs: Costs) -> None:
    logger.info(
        "%s, a decode step takes %.1f ms, a prefill %s",
        found,
        1000 * costs.decode_step,
        ", ".join(f"of {tokens} tokens {1000 * time:.1f} ms" for tokens, time in costs.points),
    )


class _Info(BaseModel):
    """The part of an answer of ``GET /flashmoa/info`` that is read."""

    costs: Costs | None
    saturation: Saturation | None = None


def read_costs(file: str) -> tuple[Costs, Saturation | None]:
    """Return what another engine has measured, from a file with its ``GET /flashmoa/info``.

    Raises: ValueError if the file cannot be read, or has no costs; the message says what to do.
    """
    try:
        info = _Info.model_validate_json(Path(file).read_bytes())
    except OSError as error:
        raise ValueError(f"--flashmoa-costs {file} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"--flashmoa-costs {file} must have the answer of GET /flashmoa/info; {place}: "
            f"{first['msg']}."
        ) from error
    if info.costs is None:
        raise ValueError(
            f"--flashmoa-costs {file} is the answer of an engine that had not measured its costs "
            "yet; ask GET /flashmoa/info again when it has served for some seconds."
        )
    return info.costs, info.saturation


def _waits_for(measured: Saturation | None, most: int, *, together: bool) -> int | None:
    """Return, and log, for a forward of how many tokens prefills wait.

    Return ``None`` if waiting is off, if ranks step ``together``, or if no forward of this engine
    has enough tokens: the largest has ``most``.
    """
    options = Options.from_environment()
    if not options.saturation_wait or not (options.saturation or measured is not None):
        return None
    tokens = options.saturation or (measured.tokens if measured is not None else None)
    if together:
        reason = (
            "ranks step together with --pp-size, data-parallel attention, --moe-a2a-backend or "
            "--moe-dense-tp-size, and those with other requests would have to wait, too"
        )
    elif tokens is None:
        reason = "no forward is long enough to hide the transfers of experts"
    elif tokens > most:
        reason = (
            f"they would wait for a forward of {tokens} tokens, as measured or given by "
            f"--flashmoa-saturation, but the largest one here has {most}. Larger "
            "--chunked-prefill-size, --max-prefill-tokens and --max-total-tokens allow for larger "
            "forwards"
        )
    else:
        text = "Prefills wait up to %g s for a forward of %d tokens"
        logger.info(text, options.saturation_wait, tokens)
        return tokens
    logger.warning("Prefills are not held back to fill forwards: %s.", reason)
    return None
