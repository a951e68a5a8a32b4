"""Server-sent events, and the comments between them while there are none."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from flashmoa.moa.serve.application import sending_events

pytestmark = pytest.mark.anyio


class Client:
    """Receives what is sent, and tells when it is a heartbeat."""

    def __init__(self) -> None:
        self.data = b""
        self.beats = 0
        self.has_beaten_twice = anyio.Event()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        body = message.get("body", b"")
        self.data += body
        if body.startswith(b":"):
            self.beats += 1
            if self.beats == 2:
                self.has_beaten_twice.set()


async def test_comments_are_sent_while_there_is_no_event() -> None:
    client = Client()
    async with sending_events(client, 0.001) as send_event:
        with anyio.fail_after(30):
            await client.has_beaten_twice.wait()
        await send_event({"text": "é\u2028"})
    events = [line for line in client.data.split(b"\n\n") if not line.startswith(b":")]
    assert events == [b'data: {"text": "\\u00e9\\u2028"}', b"data: [DONE]", b""]


async def test_events_replace_comments() -> None:
    client = Client()
    async with sending_events(client, 3600) as send_event:
        await send_event({})
    assert client.data == b"data: {}\n\ndata: [DONE]\n\n" and not client.beats
