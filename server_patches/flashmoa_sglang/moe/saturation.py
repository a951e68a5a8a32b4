"""How many tokens a forward needs to hide the transfers of experts (MoE-Prefill §6.2, Eq. (1)).

A transfer is hidden if the layer that computes meanwhile takes as long. Both times are measured,
layer by layer, in forwards of several sizes (§B.4), instead of being computed from peak FLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoa_sglang.costs import Costs, Points

# The paper's gamma: a layer must compute this many times longer than a transfer takes.
MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times in a forward, in seconds.

    Attributes:
        tokens: number of tokens in the forward.
        window: a layer's computing time, while another layer's experts can be copied.
        transfer: time of the slowest copy of a layer's experts.
    """

    tokens: int
    window: float
    transfer: float

    @property
    def hides_transfers(self) -> bool:
        """Whether every copy took less time than a layer's computation, with the margin."""
        return self.window > MARGIN * self.transfer


@dataclass(frozen=True, slots=True)
class Saturation:
    """The measured times, and the resulting size of a forward.

    Attributes:
        tokens: tokens that a forward needs to hide transfers; ``None``: no forward is long enough.
        largest_forward: number of tokens in the largest forward that the engine runs.
        transfer: seconds to copy one layer's experts.
        windows: a layer's computing times, as (tokens, seconds).
    """

    tokens: int | None
    largest_forward: int
    transfer: float
    windows: Points


def find_saturation(measured: Iterable[LayerTimes], largest_forward: int) -> Saturation | None:
    """Find the saturation from the shortest times of each size, because noise only adds time.

    Return ``None`` if fewer than two sizes were measured, or nothing was transferred.
    """
    windows: dict[int, float] = {}
    transfers: list[float] = []
    for times in measured:
        windows[times.tokens] = min(times.window, windows.get(times.tokens, times.window))
        transfers.append(times.transfer)
    if len(windows) < 2 or not min(transfers):
        return None
    window_costs = Costs(tuple(windows.items()), decode_step=0.0)
    transfer = min(transfers)
    # One token more than the most tokens that still compute for too short a time.
    tokens = window_costs.tokens_within(MARGIN * transfer) + 1
    # ``tokens_within`` ends at a million tokens.
    needed = tokens if tokens < 1 << 20 else None
    return Saturation(needed, largest_forward, transfer, window_costs.points)


class SaturationGate:
    """Delays prefills until they are enough for a forward that hides transfers of experts.

    This is the admission of MoE-Prefill §7.4.

    Args:
        tokens: number of tokens that make a forward worth running.
        longest_wait: the most seconds that a request waits in total.
    """

    def __init__(self, tokens: int, longest_wait: float) -> None:
        self.tokens = tokens
        self._longest_wait = longest_wait
        # The seconds that each request in the queue has waited.
        self._waited: dict[str, float] = {}

    def must_wait(self, queue: Sequence[str], tokens: int, room: int, step: float) -> bool:
        """Decide whether the whole queue waits in this step.

        Args:
            queue: ids of the waiting requests.
            tokens: number of tokens that the requests have to compute.
            room: number of requests that could start.
            step: seconds that this step will take.
        """
        self._waited = {rid: self._waited.get(rid, 0.0) for rid in queue}
        if not queue or len(queue) >= room or tokens >= self.tokens:
            return False
        waited = {rid: seconds + step for rid, seconds in self._waited.items()}
        if max(waited.values()) > self._longest_wait:
            return False
        self._waited = waited
        return True
