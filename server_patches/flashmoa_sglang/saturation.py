"""From how many tokens on a forward hides the transfers of experts (MoE-Prefill §6.2, Eq. (1)).

A transfer is hidden where what computes beside it takes as long. Both are measured, layer by layer,
in forwards of several sizes (§B.4), so that no peak FLOP/s has to be believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashmoa_sglang.costs import Costs, Points

# gamma: how much longer than a transfer a layer is to compute.
MARGIN = 1.2
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Of one forward of so many ``tokens``, in seconds.

    ``window``: computing of one layer beside which the experts of one layer can come. ``transfer``:
    of the layer whose experts took longest.
    """

    tokens: int
    window: float
    transfer: float

    @property
    def hidden(self) -> bool:
        """Whether transfers took less than what computed beside them."""
        return self.window > MARGIN * self.transfer


@dataclass(frozen=True, slots=True)
class Saturation:
    """What was measured, and what follows.

    Attributes:
        tokens: in a forward from which transfers are hidden; ``None``: no forward is long enough.
        largest_forward: tokens of this engine's largest.
        transfer: seconds of one layer's experts. windows: as (tokens, seconds) of one layer.
    """

    tokens: int | None
    largest_forward: int
    transfer: float
    windows: Points


def saturation(measured: Iterable[LayerTimes], largest_forward: int) -> Saturation | None:
    """Find the saturation in forwards of at least two sizes; noise adds, so the least counts.

    ``None`` with fewer sizes, and where nothing is transferred.
    """
    windows: dict[int, float] = {}
    transfers: list[float] = []
    for times in measured:
        windows[times.tokens] = min(times.window, windows.get(times.tokens, times.window))
        transfers.append(times.transfer)
    if len(windows) < 2 or not min(transfers):
        return None
    computing = Costs(tuple(windows.items()), decode_step=0.0)
    transfer = min(transfers)
    # One more than the most that compute for a shorter time.
    tokens = computing.tokens_within(MARGIN * transfer) + 1
    return Saturation(
        tokens if tokens < _MOST_TOKENS else None, largest_forward, transfer, computing.points
    )
