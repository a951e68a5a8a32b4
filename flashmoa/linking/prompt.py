"""Assemble prompts whose text is partly still being written (:class:`Prompt`).

A prompt is a sequence of segments, text or :class:`Slot`; a slot is text that an upstream
agent is still writing (Faster-MoA: ``S_prefix, o1, o2, o3, S_suffix``). The *stable frontier*
is the end of the longest prefix whose positions can no longer change: everything up to and
into the first slot that is still open (FlashAgents §4.2). Only that prefix is ever sent for
prefill; the text of later slots waits here until the slots before them close. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Slot:
    """Text that an upstream agent is still writing.

    Attributes:
        name: the name of its writer.
        strip_start, strip_end: whether the chat template strips white space at the start, and at
            the end. Trailing white space is then withheld until more text follows it.
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
        """Add text at the end.

        Raises: ValueError if the slot is closed.
        """
        if not self._open:
            raise ValueError(f"slot {self.name!r} is closed; add its text before closing it")
        self._text += text

    def close(self) -> None:
        """Close the slot, since no more text will come. Repeating this is harmless."""
        self._open = False

    def stable(self) -> str:
        """Return the text written so far whose place in the prompt is certain."""
        text = self._text.lstrip() if self.strip_start else self._text
        return text.rstrip() if self.strip_end else text


class Prompt:
    """A sequence of segments, whose text is taken piece by piece. Not thread-safe.

    Args:
        segments: texts and slots; a slot may appear once.

    Raises:
        ValueError: if a slot appears twice.
    """

    def __init__(self, segments: Iterable[str | Slot]) -> None:
        self.segments = tuple(segments)
        self.slots = tuple(segment for segment in self.segments if isinstance(segment, Slot))
        if len(set(map(id, self.slots))) != len(self.slots):
            names = [slot.name for slot in self.slots]
            raise ValueError(
                f"a slot appears twice among {names}; give every place in a prompt its own slot"
            )
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
        """Replace the segments by those of ``other``, in which more text is certain.

        Raises:
            ValueError: if ``other`` does not begin with the text that was taken; the prompt is then
                unchanged.
        """
        taken = self.stable()[: self._taken]
        if not other.stable().startswith(taken):
            raise ValueError(
                "the new prompt does not begin with the text that was already sent; end this link "
                "and open a new one"
            )
        self.segments, self.slots = other.segments, other.slots

    def take(self) -> str:
        """Return the text that the stable frontier has passed since the last call; may be empty."""
        text = self.stable()
        new = text[self._taken :]
        self._taken = len(text)
        return new
