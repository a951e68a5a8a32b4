"""Choose the embedder by which early exit compares answers."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from dataclasses import dataclass

from flashmoa.engine import EngineClient
from flashmoa.moa import Embedder, EngineEmbedder, LocalEmbedder
from flashmoa.moa.embedding import Embedding
from flashmoa_bench.harness import clock


async def make_embedder(arguments: argparse.Namespace, stack: AsyncExitStack) -> Embedder:
    """Return the embedder on the engine of ``--embedding-url``, otherwise one in this process."""
    if arguments.embedding_url is None:
        return StretchedEmbedder(LocalEmbedder())
    engine = EngineClient(arguments.embedding_url)
    return EngineEmbedder(await stack.enter_async_context(engine))


@dataclass(frozen=True, slots=True)
class StretchedEmbedder:
    """Lets an embedder take as many times as long as the modelled GPUs are slowed down by."""

    embedder: Embedder

    async def embed(self, text: str) -> Embedding:
        """Return what the embedder returns, later if GPUs are slowed down."""
        started = clock.now()
        embedding = await self.embedder.embed(text)
        spent = clock.now() - started
        await clock.sleep(clock.machine_seconds(spent) - spent)
        return embedding
