"""Compare texts without an engine."""

from collections.abc import Awaitable, Callable, Sequence

import anyio.lowlevel


class Embedder:
    """Finds all texts alike, and waits before each answer.

    Attributes:
        texts: the texts of each comparison so far.
    """

    def __init__(self, wait: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint) -> None:
        self.texts: list[list[str]] = []
        self._wait = wait

    async def compare(self, texts: Sequence[str]) -> list[list[float]]:
        self.texts.append([*texts])
        await self._wait()
        return [[1.0] * len(texts) for _ in texts]
