"""Walk the stack, to find on whose behalf code runs where a framework does not tell."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def frames() -> Iterator[FrameType]:
    """Yield the frames of the code that calls this, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def owners() -> Iterator[object]:
    """Yield the ``self`` of each method on the stack, the innermost first."""
    return (frame.f_locals["self"] for frame in frames() if "self" in frame.f_locals)
