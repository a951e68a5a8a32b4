"""Wait for some of several things (``wait_for_several``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from flashmoa import Text

Wait = Callable[[], Awaitable[object]]


async def wait_for_several(waits: Sequence[Wait], count: int) -> None:
    """Return when ``count`` of the calls have returned without an exception, or all have ended."""
    left = count
    async with anyio.create_task_group() as group:

        async def run(wait: Wait) -> None:
            nonlocal left
            try:
                await wait()
            except Exception:
                return  # Whoever reads it gets the error.
            left -= 1
            if left <= 0:
                group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(run, wait)


async def wait_for_text(text: Text) -> None:
    """Return when a text has begun. Raises: ValueError if it ends empty; the text's own error."""
    async for _ in text:
        return
    raise ValueError(f"{text.name} is empty")
