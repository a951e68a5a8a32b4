"""``LocalEmbedder`` reads whole answers, one at a time."""

from __future__ import annotations

from threading import Event

import anyio
import numpy as np
import pytest

from flashmoa.moa import LocalEmbedder
from flashmoa.moa.embedding import Embedding

pytestmark = pytest.mark.anyio


async def test_long_text_is_embedded_to_its_end() -> None:
    embedder = LocalEmbedder()
    short = await embedder.embed("word " * 100)
    assert short.shape == (102, 384)
    one, other = [await embedder.embed("word " * 400 + end) for end in ("yes", "never")]
    # Windows of 254 words, each with two tokens around it.
    assert one.shape == (401 + 4, 384)
    assert np.array_equal(one[:256], other[:256]) and not np.allclose(one[-2], other[-2])


async def test_abandoned_text_is_never_encoded_beside_another() -> None:
    embedder, proceed = LocalEmbedder(), Event()
    began: list[str] = []
    running = most = 0

    def encode(text: str) -> Embedding:
        nonlocal running, most
        began.append(text)
        running += 1
        most = max(most, running)
        proceed.wait(20)
        running -= 1
        return np.zeros((1, 1), np.float32)

    embedder._encoder = encode  # type: ignore[assignment] # pyright: ignore
    async with anyio.create_task_group() as group:
        for text in ("computing", "waiting"):  # Both are abandoned.
            decision = anyio.CancelScope()
            group.start_soon(embed_until, decision, embedder, text)
            await anyio.wait_all_tasks_blocked()
            decision.cancel()
        group.start_soon(embedder.embed, "wanted")
        await anyio.wait_all_tasks_blocked()
        proceed.set()
    assert began == ["computing", "wanted"] and most == 1


async def embed_until(decision: anyio.CancelScope, embedder: LocalEmbedder, text: str) -> None:
    with decision:
        await embedder.embed(text)
