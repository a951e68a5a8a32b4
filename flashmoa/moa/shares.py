"""How answers share the room there is for them; pure."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(lengths: Sequence[int], room: int) -> list[int]:
    """How much of each answer can stay, so that all fit into ``room``.

    Short ones stay whole and leave what they do not need to the longer ones, which are cut to
    one length (max-min fairness). The same unit throughout, tokens or characters.
    """
    shares = [0] * len(lengths)
    left = max(0, room)
    for done, place in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        shares[place] = min(lengths[place], left // (len(lengths) - done))
        left -= shares[place]
    return shares
