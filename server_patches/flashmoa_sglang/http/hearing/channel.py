"""``Channel``: tells a client the text of its calls, as lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from flashmoa_sglang.http.hearing.call import TEXT_KINDS


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

    Each line is an object. It has the call's id, ``call``, and one more field:

    - ``content`` or ``reasoning``: the next text. ``at`` is the number of earlier characters of its
      kind, so that a client that was away notices that it lacks some.
    - ``text``: the next text of a call that is no chat, as behind a front end that renders chats.
    - ``tool``: the name of a tool that the answer begins to call.
    - ``end``: OpenAI's ``finish_reason``, with ``usage``; ``null`` if the request has failed.

    The first line is ``{"listening": true}``.

    Args:
        max_waiting: number of characters that may wait for a client that does not read.
        idle_seconds: after this time without news, an empty line tells that the channel is open.
    """

    def __init__(self, *, max_waiting: int = 4 << 20, idle_seconds: float = 5.0) -> None:
        self.is_closed = False
        self._max_waiting, self._idle_seconds = max_waiting, idle_seconds
        self._lines: list[dict[str, Any]] = []
        self._waiting = 0
        self._changed = asyncio.Event()

    def tell(self, line: dict[str, Any]) -> None:
        """Add a line; see :func:`add_line`."""
        if self.is_closed:
            return
        self._waiting += add_line(self._lines, line)
        if self._waiting > self._max_waiting:
            self.close()
        self._changed.set()

    def close(self) -> None:
        """End the channel, because another channel takes its place, or its client does not read."""
        self.is_closed = True
        self._lines.clear()
        self._changed.set()

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield the channel's bytes until it is closed."""
        yield b'{"listening":true}\n'
        while not self.is_closed:
            try:
                await asyncio.wait_for(self._changed.wait(), self._idle_seconds)
            except TimeoutError:
                yield b"\n"
                continue
            await asyncio.sleep(0.025)  # Texts that come within this time share a line.
            lines, self._lines, self._waiting = self._lines, [], 0
            self._changed.clear()
            # Escapes can also stand for half of a surrogate pair, which a text may have.
            yield b"".join(
                json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines
            )
