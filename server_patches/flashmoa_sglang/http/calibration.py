"""Measures, once the server is up, what a forward of this engine costs.

Prefills of growing size, each timed in the scheduler from the built batch to its result. They
wait until no other request uses the engine, and their KV is ordinary cache, evicted as any:
SGLang's own switch for leaving nothing in the cache loses the KV of requests cut into chunks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from flashmoa_sglang.costs import Costs
from flashmoa_sglang.options import Options
from flashmoa_sglang.saturation import LayerTimes, Saturation, saturation

if TYPE_CHECKING:
    from flashmoa_sglang.http.engine import Engine

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
# Another process may use the same core: until the two least of these agree.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_AGREE = 1.1
_DECODE_STEPS = 8
# Larger forwards follow a straight line from here on.
_LONG_SECONDS = 0.1
_IDLE_POLL = 0.05


async def measure(engine: Engine) -> tuple[Costs, list[LayerTimes]]:
    """Measure what forwards cost: the least of several rounds, since noise only adds.

    And what their layers took, where experts are in host memory.
    """
    dice = random.Random(0)
    sizes = [size for size in _SIZES if size <= engine.largest_forward]
    forwards: dict[int, list[float]] = {}
    layers: list[LayerTimes] = []
    # Seconds of whole answers of one token and of some more.
    answers: dict[int, list[float]] = {1: [], 1 + _DECODE_STEPS: []}
    for done in range(1, _MOST_ROUNDS + 1):
        for tokens, seconds in answers.items():
            await _until_idle(engine)
            seconds.append(await engine.time_answer(tokens))
        for size in sizes:
            await _until_idle(engine)
            ids = dice.choices(range(engine.vocabulary), k=size)
            forward = await engine.time_forward(ids)
            forwards.setdefault(size, []).append(forward.seconds)
            hidden = True
            if forward.layers is not None:
                layers.append(forward.layers)
                hidden = forward.layers.hidden
            # At two sizes at least; and a busy moment says nothing of the next round.
            if hidden and size != sizes[0] and min(forwards[size]) > _LONG_SECONDS:
                break
        if done >= _LEAST_ROUNDS and all(map(_is_steady, [*forwards.values(), *answers.values()])):
            break
    one, more = (min(seconds) for seconds in answers.values())
    points = tuple((size, min(seconds)) for size, seconds in forwards.items())
    return Costs(points, max(0.0, more - one) / _DECODE_STEPS), layers


def _is_steady(times: list[float]) -> bool:
    return len(times) > 1 and sorted(times)[1] <= _AGREE * min(times)


async def _until_idle(engine: Engine) -> None:
    while engine.others_active():  # noqa: ASYNC110 - SGLang has no event for it
        await asyncio.sleep(_IDLE_POLL)


async def calibrate(engine: Engine) -> None:
    """Measure and tell the schedulers; a failure leaves the guess in place and is logged."""
    if engine.role == "decode":
        return  # It has no prefills to plan.
    try:
        costs, layers = await measure(engine)
        most = await engine.most_tokens()
    except Exception as error:
        logger.warning("The cost of a forward could not be measured: %s", error)
        return
    engine.saturation = saturation(layers, most)
    waits_for = _waits_for(engine.saturation, most, together=engine.steps_together)
    engine.use_costs(costs, waits_for)
    logger.info(
        "A decode step takes %.1f ms, a prefill %s",
        1000 * costs.decode_step,
        ", ".join(f"of {tokens} tokens {1000 * time:.1f} ms" for tokens, time in costs.points),
    )


def _waits_for(measured: Saturation | None, most: int, *, together: bool) -> int | None:
    """Return the tokens of a forward for which prefills are to wait, and log them.

    ``None`` where it was not asked for, where ranks step ``together``, or where no forward of this
    engine has so many.
    """
    options = Options.from_environment()
    if not options.saturation_wait or not (options.saturation or measured is not None):
        return None
    if together:
        logger.warning(
            "Prefills are not held back: ranks with other requests would wait, too (--pp-size, "
            "data-parallel attention, --moe-a2a-backend, --moe-dense-tp-size)."
        )
        return None
    tokens = options.saturation or (measured.tokens if measured is not None else None)
    if tokens is None:
        logger.warning("No forward is long enough to hide transfers; prefills are not held back.")
        return None
    if tokens > most:
        logger.warning(
            "Forwards hide transfers from %d tokens on, and the largest one here has %d: prefills "
            "are not held back for it. --chunked-prefill-size, --max-prefill-tokens and "
            "--max-total-tokens allow for larger ones.",
            tokens,
            most,
        )
        return None
    logger.info(
        "Prefills wait up to %g s until they are %d tokens", options.saturation_wait, tokens
    )
    return tokens
