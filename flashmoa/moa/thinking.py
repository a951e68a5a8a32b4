"""Separate what a model thinks from its answer, while it writes (``ThoughtSplitter``); pure."""

from __future__ import annotations

from typing import Literal

from flashmoa.moa.settings import Thinking


class ThoughtSplitter:
    """Takes the pieces of a model's output, and returns those of its answer.

    Only an output that begins with the opening tag, after white space, has thought in it. The white
    space after the closing tag belongs to neither.

    Args:
        thinking: the tags; ``None``: everything is answer.
        inside: whether the output begins inside the thought.

    Attributes:
        thought: what was thought so far, without the tags.
    """

    def __init__(self, thinking: Thinking | None, *, inside: bool = False) -> None:
        self.thought = ""
        self._tags = thinking or Thinking()
        self._state: Literal["start", "thought", "space", "answer"] = "start"
        if thinking is None:
            self._state = "answer"
        elif inside:
            self._state = "thought"
        # Text that may be part of a tag.
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        """Return whether the output so far ends inside the thought."""
        return self._state == "thought"

    def add(self, piece: str) -> str:
        """Add the next piece of the output. Return what certainly belongs to the answer."""
        self._held += piece
        if self._state == "start":
            self._find_opening()
        if self._state == "thought":
            self._find_closing()
        if self._state == "space":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        return self._release() if self._state == "answer" else ""

    def end(self) -> str:
        """End the output. Return the rest of the answer."""
        if self._state == "thought":
            self.thought += self._release()
        return self._release()

    def _find_opening(self) -> None:
        opening, begun = self._tags.opening, self._held.lstrip()
        if begun.startswith(opening):
            self._held, self._state = begun.removeprefix(opening), "thought"
        elif not opening.startswith(begun):
            self._state = "answer"

    def _find_closing(self) -> None:
        closing = self._tags.closing
        before, tag, after = self._held.partition(closing)
        if tag:
            self.thought, self._held, self._state = self.thought + before, after, "space"
            return
        lengths = range(min(len(closing) - 1, len(before)), 0, -1)
        kept = next((length for length in lengths if closing.startswith(before[-length:])), 0)
        self.thought += before[: len(before) - kept]
        self._held = before[len(before) - kept :]

    def _release(self) -> str:
        released, self._held = self._held, ""
        return released
