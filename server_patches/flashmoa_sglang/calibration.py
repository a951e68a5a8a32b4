"""Measures, once the server is up, what a forward of this engine costs.

Prefills of growing size, each timed in the scheduler from the built batch to its result. They
leave nothing in the KV pool, and they wait until nobody else uses the engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from flashmoa_sglang.costs import CostCurve

if TYPE_CHECKING:
    from flashmoa_sglang.engine import Engine

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
_REPEATS = 3
# Larger forwards follow a straight line from here on.
_LONG_SECONDS = 0.1
_IDLE_POLL = 0.05


async def measure(engine: Engine) -> CostCurve:
    """The engine's cost curve; the least of a few tries each, since noise only adds."""
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
    return CostCurve(tuple(points))


async def _until_idle(engine: Engine) -> None:
    while engine.others_active():  # noqa: ASYNC110 - SGLang tells nobody
        await asyncio.sleep(_IDLE_POLL)


async def calibrate(engine: Engine) -> None:
    """Measure and tell the schedulers; a failure leaves the guess in place and is logged."""
    try:
        curve = await measure(engine)
    except Exception as error:
        logger.warning("The cost of a forward could not be measured: %s", error)
        return
    engine.use_costs(curve)
    logger.info(
        "Cost of a forward: %s",
        ", ".join(f"{tokens} tokens {1000 * seconds:.1f} ms" for tokens, seconds in curve.points),
    )
