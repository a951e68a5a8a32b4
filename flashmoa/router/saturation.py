"""Compute from how much work on an engine is full (MoE-Prefill, Eq. 3 and §B.4). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoa.router.flops import Measure

# Gamma in Eq. 1, as engines measure their saturation: in a forward that hides the transfers of
# experts, a layer computes this many times longer than its transfer takes.
TRANSFER_MARGIN = 1.2
# Kappa in Eq. 3: an engine is full with this many forwards, to bridge the time between two.
FORWARD_MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """Sizes of an engine's forwards, in tokens.

    Attributes:
        largest: the largest forward that the engine runs.
        needed: the smallest forward that hides the transfers of experts, with the margin of Eq. 1;
            0 if the engine has measured none.
        waits_for: the forward that prefills in the engine's queue wait for; 0: they do not wait.
    """

    largest: int
    needed: int = 0
    waits_for: int = 0


@dataclass(frozen=True, slots=True)
class FullLoad:
    """The work (the threshold T) *and* the number of tokens that a saturated engine computes."""

    work: int
    tokens: int = 0


def full_load(measure: Measure, sizes: ForwardSizes, margin: float = FORWARD_MARGIN) -> FullLoad:
    """Return the load that saturates an engine of one rank.

    A load counts the running forward, and the engine's own prefills wait for tokens in its queue.
    So that they never wait for requests that the router withholds, the load has these tokens
    besides the largest forward. T alone does not ensure that: long prompts reach it with
    few tokens.

    Eq. 3 multiplies the largest forward's work by a ratio: the time of its slowest layer over the
    time of a layer that waits for no transfer. Without its margin, the needed forward is one whose
    layers take as long as a transfer. So if it is larger than the largest forward, the slowest
    layer takes as long as a layer of the needed forward, and the product is about its work.

    Args:
        margin: kappa in Eq. 3.
    """
    # A size that the engine's operator has given takes the place of the measured one.
    needed = sizes.waits_for or sizes.needed
    reference = max(sizes.largest, round(needed / TRANSFER_MARGIN))
    work = max(measure.forward_work(needed), int(margin * measure.forward_work(reference)))
    return FullLoad(max(1, work), sizes.largest + sizes.waits_for if sizes.waits_for else 0)
