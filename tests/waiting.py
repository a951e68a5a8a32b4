"""Wait for conditions that no event announces."""

from collections.abc import Callable

import anyio

# How many tokens of an open stream may wait for others, because they are not worth a forward.
LAG = 128


async def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until ``holds()`` is true. Raises: TimeoutError if it takes longer."""
    with anyio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110
            await anyio.sleep(0.002)
