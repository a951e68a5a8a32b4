"""Assemble prompts whose text is partly still being written (:class:`Prompt`), from prompts that
engines rendered around placeholders for it (:class:`Placeholders`).

A prompt is a sequence of segments, text or :class:`Slot`; a slot is text that an upstream
agent is still writing (Faster-MoA: ``S_prefix, o1, o2, o3, S_suffix``). The *stable frontier*
is the end of the longest prefix whose positions can no longer change: everything up to and
into the first slot that is still open (FlashAgents §4.2). Only that prefix is ever sent for
prefill; the text of later slots waits here until the slots before them close. No I/O.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashmoa.errors import FlashMoAError
from flashmoa.link.learned_texts import common_prefix

# The name of a slot that never gets any text, since the rest of its prompt is not certain yet.
UNCERTAIN = "(not certain yet)"

# White space around a placeholder: if it is missing from the prompt, the chat template strips it.
_MARGIN = "  "
# A placeholder without its margins; others of this form may be in a text.
_CORE = re.compile(r"\[[0-9a-f]{16}\]")


@dataclass(eq=False, slots=True)
class Slot:
    """Text that an upstream agent is still writing.

    Attributes:
        name: the name of its writer.
        strip_start, strip_end: whether the chat template strips white space at the start, and at
            the end. Trailing white space is then withheld until more text follows it.
        call: the id of the call that writes it, if the prompt's engine adds its text by itself.
    """

    name: str
    strip_start: bool = False
    strip_end: bool = False
    call: str | None = field(default=None, init=False)
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

    def replace(self, text: str) -> None:
        """Put another text in the place of what was added. See :meth:`Prompt.replace`."""
        self._text = text
        self.call = None

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
        # How many characters were taken, and how many of these are still right.
        self._taken = 0
        self._right = 0
        # The id of the call that the stream follows: the engine adds the call's text.
        self._followed: str | None = None

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
            if segment.is_open and segment.call is not None:
                break
            parts.append(segment.stable())
            if segment.is_open:
                break
        return "".join(parts)

    def follow(self, slot: Slot, call_id: str) -> None:
        """Let the prompt's engine add the text of a slot while it writes that text itself.

        Nothing is done if a part of the text was taken, or the template strips it.
        """
        if slot.strip_start or slot.strip_end or not slot.is_open:
            return
        earlier = slot.call
        slot.call = call_id
        if len(self.stable()) < self._right:
            slot.call = earlier

    def followed(self) -> str | None:
        """Return the id of the call whose text the engine is to add now; ``None`` if it is none."""
        first = next((slot for slot in self.slots if slot.is_open), None)
        return first.call if first is not None else None

    def note_followed(self, call_id: str) -> None:
        """Note that the engine adds a call's text from now on, right after what was taken."""
        self._followed = call_id

    @property
    def is_followed(self) -> bool:
        """Whether the engine is adding by itself all the text that is to come next."""
        follows = self._followed is not None and self._followed == self.followed()
        return follows and len(self.stable()) == self._right

    def become(self, other: Prompt) -> None:
        """Replace the segments by those of ``other``, in which more text is certain.

        Raises:
            ValueError: if ``other`` does not begin with the text that was taken; the prompt is then
                unchanged.
        """
        taken = self.stable()[: self._right]
        if not other.stable().startswith(taken):
            raise ValueError(
                "the new prompt does not begin with the text that was already sent; end this link "
                "and open a new one"
            )
        self.segments, self.slots = other.segments, other.slots

    def replace(self, slot: Slot, text: str) -> None:
        """Put another text into an open slot, in the place of what was appended to it."""
        right = self.stable()[: self._right]
        slot.replace(text)
        self._right = common_prefix(right, self.stable())

    def take(self) -> str:
        """Return the text that the stable frontier has passed since the last call; may be empty."""
        text = self.stable()
        new = text[self._right :]
        self._taken = self._right = len(text)
        self._followed = None
        return new

    def take_back(self) -> int | None:
        """Return after how many characters the text that was taken may have been replaced.

        Text that the engine added by itself counts as replaced. :meth:`take` then goes on from
        there. ``None`` if all of it is still right.
        """
        return self._right if self._right < self._taken or self._followed else None

    def restart(self) -> None:
        """Let the next :meth:`take` return all of the text again."""
        self._taken = self._right = 0
        self._followed = None
        for slot in self.slots:
            slot.call = None


class NotForecastable(FlashMoAError):
    """Raised when the prompt of a future request cannot be known; the message says why.

    The message continues the sentence "AGENT runs unlinked: ...", so "it" is the agent.
    """


class Placeholders:
    """Provides a placeholder for each writer, and cuts rendered prompts at them.

    Put :meth:`padded` where the writer's text will be, let the engine render the messages, and
    give the rendered prompt to :meth:`build_prompt`.
    """

    def __init__(self, writers: Iterable[str] = ()) -> None:
        # The placeholders without their margins, by writer, and the writers by them.
        self._cores: dict[str, str] = {}
        self._writers: dict[str, str] = {}
        for writer in writers:
            self.padded(writer)

    def padded(self, writer: str) -> str:
        """Return the text to render in place of the text that ``writer`` is writing."""
        if writer not in self._cores:
            core = self._cores[writer] = f"[{secrets.token_hex(8)}]"
            self._writers[core] = writer
        return f"{_MARGIN}{self._cores[writer]}{_MARGIN}"

    def build_prompt(self, *rendered: str) -> Prompt:
        """Build a prompt from one that an engine rendered, with a slot at each placeholder.

        There is no slot for a placeholder that is not in the rendered prompt, and one for each time
        that a text is in it.

        Args:
            rendered: the rendered prompt. If it depends on something that cannot be known, every
                possible prompt: only their common beginning is certain, and the prompt ends there
                in an :data:`UNCERTAIN` slot.
        """
        first = rendered[0]
        if len(rendered) == 1:
            return Prompt(self._cut(first, len(first)))
        certain = min(common_prefix(first, other) for other in rendered[1:])
        return Prompt([*self._cut(first, certain), Slot(UNCERTAIN)])

    def _cut(self, rendered: str, certain: int) -> list[str | Slot]:
        """Cut the first ``certain`` characters of a rendered prompt at the placeholders.

        If the template kept the margin on a side of a placeholder, its slot is not stripped there.
        """
        names = self._writers
        found = ((match.start(), match.group()) for match in _CORE.finditer(rendered))
        places = [(start, names[core], core) for start, core in found if core in names]
        segments: list[str | Slot] = []
        done = 0
        for start, name, core in places:
            kept_start = rendered[:start].endswith(_MARGIN)
            begin, end = start - len(_MARGIN) * kept_start, start + len(core)
            if end > certain:
                return [*segments, rendered[done : min(begin, certain)]]
            kept_end = rendered[end:].startswith(_MARGIN)
            segments.append(rendered[done:begin])
            segments.append(Slot(name, strip_start=not kept_start, strip_end=not kept_end))
            done = end + len(_MARGIN) * kept_end
        return [*segments, rendered[done:certain]]
