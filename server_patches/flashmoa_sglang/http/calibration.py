"""Learns what a forward costs on this engine while it serves, or reads it from a file.

Every scheduler tells the times of its forwards. Before the first request of a client comes, some
of the sizes that matter most run, so that their costs are known from the start. Their KV stays in
the cache until it is evicted: SGLang's own switch to cache nothing of a request loses the KV of
requests that are cut into chunks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import asynccontextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from flashmoa_sglang.cost_learner import DECODES, FEWEST, CostLearner, differ
from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES, UNMEASURED, Costs
from flashmoa_sglang.http.engine import new_rid
from flashmoa_sglang.http.errors import EngineBusy
from flashmoa_sglang.http.stream import Prefilled
from flashmoa_sglang.messages import ForwardTimes, RequestMark
from flashmoa_sglang.options import Options
from flashmoa_sglang.saturation import LayerTimes, Saturation, find_saturation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.messages import KvReport

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
# Forwards that take longer than this do not warm up; their costs are extrapolated linearly.
_LONG_SECONDS = 0.1
_IDLE_POLL = 0.05
# How many decode steps are timed, and how many tokens the answers have that decode meanwhile.
_STEPS, _ANSWER = 8, 64
# Costs are learned from so many new forwards, and after the warm-up not more often than after so
# many seconds.
_LEARNED_TOGETHER, _LEARN_SECONDS = 64, 2.0


class LearnedCosts:
    """What an engine has learned from the times of its forwards.

    Attributes:
        layers: the times of layers whose experts are copied to the device.
    """

    def __init__(self, engine: Engine) -> None:
        self.layers: list[LayerTimes] = []
        self._engine = engine
        self._learner = CostLearner(Options.from_environment().device_slowdown)
        self._is_due = asyncio.Event()
        engine.handle(ForwardTimes, self._receive)

    def _receive(self, report: ForwardTimes) -> None:
        if self._learner.add(report.forwards) >= _LEARNED_TOGETHER:
            self._is_due.set()
        if report.layers is not None:
            self.layers.append(report.layers)

    async def go_on(self) -> None:
        """Learn again and again, whenever some more forwards have run."""
        while True:
            await self._is_due.wait()
            await self.learn()
            await asyncio.sleep(_LEARN_SECONDS)

    async def learn_if_due(self) -> None:
        """Learn if enough forwards have run since; see :meth:`learn`."""
        if self._is_due.is_set():
            await self.learn()

    async def learn(self) -> None:
        """Learn from the forwards so far; tell the schedulers if decisions may change."""
        self._is_due.clear()
        before = self._engine.costs
        # It takes some milliseconds, for which no request is to wait.
        costs = await asyncio.to_thread(self._learner.learn)
        if costs is None or (before is not UNMEASURED and not differ(before, costs)):
            return
        self._engine.use_costs(costs, self._engine.waits_for)
        if before is UNMEASURED:
            _log_costs("As measured", costs)


class _ClientCame(Exception):
    """A request of a client has come, so that the engine measures no more on its own."""


class WarmUp:
    """Runs forwards and answers on an engine, for the times that its schedulers tell.

    Args: waits: whether it goes on when no other request runs; otherwise the first one ends it.
    """

    def __init__(self, engine: Engine, learned: LearnedCosts, *, waits: bool = False) -> None:
        self._engine = engine
        self._learned = learned
        self._waits = waits
        # A prompt that ran before would be found in the cache.
        self._dice = random.Random(0)
        self._longest = _LONG_SECONDS * Options.from_environment().device_slowdown

    async def run(self, ranks: Sequence[KvReport]) -> None:
        """Run each forward that matters a few times, unless a request of a client comes."""
        try:
            await self._run_all(ranks)
        except* _ClientCame:
            pass

    async def _run_all(self, ranks: Sequence[KvReport]) -> None:
        sizes = [size for size in _SIZES if size <= self._engine.max_unchunked_prompt]
        for _ in range(FEWEST):
            sizes = await self._prefill_all(sizes)
        # Every decode takes a place, and together at most half of the KV pool.
        bounds = (min(rank.max_running, rank.total // (2 * _ANSWER)) for rank in ranks)
        most = min(bounds, default=1)
        mixes = not any(rank.no_rides for rank in ranks)
        steps = [size for size in STEP_SIZES if mixes and size <= sizes[-1]]
        for decodes in (number for number in DECODES if number <= most):
            riding = [size - decodes for size in steps if size - decodes >= FEWEST_RIDING]
            for _ in range(FEWEST):
                riding = await self._ride_all(decodes, riding)
                # An answer alone has more steps than count.
                if not riding:
                    break
        await self._read_context(sizes, min(most, DECODES[-1]))

    async def _prefill_all(self, sizes: list[int]) -> list[int]:
        """Prefill as many tokens as each of ``sizes`` says; return those that are not too long."""
        for position, size in enumerate(sizes):
            seconds = await self._forward(self._tokens(size))
            layers = self._learned.layers
            hides_transfers = not layers or layers[-1].hides_transfers
            # Two sizes are needed at least.
            is_long = position > 0 and hides_transfers and seconds > self._longest
            if is_long and (size == sizes[-1] or await self._stays_long(size)):
                return sizes[: position + 1]
        return sizes

    async def _ride_all(self, decodes: int, sizes: list[int]) -> list[int]:
        """Run decode steps, and some with so many tokens; return those that are not too long.

        The first that is too long is among these, unless all are: then prefills say what they take.
        """
        async with self._decoding(decodes, [0]):
            for position, size in enumerate(sizes):
                is_long = await self._forward(self._tokens(size), rides=True) > self._longest
                if is_long and await self._stays_long(size, rides=True):
                    return sizes[: position + 1] if position else []
        return sizes

    async def _stays_long(self, size: int, *, rides: bool = False) -> bool:
        """Run a forward that was too long once more, because the first one of a size may compile.

        Return whether it is too long again, so that larger ones are not to run.
        """
        return await self._forward(self._tokens(size), rides=rides) > self._longest

    async def _read_context(self, sizes: list[int], decodes: int) -> None:
        """Run prefills that have run without context behind a long one, and decodes."""
        if self._engine.why_no_kv() is not None:
            return
        context: list[int] = []
        length = min(2 * sizes[-1], self._engine.max_prompt_tokens // 2)
        while len(context) < length:
            context += self._tokens(min(sizes[-1], length - len(context)))
            await self._forward(context)
        for size in sizes[-3:-1] * FEWEST:
            await self._forward([*context, *self._tokens(size)])
        for number in (1, decodes):
            async with self._decoding(number, context):
                # The times of decode steps are told with those of the prefill after them.
                await self._forward([0])

    def _tokens(self, number: int) -> list[int]:
        return self._dice.choices(range(self._engine.vocabulary), k=number)

    async def _wait_or_give_up(self) -> None:
        # SGLang would wait for these requests before it shuts down, and has no event for its end.
        while (starts := self._engine.warming_up) or self._is_in_use():
            if not (starts or self._waits):
                raise _ClientCame
            # An engine that is never idle has the costs of what it serves meanwhile.
            await self._learned.learn_if_due()
            await asyncio.sleep(_IDLE_POLL)

    def _is_in_use(self) -> bool:
        return self._engine.draining or self._engine.others_active()

    async def _forward(self, input_ids: list[int], *, rides: bool = False) -> float:
        """Run a forward with these tokens; return about how many seconds it took.

        Args: rides: whether the tokens ride along with a decode step, if one can be mixed with it.
        """
        await self._wait_or_give_up()
        started = time.perf_counter()
        mark = RequestMark(timed=True, rides=rides)
        Prefilled.read(await self._engine.generate(input_ids, mark))
        return time.perf_counter() - started

    @asynccontextmanager
    async def _decoding(self, requests: int, prompt: list[int]) -> AsyncGenerator[None]:
        """Let this many requests decode in the meantime, and a few steps before."""
        await self._wait_or_give_up()
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
        """Decode an answer; set ``decodes`` after some steps, or if it is refused."""

        def note(meta: dict[str, Any]) -> None:
            if decodes is not None and meta["completion_tokens"] > _STEPS:
                decodes.set()

        with suppress(EngineBusy):
            await self._engine.generate(
                prompt,
                RequestMark(timed=True),
                new_tokens=_ANSWER,
                rid=rid,
                # Each token that is told of takes the scheduler time.
                on_token=None if decodes is None else note,
            )
        if decodes is not None:
            decodes.set()


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


async def learn_costs(engine: Engine) -> None:
    """Calibrate an engine, and learn for as long as it serves, unless its costs are given."""
    learned = await calibrate(engine)
    if learned is None:
        return
    try:
        await learned.go_on()
    except Exception:
        logger.exception("The costs of forwards are not learned any more, but used as they are.")


async def calibrate(engine: Engine) -> LearnedCosts | None:
    """Learn the costs, or read them from ``--flashmoa-costs``, and send them to the schedulers.

    If that fails, it is logged, and the guess ``UNMEASURED`` stays in use until enough forwards of
    clients have run.

    Return what goes on learning; ``None`` if nothing does.
    """
    if engine.role == "decode":
        return None  # Costs are for planning prefills, which a decode engine does not run.
    options = Options.from_environment()
    learned = None if options.costs else LearnedCosts(engine)
    try:
        ranks = await engine.kv()
        _log_what_is_off(ranks)
        most = engine.largest_forward(ranks)
        if learned is None:
            costs, engine.saturation = read_costs(options.costs)
        else:
            await WarmUp(engine, learned, waits=options.asyncep != "off").run(ranks)
            costs, engine.saturation = engine.costs, find_saturation(learned.layers, most)
    except Exception as error:
        text = "The cost of a forward is a guess, until requests of clients have shown it: %s"
        logger.warning(text, error)
        return learned
    waits_for = _waits_for(engine.saturation, most, together=engine.steps_together)
    engine.use_costs(costs, waits_for)
    if learned is None:
        _log_costs(f"As {options.costs} says", costs)
    else:
        await learned.learn()
    return learned


def _log_costs(found: str, costs: Costs) -> None:
    logger.info(
        "%s, a decode step takes %.1f ms, a prefill %s",
        found,
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
            "yet; ask GET /flashmoa/info again when it has served for some seconds."
        )
    costs = info.costs
    found = [seconds for *_, seconds in (*costs.points, *costs.mixed)]
    found += [costs.decode_step, costs.per_kv_token, costs.per_pair]
    if not all(isfinite(seconds) and seconds >= 0 for seconds in found):
        raise ValueError(f"--flashmoa-costs {file} has seconds that are not numbers from 0 on.")
    return costs, info.saturation


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
