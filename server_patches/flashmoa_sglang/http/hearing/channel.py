"""``Channel``: what a client hears of its calls, as lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from flashmoa_sglang.http.hearing.call import TEXT_KINDS

# Text that is written within this time is told in one line.
_GATHERED_SECONDS = 0.025
# An empty line after this time without news tells that the channel is open.
_ALIVE_SECONDS = 5.0
# Characters that may wait for a client that does not read.
_MAX_WAITING = 4 << 20


def add_line(lines: list[dict[str, Any]], line: dict[str, Any]) -> int:
    """Add a line. Text that continues the last line of its call joins that line.

    Return the number of characters of its text; 1 if it has none.
    """
    kind = next((kind for kind in TEXT_KINDS if kind in line), None)
    own = (each for each in reversed(lines) if each["call"] == line["call"])
    last = next(own, line)
    if kind is not None and last is not line and kind in last:
        last[kind] += line[kind]
    else:
        lines.append({**line})
    return len(line[kind]) if kind is not None else 1


class Channel:
    """One client's channel.

    Each line is an object. ``call`` is the call's id. Besides, the line has one of:

    - ``content`` or ``reasoning``: the next text. ``at`` is the number of characters of this kind
      that were told before, so that a client that was away notices that it lacks some.
    - ``text``: the next text of a call that is no chat, as behind a front end that renders chats.
    - ``tool``: the name of a tool that the answer begins to call.
    - ``end``: OpenAI's ``finish_reason``, with ``usage``; ``null`` if the request has failed.

    The first line is ``{"listening": true}``.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._lines: list[dict[str, Any]] = []
        self._waiting = 0
        self._changed = asyncio.Event()

    def tell(self, line: dict[str, Any]) -> None:
        """Add a line; see :func:`add_line`."""
        if self.is_closed:
            return
        self._waiting += add_line(self._lines, line)
        if self._waiting > _MAX_WAITING:
            self.close()
        self._changed.set()

    def close(self) -> None:
        """End the channel: another one takes its place, or its client does not read."""
        self.is_closed = True
        self._lines.clear()
        self._changed.set()

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield the channel's bytes until it is closed."""
        yield b'{"listening":true}\n'
        while not self.is_closed:
            try:
                await asyncio.wait_for(self._changed.wait(), _ALIVE_SECONDS)
            except TimeoutError:
                yield b"\n"
                continue
            await asyncio.sleep(_GATHERED_SECONDS)
            lines, self._lines, self._waiting = self._lines, [], 0
            self._changed.clear()
            # Escapes can also stand for half of a surrogate pair, which a text may have.
            yield b"".join(
                json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines
            )
