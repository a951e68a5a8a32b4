"""Measures the costs of a forward on this engine, once the server is up, or reads them from a file.

Prefills of growing size are run, which the scheduler times from the built batch to its result.
Each waits until no other request uses the engine. Their KV stays in the cache until it is evicted:
SGLang's own switch to cache nothing of a request loses the KV of requests that are cut into chunks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import asynccontextmanager, suppress
from itertools import count
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES, Costs
from flashmoa_sglang.http.engine import new_rid
from flashmoa_sglang.http.errors import EngineBusy
from flashmoa_sglang.http.stream import Prefilled
from flashmoa_sglang.messages import MEASURED_STEPS, ForwardTime, RequestMark
from flashmoa_sglang.options import Options
from flashmoa_sglang.saturation import LayerTimes, Saturation, find_saturation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.messages import KvReport

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
# Other processes may use the same core. So each time is taken until the two least ones agree.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_AGREE = 1.1
# If a forward of one token takes so many times as long at the end as it did at the start, or the
# other way round, the machine's load has changed, and all is measured again, up to so often.
_CHANGED, _MOST_PASSES = 1.4, 3
_DECODE_STEPS = 8
# The numbers of requests that decode in measured steps.
_DECODES = (1, 8, 32)
_MIXED_ROUNDS = 2
# Forwards that take longer than this are not measured; their costs are extrapolated linearly.
_LONG_SECONDS = 0.1
_IDLE_POLL = 0.05
# How many tokens the answers have that decode while something else is measured.
MEASURED_ANSWER = 64
# After so many polls, which take a minute, it is said what costs that are not measured mean.
_LONG_WAIT = 1200


class TimedRequests:
    """Runs forwards and answers on an engine, and takes their time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._forwards: dict[str, ForwardTime] = {}
        engine.handle(ForwardTime, lambda report: self._forwards.update({report.rid: report}))

    async def time_forward(self, input_ids: Sequence[int], rides: bool = False) -> ForwardTime:
        """Run one forward with these tokens. Return its time as measured by the scheduler.

        Args: rides: whether the tokens ride along with a decode step, if one can be mixed with it.
        """
        rid = new_rid()
        mark = RequestMark(timed=True, rides=rides)
        try:
            meta = await self._engine.generate(list(input_ids), mark, rid=rid)
            Prefilled.read(meta)  # This raises if the request was aborted.
            return self._forwards[rid]
        finally:
            self._forwards.pop(rid, None)

    async def time_answer(self, tokens: int) -> float:
        """Return the seconds of a request that decodes ``tokens`` tokens, with waiting."""
        started = time.perf_counter()
        # A prompt of one token is never cached, so that each request computes the same.
        await self._engine.generate([0], RequestMark(), new_tokens=tokens)
        return time.perf_counter() - started

    @asynccontextmanager
    async def decoding(self, requests: int) -> AsyncGenerator[None]:
        """Let this many requests decode in the meantime, for a few dozen steps."""
        answers = {new_rid(): asyncio.Event() for _ in range(requests)}
        async with asyncio.TaskGroup() as group:
            for rid, decodes in answers.items():
                group.create_task(self._decode(rid, decodes))
            try:
                for decodes in answers.values():
                    await decodes.wait()
                yield
            finally:
                for rid in answers:
                    self._engine.abort(rid)

    async def _decode(self, rid: str, decodes: asyncio.Event) -> None:
        """Decode an answer; set ``decodes`` after some steps, or if it is refused."""

        def note(meta: dict[str, Any]) -> None:
            if meta["completion_tokens"] > MEASURED_STEPS:
                decodes.set()

        with suppress(EngineBusy):
            await self._engine.generate(
                [0], RequestMark(), new_tokens=MEASURED_ANSWER, rid=rid, on_token=note
            )
        decodes.set()


async def measure(engine: Engine, timed: TimedRequests) -> tuple[Costs, list[LayerTimes]]:
    """Measure the costs of forwards, all under the same load of the machine.

    If another engine starts on the same core, some of them would be twice too long for as long as
    this engine runs. What decides about rides are the ratios between them.

    Returns: see :func:`_measure_once`.
    """
    # A prompt that was measured before would be found in the cache.
    dice = random.Random(0)
    costs, layers = await _measure_once(engine, timed, dice)
    for _ in range(_MOST_PASSES - 1):
        if not await _has_load_changed(engine, timed, costs):
            break
        costs, layers = await _measure_once(engine, timed, dice)
    return costs, layers


