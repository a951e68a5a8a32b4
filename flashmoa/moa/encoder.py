"""A BERT encoder in numpy: small sentence models on the CPU, without torch in this process.

After Devlin et al., *BERT*, 2019: post-norm transformer layers over learned positions.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from flashmoa.moa.similarity import Embedding

Array = NDArray[Any]


class Encoder:
    """A model folder as transformers writes it: ``config.json``, ``model.safetensors`` and
    ``tokenizer.json``.

    Args:
        longest: tokens at which texts are cut; ``[CLS]`` and ``[SEP]`` count.

    Raises: OSError where a file is missing; ValueError where it is no BERT.
    """

    def __init__(self, folder: Path, longest: int = 256) -> None:
        # Without types of their own.
        weights: Any = import_module("safetensors.numpy")
        tokenizers: Any = import_module("tokenizers")
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if config.get("model_type") != "bert":
            raise ValueError(f"{folder} is no BERT but a {config.get('model_type')!r}")
        self._weights: dict[str, Array] = weights.load_file(folder / "model.safetensors")
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(longest)
        self._tokenizer.no_padding()

    def __call__(self, text: str) -> Embedding:
        """Last-layer hidden states, ``[tokens, hidden]``; on one core: engines need the others."""
        with threadpool_limits(1):
            return self._states(text)

    def _states(self, text: str) -> Embedding:
        ids: list[int] = self._tokenizer.encode(text).ids
        tables = "embeddings.word_embeddings", "embeddings.position_embeddings"
        words, positions = (self._weights[f"{name}.weight"] for name in tables)
        kind = self._weights["embeddings.token_type_embeddings.weight"][0]
        states = self._norm("embeddings", words[ids] + positions[: len(ids)] + kind)
        for number in range(self._layers):
            states = self._layer(f"encoder.layer.{number}", states)
        return states

    def _layer(self, name: str, states: Array) -> Array:
        mixed = self._linear(f"{name}.attention.output.dense", self._attention(name, states))
        states = self._norm(f"{name}.attention.output", states + mixed)
        wide = _gelu(self._linear(f"{name}.intermediate.dense", states))
        return self._norm(f"{name}.output", states + self._linear(f"{name}.output.dense", wide))

    def _attention(self, name: str, states: Array) -> Array:
        tokens, hidden = states.shape

        def heads(which: str) -> Array:
            projected = self._linear(f"{name}.attention.self.{which}", states)
            return projected.reshape(tokens, self._heads, -1).transpose(1, 0, 2)

        scores = heads("query") @ heads("key").transpose(0, 2, 1)
        scores /= np.sqrt(hidden / self._heads, dtype=np.float32)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return (shares @ heads("value")).transpose(1, 0, 2).reshape(tokens, hidden)

    def _linear(self, name: str, states: Array) -> Array:
        return states @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, name: str, states: Array) -> Array:
        centred = states - states.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + self._epsilon)
        weight, bias = (self._weights[f"{name}.LayerNorm.{one}"] for one in ("weight", "bias"))
        return centred / deviation * weight + bias


def _gelu(x: Array) -> Array:
    return x * (1 + _erf(x / np.sqrt(2, dtype=np.float32))) / 2


def _erf(x: Array) -> Array:
    """To 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911) * size)
    factors = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = np.zeros_like(t)
    for factor in factors:
        series = (series + np.float32(factor)) * t
    return np.sign(x) * (1 - series * np.exp(-size * size))
