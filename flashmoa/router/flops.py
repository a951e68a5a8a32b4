"""What computing part of a prompt costs; pure.

All costs are whole numbers and add up exactly: ``work(a, b) + work(b, c) == work(a, c)``. So a load
that is raised by a request's cost and lowered by what an engine has computed of it does not drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Measure(Protocol):
    """A unit of work; ``unit``: its name."""

    @property
    def unit(self) -> str: ...

    def work(self, start: int, end: int) -> int:
        """Of computing tokens ``start`` to ``end`` of a prompt whose first ``start`` are cached."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens as they are, for a model whose shape is not known (MoE-Prefill §B.4)."""

    @property
    def unit(self) -> str:
        return "tokens"

    def work(self, start: int, end: int) -> int:
        return max(0, end - start)


@dataclass(frozen=True, slots=True)
class TrueFlops:
    """A transformer's forward: what each token costs by itself, and each pair of tokens.

    Attributes:
        linear: FLOPs per token in the matrices of all layers.
        pair: FLOPs per query and key, over the layers that attend to everything.
        window_pair, window: the same over the layers that attend to ``window`` tokens only.

    The vocabulary's matrix is left out: prefill applies it to one token of a prompt.
    """

    linear: int
    pair: int
    window_pair: int = 0
    window: int = 0

    @property
    def unit(self) -> str:
        return "FLOPs"

    def work(self, start: int, end: int) -> int:
        if end <= start:
            return 0
        pairs = _pairs(end) - _pairs(start)
        near = _pairs_within(end, self.window) - _pairs_within(start, self.window)
        return self.linear * (end - start) + self.pair * pairs + self.window_pair * near


def saturation(
    measure: Measure, batch_tokens: int, *, margin: float = 1.2, exposed: float = 1.0
) -> int:
    """``T``: how much work fills an engine's forwards (MoE-Prefill Eq. 3).

    Args:
        batch_tokens: that the engine computes in one forward at most.
        margin: kappa, for what comes between two forwards.
        exposed: the slowest layer's seconds over those of its computing alone; 1 where no weights
            are transferred, or nothing is known of it.
    """
    return int(margin * max(1.0, exposed) * measure.work(0, batch_tokens))


def _pairs(length: int) -> int:
    """Queries and the keys they see, causally, in a prompt of ``length`` tokens."""
    return length * (length + 1) // 2


def _pairs_within(length: int, window: int) -> int:
    near = min(length, window)
    return _pairs(near) + (length - near) * window
