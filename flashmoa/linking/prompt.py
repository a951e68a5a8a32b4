"""Prompts whose text is partly still being written.

A prompt is a sequence of segments, text or :class:`Slot`; a slot is text that an upstream
agent is still producing (Faster-MoA: ``S_prefix, o1, o2, o3, S_suffix``). Its *stable
frontier* is the end of the longest prefix whose positions can no longer change: everything up
to and into the first slot that is still open (FlashAgents §4.2). Only that is ever sent for
prefill; what later slots hold waits here until the slots before them close. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Slot:
    """Text that an upstream agent is still writing.

    Attributes:
        name: its writer's name.
        strip_start, strip_end: whether the chat template strips white space there. Trailing
            white space is then withheld until more text shows that it was not trailing.
    """

    name: str
    strip_start: bool = False
    strip_end: bool = False
    _text: str = field(default="", init=False)
    _open: bool = field(default=True, init=False)

    @property
    def is_open(self) -> bool:
        return self._open

    def append(self, text: str) -> None:
        """Add text at the end. Raises: ValueError if the slot is closed."""
        if not self._open:
            raise ValueError(f"slot {self.name!r} is closed; nothing can be added to it")
        self._text += text

    def close(self) -> None:
        """Close the slot: no more text will come; harmless to repeat."""
        self._open = False

    def stable(self) -> str:
        """Return the text written so far whose place in the prompt is certain."""
        text = self._text.lstrip() if self.strip_start else self._text
        return text.rstrip() if self.strip_end else text


class Prompt:
    """Segments in order. Not safe to change from two threads.

    Args:
        segments: text and slots; a slot may appear once.
    """

    def __init__(self, segments: Iterable[str | Slot]) -> None:
        self.segments = tuple(segments)
        self.slots = tuple(part for part in self.segments if isinstance(part, Slot))
        if len(set(map(id, self.slots))) != len(self.slots):
            raise ValueError("a slot appears twice; give every place in a prompt its own slot")
        self._taken = 0

    @property
    def is_complete(self) -> bool:
        """Whether every slot is closed."""
        return not any(slot.is_open for slot in self.slots)

    def stable(self) -> str:
        """Return the text up to the stable frontier."""
        parts: list[str] = []
        for segment in self.segments:
            if isinstance(segment, str):
                parts.append(segment)
                continue
            parts.append(segment.stable())
            if segment.is_open:
                break
        return "".join(parts)

    def become(self, other: Prompt) -> None:
        """Go on as ``other``, in which more is certain.

        Raises:
            ValueError: ``other`` does not begin with what was taken already; the prompt is then
                unchanged.
        """
        taken = self.stable()[: self._taken]
        if not other.stable().startswith(taken):
            raise ValueError("the prompt does not begin with what was already sent of it")
        self.segments, self.slots = other.segments, other.slots

    def take(self) -> str:
        """Return what the stable frontier has passed since the last call; may be empty."""
        text = self.stable()
        new = text[self._taken :]
        self._taken = len(text)
        return new
