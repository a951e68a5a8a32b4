"""The axes of the fault matrix, the cells it has, and what every cell starts from.

Who fails: the **upstream** client, which appends; the **downstream** client, whose request uses
the stream; the engine's own **abort**; the **ttl**; a **drain** of the server. When: a *moment* in
the life of a stream. How: a *manner* in which a connection can go wrong.

Cells there cannot be: **abort**, **ttl** and **drain** have no manners, for they do not come over
a connection; an abort is repeated instead, and what connections do meanwhile are the cells of the
two clients. **ttl** during prefill and decode is a stream in use, which has no deadline: tested
as such.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx

from flashmoa.engine import EngineClient
from tests.integration.raw import RawConnection, request
from tests.integration.support import GREEDY

Moment = Literal["before the first append", "mid-append", "after the last append"]
Late = Literal["during prefill", "during decode"]
Manner = Literal["reset", "half-close", "stall", "garbage", "repeated", "reordered"]

EARLY: tuple[Moment, ...] = ("before the first append", "mid-append", "after the last append")
LATE: tuple[Late, ...] = ("during prefill", "during decode")
MANNERS: tuple[Manner, ...] = ("reset", "half-close", "stall", "garbage", "repeated", "reordered")

# A stream whose upstream is gone for good is heard of no more; it need not take long here.
BRIEF = 0.6
LONG_PROMPT = 1400
_seeds = itertools.count(5000)


@dataclass
class Cell:
    """One stream, its text, and the two who work on it."""

    client: EngineClient
    http: httpx.AsyncClient
    words: Callable[[int, int], str]
    tokens: int = 60
    ttl: float = 60.0
    head: str = field(init=False)
    tail: str = field(init=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.head = self.words(self.tokens, next(_seeds))
        self.tail = " " + self.words(12, next(_seeds))[4:]

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    async def open(self) -> None:
        self.id = (await self.client.open_stream(text=self.head, ttl_seconds=self.ttl)).id

    async def append(self) -> None:
        await self.client.append(self.id, 0, text=self.tail, end=True)

    def appending(self, seq: int = 0, **fields: Any) -> bytes:
        body = {"seq": seq, "text": self.tail, **fields}
        return request(f"/prompt_streams/{self.id}/append", body)

    def generating(self, tokens: int = 4, stream: bool = False, **fields: Any) -> bytes:
        sampling = {**GREEDY, "max_new_tokens": tokens}
        body = {"text": self.head + self.tail, "sampling_params": sampling, "stream": stream}
        return request("/generate", {**body, "prompt_stream_id": self.id, **fields})

    async def state(self) -> dict[str, Any]:
        return (await self.http.get(f"/prompt_streams/{self.id}")).json()

    async def until(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The stream's state, once it is as asked for."""
        with anyio.fail_after(20):
            while not reached(state := await self.state()):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return state

    async def ending(self) -> str:
        """How the stream ended, once it has."""
        state = await self.until(lambda state: "error" in state)
        assert state["error"]["code"] == "stream_gone"
        return state["error"]["reason"]

    async def uses(self, status: str, tokens: int = 4) -> None:
        """A request like any other: its status, and an answer as without a stream."""
        connection = await RawConnection.open(self.url)
        await connection.send(self.generating(tokens))
        await self.answered(connection, status)
        await connection.close()

    async def answered(self, connection: RawConnection, status: str) -> None:
        code, body = await connection.answer()
        assert code == 200, body
        assert body["meta_info"]["prompt_stream"]["status"] == status
        await self.is_exact(body["output_ids"])

    async def is_exact(self, ids: list[int]) -> None:
        """That a plain request answers the same."""
        sampling = {**GREEDY, "max_new_tokens": len(ids)}
        body = {"text": self.head + self.tail, "sampling_params": sampling}
        plain = (await self.http.post("/generate", json=body)).json()
        assert ids == plain["output_ids"]


async def misbehave(connection: RawConnection, manner: Manner, sending: bytes) -> bytes:
    """Send part of a request, or none that is one, and leave it there; returns what is left."""
    if manner == "garbage":
        await connection.send(b"\x00\xffnot HTTP at all\r\n\r\n")
        assert await connection.ended()
        await connection.close()
        return b""
    left = await connection.send_half(sending)
    if manner == "reset":
        await connection.reset()
    elif manner == "half-close":
        await connection.half_close()
        assert await connection.ended()
        await connection.close()
    return left


async def together(cells: dict[str, Callable[[], Awaitable[None]]]) -> None:
    """Run independent cells at once; a failure names its cell."""

    async def one(name: str, cell: Callable[[], Awaitable[None]]) -> None:
        try:
            with anyio.fail_after(60):
                await cell()
        except BaseException as error:
            error.add_note(f"cell: {name}")
            raise

    async with anyio.create_task_group() as group:
        for name, cell in cells.items():
            group.start_soon(one, name, cell)
