"""The notebooks' engines: running ones, or some with small models on this machine's CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from flashmoa.engine.local import local_engines
from flashmoa.engine.tiny_models import tiny_engines

_EXAMPLES = Path(__file__).parents[1]
_DOCUMENTS = [_EXAMPLES / "guides" / "nepal.md", _EXAMPLES / "papers" / "handoffs.md"]


class Engines:
    """Engines by their URLs: ``small`` and ``large``; of three, the second one is ``medium``."""

    def __init__(self, urls: Sequence[str], started: AsyncExitStack) -> None:
        self.small, self.medium, self.large = urls[0], urls[len(urls) // 2], urls[-1]
        self._started = started

    async def stop(self) -> None:
        """End what was started here; running engines go on."""
        await self._started.aclose()


async def start() -> Engines:
    """Start two engines with tiny models, one per core, or take those of FLASHMOA_ENGINE.

    That is one URL, or two with a space between. Engines that are started end with
    :meth:`Engines.stop`, or with the notebook.
    """
    given = os.environ.get("FLASHMOA_ENGINE", "").split()
    async with AsyncExitStack() as stack:
        if not given:
            models = _EXAMPLES.parent / ".cache" / "models"
            two = tiny_engines(["small", "large"], _DOCUMENTS, models, print)
            given = [engine.url for engine in await stack.enter_async_context(two)]
        return Engines(given, stack.pop_all())


async def start_on(models: Sequence[Path]) -> Engines:
    """Start an engine on each of three models' folders, or take the URLs of FLASHMOA_FAMILY.

    The two smaller models share core 0.
    """
    given = os.environ.get("FLASHMOA_FAMILY", "").split()
    async with AsyncExitStack() as stack:
        if not given:
            engines = await stack.enter_async_context(local_engines())
            for model, core in zip(models, (0, 0, 1), strict=True):
                pool = ["--max-total-tokens", "16000"]
                given.append((await engines.start(model, core=core, arguments=pool)).url)
        return Engines(given, stack.pop_all())
