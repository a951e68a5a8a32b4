"""Define the axes of the fault matrix and the state from which its cells start.

Who fails: the **upstream** client, which appends; the **downstream** client, whose request uses
the stream; the engine's own **abort**; the **ttl**; a **drain** of the server. When: a *moment* in
the life of a stream. How: a *manner* in which a connection can go wrong.

Some cells do not exist. **abort**, **ttl** and **drain** have no manners, because they do not come
over a connection; an abort is repeated instead. **ttl** during prefill and decode is tested as a
stream in use, which has no deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx

from flashmoa.engine import EngineClient
from tests.integration.raw import RawConnection, make_request
from tests.integration.support import GREEDY

Moment = Literal["before the first append", "mid-append", "after the last append"]
Late = Literal["during prefill", "during decode"]
Manner = Literal["reset", "half-close", "stall", "garbage", "repeated", "reordered"]

EARLY: tuple[Moment, ...] = ("before the first append", "mid-append", "after the last append")
LATE: tuple[Late, ...] = ("during prefill", "during decode")
MANNERS: tuple[Manner, ...] = ("reset", "half-close", "stall", "garbage", "repeated", "reordered")

# The TTL of streams whose upstream client has ended for good, so that tests need not wait long.
BRIEF = 0.6
LONG_PROMPT = 1400
_seeds = itertools.count(5000)


@dataclass
class Cell:
    """A stream, its text, and the requests of both clients."""

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

    def make_append(self, seq: int = 0, **fields: Any) -> bytes:
        body = {"seq": seq, "text": self.tail, **fields}
        return make_request(f"/prompt_streams/{self.id}/append", body)

    def make_generate(self, tokens: int = 4, stream: bool = False, **fields: Any) -> bytes:
        sampling = {**GREEDY, "max_new_tokens": tokens}
        body = {"text": self.head + self.tail, "sampling_params": sampling, "stream": stream}
        return make_request("/generate", {**body, "prompt_stream_id": self.id, **fields})

    async def state(self) -> dict[str, Any]:
        return (await self.http.get(f"/prompt_streams/{self.id}")).json()

    async def wait_for_state(self, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the stream's state once it is reached."""
        with anyio.fail_after(20):
            while not is_reached(state := await self.state()):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return state

    async def wait_for_end(self) -> str:
        """Return the reason for which the stream ended, once it has."""
        state = await self.wait_for_state(lambda state: "error" in state)
        assert state["error"]["code"] == "stream_gone"
        return state["error"]["reason"]

    async def check_request(self, status: str, tokens: int = 4) -> None:
        """Send an ordinary request, and check its status and its answer."""
        connection = await RawConnection.open(self.url)
        await connection.send(self.make_generate(tokens))
        await self.check_answer(connection, status)
        await connection.close()

    async def check_answer(self, connection: RawConnection, status: str) -> None:
        code, body = await connection.read_answer()
        assert code == 200, body
        assert body["meta_info"]["prompt_stream"]["status"] == status
        await self.check_exact(body["output_ids"])

    async def check_exact(self, ids: list[int]) -> None:
        """Check that a request without a stream is answered the same."""
        sampling = {**GREEDY, "max_new_tokens": len(ids)}
        body = {"text": self.head + self.tail, "sampling_params": sampling}
        plain = (await self.http.post("/generate", json=body)).json()
        assert ids == plain["output_ids"]


async def misbehave(connection: RawConnection, manner: Manner, sending: bytes) -> bytes:
    """Send a part of a request, or garbage, and no more; return the rest of the request."""
    if manner == "garbage":
        await connection.send(b"\x00\xffnot HTTP at all\r\n\r\n")
        assert await connection.wait_until_closed()
        await connection.close()
        return b""
    left = await connection.send_half(sending)
    if manner == "reset":
        await connection.reset()
    elif manner == "half-close":
        await connection.half_close()
        assert await connection.wait_until_closed()
        await connection.close()
    return left


async def run_cells(cells: dict[str, Callable[[], Awaitable[None]]]) -> None:
    """Run independent cells at once; a failure names its cell."""

    async def run(name: str, cell: Callable[[], Awaitable[None]]) -> None:
        try:
            with anyio.fail_after(60):
                await cell()
        except BaseException as error:
            error.add_note(f"cell: {name}")
            raise

    async with anyio.create_task_group() as group:
        for name, cell in cells.items():
            group.start_soon(run, name, cell)
