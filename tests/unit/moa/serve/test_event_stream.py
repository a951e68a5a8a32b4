"""Server-sent events, and the comments between them while there are none."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from flashmoa.moa.serve.application import sending_events


class Client:
    """Records the bytes, and tells when a second heartbeat has come."""

    def __init__(self) -> None:
        self.data = b""
        self.has_beaten_twice = anyio.Event()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.data += message.get("body", b"")
        if self.data.count(b": ") >= 2:
            self.has_beaten_twice.set()


@pytest.mark.parametrize("seconds", [0.001, 3600])
async def test_comments_are_sent_only_without_events(seconds: float) -> None:
    client = Client()
    async with sending_events(client, seconds) as send_event:
        if seconds < 1:
            with anyio.fail_after(30):
                await client.has_beaten_twice.wait()
        await send_event({"text": "é\u2028"})
    parts = client.data.split(b"\n\n")
    events = [part for part in parts if not part.startswith(b":")]
    assert events == [b'data: {"text": "\\u00e9\\u2028"}', b"data: [DONE]", b""]
    assert (parts == events) == (seconds > 1)
