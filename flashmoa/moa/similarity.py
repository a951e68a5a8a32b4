"""How alike two texts are, from their embeddings; pure (needs numpy).

Frobenius cosine similarity of feature correlations (Faster-MoA Algorithm 1, lines 1-2 and 8-9),
without ever making the ``hidden x hidden`` matrices the formula is written in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Of one text: a row for each token or sentence, a column for each feature.
Embedding = NDArray[np.float32]

_TINY = 1e-12


def normalised(embedding: Embedding) -> Embedding:
    """Columns of length 1, so that ``X.T @ X`` is the features' correlation; ``[n, hidden]``."""
    lengths = np.linalg.norm(embedding, axis=0, keepdims=True)
    return (embedding / np.maximum(lengths, _TINY)).astype(np.float32)


def frobenius_cosine(one: Embedding, other: Embedding) -> float:
    """Similarity in [0, 1] of two :func:`normalised` embeddings, ``[n, hidden]``, ``[m, hidden]``.

    With ``Corr = X.T @ X``, ``<Corr_u, Corr_v>`` is ``||X_u @ X_v.T||**2``: ``n * m`` products of
    ``hidden`` numbers instead of ``hidden**2`` of ``n``.
    """
    both = _squares(one @ other.T)
    alone = (_squares(one @ one.T) * _squares(other @ other.T)) ** 0.5
    return min(1.0, both / alone) if alone > _TINY else 0.0


def _squares(matrix: NDArray[np.float32]) -> float:
    return float(np.sum(np.square(matrix, dtype=np.float64)))
