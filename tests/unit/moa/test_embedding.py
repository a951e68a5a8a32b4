"""``LocalEmbedder`` reads whole answers."""

from __future__ import annotations

import numpy as np
import pytest

from flashmoa.moa import LocalEmbedder

pytestmark = pytest.mark.anyio


async def test_long_text_is_embedded_to_its_end() -> None:
    embedder = LocalEmbedder()
    short = await embedder.embed("word " * 100)
    assert short.shape == (102, 384)
    one, other = [await embedder.embed("word " * 400 + end) for end in ("yes", "never")]
    # Windows of 254 words, each with two tokens around it.
    assert one.shape == (401 + 4, 384)
    assert np.array_equal(one[:256], other[:256]) and not np.allclose(one[-2], other[-2])