async def _has_load_changed(engine: Engine, timed: TimedRequests, costs: Costs) -> bool:
    """Return whether a forward of one token takes another time now than it did at the start."""
    if Options.from_environment().device:
        return False  # A modelled GPU takes the same time whatever the machine does.
    times: list[float] = []
    for _ in range(_LEAST_ROUNDS):
        await _until_idle(engine)
        times.append((await timed.time_forward([0])).seconds)
    first, last = costs.points[0][1], min(times)
    return max(first, last) > _CHANGED * min(first, last)


async def _measure_once(
    engine: Engine, timed: TimedRequests, dice: random.Random
) -> tuple[Costs, list[LayerTimes]]:
    """Measure the costs of forwards, as the least time of several rounds, since noise only adds.

    Return also the times of their layers, if experts are copied to the device. The costs of a
    modelled GPU that is slowed down are those without the slowdown, so that it changes no decision.
    """
    slowdown = Options.from_environment().device_slowdown
    sizes = [size for size in _SIZES if size <= engine.max_unchunked_prompt]
    forwards: dict[int, list[float]] = {}
    layers: list[LayerTimes] = []
    # The seconds of whole answers, by their numbers of tokens.
    answers: dict[int, list[float]] = {1: [], 1 + _DECODE_STEPS: []}
    for _ in range(_MOST_ROUNDS):
        for tokens, seconds in answers.items():
            if not _is_steady(seconds):
                await _until_idle(engine)
                seconds.append(await timed.time_answer(tokens))
        # Under the overlap schedule, a decode step of the answer is still running. The next forward
        # would have to wait for it.
        await timed.time_forward([0])
        for size in sizes:
            hides_transfers = True
            if layers or not _is_steady(forwards.get(size, [])):
                await _until_idle(engine)
                ids = dice.choices(range(engine.vocabulary), k=size)
                forward = await timed.time_forward(ids)
                forwards.setdefault(size, []).append(forward.seconds)
                if forward.layers is not None:
                    layers.append(forward.layers)
                    hides_transfers = forward.layers.hides_transfers
            # Two sizes are always measured. The least time counts, because this forward may have
            # been slow only because the machine was busy.
            longest = _LONG_SECONDS * slowdown
            if hides_transfers and size != sizes[0] and min(forwards[size]) > longest:
                break
        measured = [*forwards.values(), *answers.values()]
        if all(map(_is_steady, measured)):
            break
    shorter, longer = (min(seconds) / slowdown for seconds in answers.values())
    points = tuple((size, min(seconds) / slowdown) for size, seconds in forwards.items())
    mixed = await _measure_mixed(
        engine, timed, [size for size in STEP_SIZES if size <= sizes[-1]], dice
    )
    mixed_points = tuple((*step, seconds / slowdown) for step, seconds in mixed.items())
    return Costs(points, max(0.0, longer - shorter) / _DECODE_STEPS, mixed_points), layers


