"""The notebooks' engines: running ones, or some with small models on this machine's CPU."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

from flashmoa_bench.duo import on_this_cpu
from flashmoa_bench.family.models import SIZES, model_folder
from rich.console import Console

from flashmoa.engine.local import local_engines

_EXAMPLES = Path(__file__).parents[1]
_DOCUMENTS = [_EXAMPLES / "guides" / "nepal.md", _EXAMPLES / "papers" / "handoffs.md"]


class Engines:
    """Engines by their URLs: ``small`` and ``large``, and of the family ``medium``, too."""

    def __init__(self, small: str, large: str, started: AsyncExitStack, medium: str = "") -> None:
        self.small = small
        self.medium = medium
        self.large = large
        self._started = started

    async def stop(self) -> None:
        """End what was started here; running engines go on."""
        await self._started.aclose()


async def start() -> Engines:
    """The engines named in FLASHMOA_ENGINE, one URL or two with a space between; without it, two
    are started here, one per core. They end with :meth:`Engines.stop`, or with the notebook."""
    given = os.environ.get("FLASHMOA_ENGINE", "").split()
    async with AsyncExitStack() as stack:
        if not given:
            # A notebook is no terminal, whatever it says.
            console = Console(width=100, force_jupyter=False, force_terminal=False)
            cache = _EXAMPLES.parent / ".cache"
            given = await stack.enter_async_context(on_this_cpu(cache, _DOCUMENTS, console))
        return Engines(given[0], given[-1], stack.pop_all())


async def start_family() -> Engines:
    """The three trained models of :mod:`flashmoa_bench.family`: on the engines of
    FLASHMOA_FAMILY, three URLs from small to large, or on three that are started here."""
    given = os.environ.get("FLASHMOA_FAMILY", "").split()
    async with AsyncExitStack() as stack:
        if not given:
            engines = await stack.enter_async_context(local_engines())
            for size, core in zip(SIZES, (0, 0, 1), strict=True):
                engine = await engines.start(
                    model_folder(size), core=core, arguments=["--max-total-tokens", "16000"]
                )
                given.append(engine.url)
        small, medium, large = given
        return Engines(small, large, stack.pop_all(), medium)
