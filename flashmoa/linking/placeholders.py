"""Stand-ins for texts still being written: how a chat template's prompt is cut at them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from flashmoa.linking.prompt import Slot

# White space around a stand-in shows what the chat template strips.
_MARGIN = "  "


class StandIns:
    """One for each writer.

    Put :meth:`padded` where the writer's text will be, have the engine render the prompt, and
    :meth:`segments` tells what is certain of it and where the texts go.
    """

    def __init__(self, writers: Iterable[str]) -> None:
        self._cores = {name: f"[{secrets.token_hex(8)}]" for name in writers}

    def padded(self, writer: str) -> str:
        """The text to render instead of what ``writer`` is writing."""
        return f"{_MARGIN}{self._cores[writer]}{_MARGIN}"

    def segments(self, rendered: str, certain: int | None = None) -> list[str | Slot]:
        """The first ``certain`` characters of a rendered prompt (default: all), cut at the
        stand-ins; those that are not there, because something left them out, are no slots.

        Raises: ValueError where a stand-in is there more than once.
        """
        certain = len(rendered) if certain is None else certain
        places = sorted(
            (rendered.index(core), name, core)
            for name, core in self._cores.items()
            if _occurs_once(rendered, core, name)
        )
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


def _occurs_once(rendered: str, core: str, name: str) -> bool:
    if rendered.count(core) > 1:
        raise ValueError(f"the chat template shows {name}'s text more than once")
    return core in rendered
