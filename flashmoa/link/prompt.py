"""Assemble prompts while agents write texts in them (:class:`Prompt`), from prompts that engines
rendered with placeholders (:class:`Placeholders`).

A prompt is a sequence of segments, texts and slots. A :class:`Slot` is the place of a text that an
upstream agent is writing (Faster-MoA: ``S_prefix, o1, o2, o3, S_suffix``). The *stable frontier* is
the end of the longest prefix whose positions can no longer change: everything up to and into the
first open slot (FlashAgents §4.2). Only that prefix is sent for prefill. The text of later slots
waits until the slots before them close. No I/O.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashmoa.errors import FlashMoAError
from flashmoa.link.learned_texts import common_prefix

# The name of a slot that never gets text: the rest of its prompt is not certain yet.
UNCERTAIN = "(not certain yet)"

# White space around a placeholder. If a rendered prompt lacks it, the chat template strips texts.
_MARGIN = "  "
# Matches a placeholder without its margins. Texts may contain other strings of this form.
_CORE = re.compile(r"\[[0-9a-f]{16}\]")


@dataclass(eq=False, slots=True)
class Slot:
    """The place in a prompt of a text that an upstream agent is writing.

    Attributes:
        name: the name of the writer.
        strip_start, strip_end: whether the chat template strips white space at the start, and at
            the end. Trailing white space is then withheld until more text follows it.
        call: the id of the writer's call, if the prompt's engine adds its text by itself.
        is_open: whether more text may come.
    """

    name: str
    strip_start: bool = False
    strip_end: bool = False
    call: str | None = field(default=None, init=False)
    _text: str = field(default="", init=False)
    is_open: bool = field(default=True, init=False)

    def append(self, text: str) -> None:
        """Add text at the end.

        Raises: ValueError if the slot is closed.
        """
        if not self.is_open:
            raise ValueError(f"slot {self.name!r} is closed; add its text before closing it")
        self._text += text

    def close(self) -> None:
        """Close the slot, since no more text will come. Repeating this is harmless."""
        self.is_open = False

    def stable(self) -> str:
        """Return the text written so far whose place in the prompt is certain."""
        text = self._text.lstrip() if self.strip_start else self._text
        return text.rstrip() if self.strip_end else text


class Prompt:
    """A sequence of segments, whose text is taken in parts. Not thread-safe.

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
        # Number of taken characters, and number of taken characters before the first change.
        self._taken = 0
        self._right = 0
        # The id of the call whose text the engine adds to the stream.
        self._followed: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every slot is closed."""
        return not any(slot.is_open for slot in self.slots)

    def stable(self, start: int = 0) -> str:
        """Return the text up to the stable frontier, from character ``start`` on."""
        parts: list[str] = []
        for segment in self.segments:
            is_open = isinstance(segment, Slot) and segment.is_open
            if isinstance(segment, str):
                text = segment
            else:
                text = "" if is_open and segment.call is not None else segment.stable()
            parts.append(text[start:])
            start = max(0, start - len(text))
            if is_open:
                break
        return "".join(parts)

    def follow(self, slot: Slot, call_id: str) -> None:
        """Let the prompt's engine add the text of a slot, since it writes the text itself.

        Do nothing if a part of the text was taken, or the template strips the text.
        """
        if slot.strip_start or slot.strip_end or not slot.is_open:
            return
        earlier = slot.call
        slot.call = call_id
        if len(self.stable()) < self._right:
            slot.call = earlier

    def followed(self) -> str | None:
        """Return the id of the call whose text the engine is to add now, if there is one."""
        first = next((slot for slot in self.slots if slot.is_open), None)
        return first.call if first is not None else None

    def note_followed(self, call_id: str) -> None:
        """Note that the engine adds a call's text from now on, after the taken text."""
        self._followed = call_id

    @property
    def is_followed(self) -> bool:
        """Whether the engine adds all text by itself that comes next."""
        follows = self._followed is not None and self._followed == self.followed()
        return follows and not self.stable(self._right)

    def become(self, other: Prompt) -> None:
        """Replace the segments by the segments of ``other``, which has more certain text.

        Raises: ValueError if ``other`` does not begin with the taken text; the prompt is then
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
        """Replace the text of an open slot."""
        right = self.stable()[: self._right]
        slot._text, slot.call = text, None
        self._right = common_prefix(right, self.stable())

    def take(self) -> str:
        """Return the text that the stable frontier has passed since the last call; may be empty."""
        new = self.stable(self._right)
        self._taken = self._right = self._right + len(new)
        self._followed = None
        return new

    def take_back(self) -> int | None:
        """Return the number of characters before the first change in the taken text.

        :meth:`take` then continues there. ``None`` if the taken text is unchanged. Text that the
        engine added by itself counts as a change.
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
    """Provides a placeholder for each writer, and cuts rendered prompts at the placeholders.

    Put :meth:`padded` where the writer's text will be, let the engine render the messages, and
    pass the rendered prompt to :meth:`build_prompt`.
    """

    def __init__(self, writers: Iterable[str] = ()) -> None:
        # The placeholders without their margins by writer, and the writers by placeholder.
        self._cores: dict[str, str] = {}
        self._writers: dict[str, str] = {}
        for writer in writers:
            self.padded(writer)

    def padded(self, writer: str) -> str:
        """Return the placeholder, with its margins, for the text that ``writer`` is writing."""
        if writer not in self._cores:
            core = self._cores[writer] = f"[{secrets.token_hex(8)}]"
            self._writers[core] = writer
        return f"{_MARGIN}{self._cores[writer]}{_MARGIN}"

    def build_prompt(self, *rendered: str) -> Prompt:
        """Build a prompt from a rendered prompt, with a slot at each place of a placeholder.

        Args:
            rendered: the rendered prompt, or if it depends on something unknown, every possible
                prompt. Only their common beginning is then certain, and the prompt ends there in an
                :data:`UNCERTAIN` slot.
        """
        first = rendered[0]
        if len(rendered) == 1:
            return Prompt(self._cut(first, len(first)))
        certain = min(common_prefix(first, other) for other in rendered[1:])
        return Prompt([*self._cut(first, certain), Slot(UNCERTAIN)])

    def _cut(self, rendered: str, certain: int) -> list[str | Slot]:
        """Cut the first ``certain`` characters of a rendered prompt at the placeholders.

        If the template kept a placeholder's margin on a side, it does not strip the slot there.
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
