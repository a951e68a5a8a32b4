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
    from flashmoa_sglang.engine import Engine

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
_REPEATS = 3
_DECODE_STEPS = 8
# Larger forwards follow a straight line from here on.
_LONG_SECONDS = 0.1
_IDLE_POLL = 0.05


async def measure(engine: Engine) -> Costs:
    """What forwards cost; the least of a few tries each, since noise only adds."""
    dice = random.Random(0)
    points: list[tuple[int, float]] = []
    for tokens in _SIZES:
        if tokens > engine.largest_forward:
            break
        seconds: list[float] = []
        for _ in range(_REPEATS):
            await _until_idle(engine)
            ids = [dice.randrange(engine.vocabulary) for _ in range(tokens)]
            seconds.append(await engine.time_forward(ids))
        points.append((tokens, min(seconds)))
        if points[-1][1] > _LONG_SECONDS:
            break
    steps: list[float] = []
    for _ in range(_REPEATS):
        await _until_idle(engine)
        steps.append(await engine.time_decode(_DECODE_STEPS))
    return Costs(tuple(points), min(steps))


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
