"""Provide the notebooks' engines: running ones, or some with small models on this CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from flashmoa.engine.local import tiny_engines

_EXAMPLES = Path(__file__).parents[1]
sys.path.append(str(_EXAMPLES))

from smollm2 import MODELS, smollm2_engines  # noqa: E402 - it is beside this folder

_DOCUMENTS = [_EXAMPLES / "guides" / "nepal.md", _EXAMPLES / "papers" / "handoffs.md"]


class Engines:
    """Holds the URLs of two engines, ``small`` and ``large``; they are the same if there is one."""

    def __init__(self, urls: Sequence[str], started: AsyncExitStack) -> None:
        self.small, self.large = urls[0], urls[-1]
        self._started = started

    async def stop(self) -> None:
        """Stop the engines that were started here."""
        await self._started.aclose()


async def start(*, real: bool = False) -> Engines:
    """Start two engines with tiny models, one per core; or take FLASHMOA_ENGINE's engines.

    If ``real``, both have SmolLM2 instead, which writes English.

    This environment variable has one URL, or two separated by a space. Started engines run until
    :meth:`Engines.stop`, or until the notebook ends.
    """
    urls = os.environ.get("FLASHMOA_ENGINE", "").split()
    async with AsyncExitStack() as stack:
        if not urls:
            two = (
                smollm2_engines(2, MODELS, print)
                if real
                else tiny_engines(["small", "large"], _DOCUMENTS, MODELS, print)
            )
            urls = [engine.url for engine in await stack.enter_async_context(two)]
        return Engines(urls, stack.pop_all())