async def _measure_mixed(
    engine: Engine, timed: TimedRequests, sizes: list[int], dice: random.Random
) -> dict[tuple[int, int], float]:
    """Return the seconds of steps by the numbers of requests that decode and of tokens that ride.

    Args: sizes: numbers of tokens in steps, decodes included.

    A step in which no tokens ride counts as one with 0. There are no times for numbers of requests
    that this engine does not decode together, and none at all if it mixes no steps.
    """
    times: dict[tuple[int, int], list[float]] = {}
    # In at most half of the KV pool. Requests that do not fit together would be retracted.
    bounds = (
        min(rank.max_running, rank.total // (2 * MEASURED_ANSWER)) for rank in await engine.kv()
    )
    most = min(bounds, default=1)
    longest = _LONG_SECONDS * Options.from_environment().device_slowdown
    for decodes in (number for number in _DECODES if number <= most):
        rides = [size - decodes for size in sizes if size - decodes >= FEWEST_RIDING]
        for _ in range(_MIXED_ROUNDS):
            await _until_idle(engine)
            async with timed.decoding(decodes):
                for riding in rides:
                    ids = dice.choices(range(engine.vocabulary), k=riding)
                    forward = await timed.time_forward(ids, rides=True)
                    if forward.decodes != decodes:
                        break
                    times.setdefault((decodes, 0), []).append(forward.step)
                    times.setdefault((decodes, riding), []).append(forward.seconds)
                    if forward.seconds > longest:
                        break
            if (decodes, 0) not in times:  # It does not decode more together, either.
                return _medians(times)
    return _medians(times)


def _medians(times: dict[tuple[int, int], list[float]]) -> dict[tuple[int, int], float]:
    # Results that come late make the next step look short, so the least time says nothing.
    return {step: median(seconds) for step, seconds in times.items()}


def _is_steady(times: list[float]) -> bool:
    return len(times) >= _LEAST_ROUNDS and sorted(times)[1] <= _AGREE * min(times)


async def _until_idle(engine: Engine) -> None:
    # SGLang would wait for the measurements before it shuts down, and has no event for its end.
    for polls in count():
        if not engine.draining and not engine.others_active():
            return
        if polls == _LONG_WAIT:
            logger.warning(
                "The costs of forwards are not measured yet, because the engine has not been idle "
                "for a minute: hardly any tokens ride along with decode steps until it is. "
                "--flashmoa-costs reads them from a file instead."
            )
        await asyncio.sleep(_IDLE_POLL)


def _log_what_is_off(ranks: Sequence[KvReport]) -> None:
    """Log, once for all ranks, what this engine does not do for prompt streams, and why."""
    for reason in {rank.no_rides for rank in ranks} - {""}:
        logger.warning(
            "rides: off, because %s. Prompt streams have forwards of their own now and then.",
            reason,
        )
    for reason in {rank.late_kv for rank in ranks} - {""}:
        logger.warning(
            "sharing: off, because %s. Requests find a common prefix once it is computed.", reason
        )


async def calibrate(engine: Engine) -> None:
    """Measure the costs, or read them from ``--flashmoa-costs``, and send them to the schedulers.

    If that fails, it is logged, and the guess ``UNMEASURED`` stays in use.
    """
    if engine.role == "decode":
        return  # Costs are for planning prefills, which a decode engine does not run.
    file = Options.from_environment().costs
    try:
        ranks = await engine.kv()
        _log_what_is_off(ranks)
        most = engine.largest_forward(ranks)
        if file:
            costs, saturation = read_costs(file)
        else:
            costs, layers = await measure(engine, TimedRequests(engine))
            saturation = find_saturation(layers, most)
    except Exception as error:
        text = (
            "The cost of a forward could not be measured, so streams are scheduled by a guess: %s"
        )
        logger.warning(text, error)
        return
    engine.saturation = saturation
    waits_for = _waits_for(engine.saturation, most, together=engine.steps_together)
    engine.use_costs(costs, waits_for)
    logger.info(
        "%s, a decode step takes %.1f ms, a prefill %s",
        f"As {file} says" if file else "As measured",
        1000 * costs.decode_step,
        ", ".join(f"of {tokens} tokens {1000 * time:.1f} ms" for tokens, time in costs.points),
    )


class _Info(BaseModel):
    """What counts of an answer of ``GET /flashmoa/info``."""

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
            "yet; ask GET /flashmoa/info again when it has been idle for some seconds."
        )
    steps = [seconds for *_, seconds in (*info.costs.points, *info.costs.mixed)]
    if not all(isfinite(seconds) and seconds >= 0 for seconds in (*steps, info.costs.decode_step)):
        raise ValueError(f"--flashmoa-costs {file} has seconds that are not numbers from 0 on.")
    return info.costs, info.saturation


def _waits_for(measured: Saturation | None, most: int, *, together: bool) -> int | None:
    """Return the number of tokens in a forward for which prefills wait, and log it.

    Return ``None`` if waiting is off, if ranks step ``together``, or if no forward of this engine
    has enough tokens.

    Args: most: number of tokens in the largest forward.
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
