"""Break connections to an engine in the middle of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream


@asynccontextmanager
async def broken_connection(engine: str, after: int) -> AsyncGenerator[str]:
    """Serve the engine at another URL, where a connection ends after ``after`` bytes of answers."""
    port = urlsplit(engine).port
    assert port is not None

    async def relay(client: SocketStream) -> None:
        async with (
            client,
            await anyio.connect_tcp("127.0.0.1", port) as server,
            anyio.create_task_group() as group,
        ):
            group.start_soon(_pass_on, client, server)
            left = after
            async for piece in server:
                await client.send(piece[:left])
                left -= len(piece)
                if left <= 0:
                    break
            group.cancel_scope.cancel()

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, relay)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        group.cancel_scope.cancel()


async def _pass_on(source: SocketStream, target: SocketStream) -> None:
    async for piece in source:
        await target.send(piece)
