"""Render prompts around texts that are still being written (:class:`Placeholders`)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from flashmoa.errors import FlashMoAError
from flashmoa.linking.learned_texts import common_prefix
from flashmoa.linking.prompt import Prompt, Slot

# The name of a slot that never gets any text, since the rest of its prompt is not certain yet.
UNCERTAIN = "(not certain yet)"

# White space around a placeholder: if it is missing from the prompt, the chat template strips it.
_MARGIN = "  "
# A placeholder without its margins; others of this form may be in a text.
_CORE = re.compile(r"\[[0-9a-f]{16}\]")


class NotForecastable(FlashMoAError):
    """Raised when the prompt of a future request cannot be known; the message says why.

    The message continues the sentence "AGENT runs unlinked: ...", so "it" is the agent.
    """


class Placeholders:
    """Provides one placeholder for each writer, and cuts rendered prompts at them.

    Put :meth:`padded` where the writer's text will be, let the engine render the messages, and
    give the rendered prompt to :meth:`build_prompt`.
    """

    def __init__(self, writers: Iterable[str]) -> None:
        # The placeholders without their margins.
        self._cores = {name: f"[{secrets.token_hex(8)}]" for name in writers}

    def padded(self, writer: str) -> str:
        """Return the text to render in place of the text that ``writer`` is writing."""
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
        names = {core: name for name, core in self._cores.items()}
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
