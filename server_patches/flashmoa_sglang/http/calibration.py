"""Measures, once the server is up, what a forward of this engine costs.

Prefills of growing size, each timed in the scheduler from the built batch to its result. They
wait until nobody else uses the engine, and their KV is ordinary cache, evicted as any:
SGLang's own switch for leaving nothing in the cache loses the KV of requests cut into chunks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from flashmoa_sglang.costs import Costs

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


async def measure(engine: Engine) -> Costs:
    """What forwards cost; the least of several rounds, since noise only adds."""
    dice = random.Random(0)
    sizes = [size for size in _SIZES if size <= engine.largest_forward]
    forwards: dict[int, list[float]] = {}
    # Seconds of whole answers of one token and of some more.
    answers: dict[int, list[float]] = {1: [], 1 + _DECODE_STEPS: []}
    for done in range(1, _MOST_ROUNDS + 1):
        for tokens, seconds in answers.items():
            await _until_idle(engine)
            seconds.append(await engine.time_answer(tokens))
        for size in sizes:
            await _until_idle(engine)
            ids = dice.choices(range(engine.vocabulary), k=size)
            forwards.setdefault(size, []).append(await engine.time_forward(ids))
            if min(forwards[size]) > _LONG_SECONDS:
                sizes = sizes[: sizes.index(size) + 1]
                break
        if done >= _LEAST_ROUNDS and all(map(_is_steady, [*forwards.values(), *answers.values()])):
            break
    one, more = (min(seconds) for seconds in answers.values())
    points = tuple((size, min(seconds)) for size, seconds in forwards.items())
    return Costs(points, max(0.0, more - one) / _DECODE_STEPS)


def _is_steady(times: list[float]) -> bool:
    least, next_to_it = sorted(times)[:2]
    return next_to_it <= _AGREE * least


async def _until_idle(engine: Engine) -> None:
    while engine.others_active():  # noqa: ASYNC110 - SGLang tells nobody
        await asyncio.sleep(_IDLE_POLL)


async def calibrate(engine: Engine) -> None:
    """Measure and tell the schedulers; a failure leaves the guess in place and is logged."""
    try:
        costs = await measure(engine)
    except Exception as error:
        logger.warning("The cost of a forward could not be measured: %s", error)
        return
    engine.use_costs(costs)
    logger.info(
        "A decode step takes %.1f ms, a prefill %s",
        1000 * costs.decode_step,
        ", ".join(f"of {tokens} tokens {1000 * time:.1f} ms" for tokens, time in costs.points),
    )
