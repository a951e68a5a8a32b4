"""Test the sockets of commands that serve."""

from __future__ import annotations

import asyncio
import socket

from flashmoa.cli.ports import bind


def test_an_event_loop_sends_answers_at_once() -> None:
    """Nagle's algorithm would hold up the second part of an answer by 40 ms."""
    answered = asyncio.Queue[int]()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: socket.socket = writer.get_extra_info("socket")
        answered.put_nowait(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def serve() -> int:
        with bind("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(answer, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await answered.get()

    assert asyncio.run(serve())
