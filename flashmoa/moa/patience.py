"""Reading an answer that may stall."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio

from flashmoa.linking.streamed_text import Text


async def patiently(answer: Text, stall_seconds: float | None) -> AsyncGenerator[str]:
    """Its pieces. Raises: TimeoutError where, once it has begun, none comes for so long; what the
    answer failed with."""
    pieces, patience, piece = aiter(answer), None, None
    while True:
        with anyio.move_on_after(patience) as waiting:
            piece = await anext(pieces, None)
        if waiting.cancelled_caught:
            raise TimeoutError(f"it stalled: nothing came for {patience:g} s")
        if piece is None:
            return
        patience = stall_seconds
        yield piece
