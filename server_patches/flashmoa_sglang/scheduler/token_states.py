"""``TokenStates``: compares texts by their tokens' hidden states (Faster-MoA, Algorithm 1).

Line numbers are the algorithm's. A text's states ``T``, ``[tokens, hidden]``, never leave the
scheduler: the HTTP process gets the similarities alone. ``T`` itself is not kept either, because
its Gram matrix ``T.T @ T`` can be summed up forward by forward, in as much memory for every length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import CompareTexts, Similarities
from flashmoa_sglang.scheduler.request import state_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Text:
    """The Gram matrix of a text's states so far, and the number of their tokens."""

    gram: torch.Tensor | None = None
    tokens: int = 0

    def add(self, states: torch.Tensor) -> None:
        """Add the states of the text's next tokens, ``[tokens, hidden]``."""
        import torch

        width = states.shape[1]
        gram = torch.zeros(width, width, dtype=torch.float32, device=states.device)
        # In blocks, because copies in float32 of all states may not fit beside SGLang's buffers.
        for block in states.split(1024):
            rows = block.float()
            gram.addmm_(rows.T, rows)
        # Host memory: SGLang's pool leaves a device little room.
        self.gram = gram.cpu() if self.gram is None else self.gram + gram.cpu()
        self.tokens += len(states)


class TokenStates:
    """The texts of a scheduler that will be compared, by the ids of their requests."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def expect(self, req: Any) -> None:
        """Prepare for a request that enters the queue, if its text will be compared.

        The request gets a namespace of its own: cached tokens are not computed and have no states.
        """
        mark = state_of(req).mark
        if mark is not None and mark.compared:
            req.extra_key = req.rid
            self._texts[req.rid] = _Text()

    @contextmanager
    def collecting(self, reqs: Sequence[Any]) -> Generator[None]:
        """Collect the states of a batch's requests while its forward is launched."""
        if not self._texts:
            yield
            return

        def collect(states: torch.Tensor, lengths: Sequence[int]) -> None:
            total = sum(lengths)
            if len(states) < total:  # Each rank has a part of the states.
                return
            # A CUDA graph's forward may be longer than its batch.
            for req, rows in zip(reqs, states[:total].split(list(lengths)), strict=False):
                if (text := self._texts.get(req.rid)) is None:
                    continue
                try:
                    text.add(rows)
                except RuntimeError:  # A matrix does not fit the memory that SGLang has left.
                    logger.exception("FlashMoA: a text's token states cannot be read")
                    self._texts[req.rid] = _Text()

        token = _collect.set(collect)
        try:
            yield
        finally:
            _collect.reset(token)

    def compare(self, message: CompareTexts) -> Similarities:
        """Return the similarities of texts whose prefill has ended, and forget these texts."""
        texts = [self._texts.pop(rid, _Text()) for rid in message.rids]
        grams = [text.gram for text in texts if text.gram is not None]
        complete = len(grams) == len(texts)
        rows = frobenius_cosines(grams) if complete and message.query is not None else []
        return Similarities(message.query, tuple(text.tokens for text in texts), rows)


# Collects the hidden states and lengths of the forward that is launched now. Poolers know neither
# the scheduler nor its requests, and the batch inside a CUDA graph has no request ids.
_collect: ContextVar[Callable[[Any, Sequence[int]], None] | None] = ContextVar(
    "_collect", default=None
)


def pool(_result: Any, _pooler: Any, hidden_states: Any, forward_batch: Any) -> None:
    """Collect the token states of an embedding model's forward; runs after ``Pooler.forward``."""
    if (collect := _collect.get()) is not None:
        collect(hidden_states, forward_batch.extend_seq_lens_cpu)


def frobenius_cosines(grams: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return the Frobenius cosine similarity, in [0, 1], of each pair of texts (lines 1, 2 and 9).

    Args:
        grams: for each text ``T.T @ T``, ``[hidden, hidden]`` (line 8).

    Returns: no rows if a state is not finite, as states in float16 may be.
    """
    import torch

    flat = torch.empty(len(grams), grams[0].numel())
    for row, gram in zip(flat, grams, strict=True):
        least = torch.finfo(gram.dtype).tiny
        # Corr(T.T @ T) divides by the lengths of T's columns. Line 2 divides by the matrix's norm.
        scale = gram.diagonal().clamp_min(least).rsqrt()
        correlation = gram * scale[:, None] * scale
        row[:] = (correlation / correlation.norm().clamp_min(least)).flatten()
    rows = flat @ flat.T
    return rows.clamp(0.0, 1.0).tolist() if bool(rows.isfinite().all()) else []
