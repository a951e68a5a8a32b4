"""The axes of the fault matrix, and ``Cell``, the stream with which every case begins.

The first axis is who fails: the **upstream** client, which appends; the **downstream** client,
whose request uses the stream; the engine, which **aborts** requests; the stream, whose **ttl**
ends; the server, which is **drained**. The second is the *moment* in the life of a stream, and the
third the *manner* in which a connection fails.

Some combinations do not exist. An abort, the end of a ttl and a drain do not come over a
connection, and have no manner; aborts are repeated instead. During prefill and decode a stream is
in use and has no deadline, which is tested instead of the end of its ttl.
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
LateMoment = Literal["during prefill", "during decode"]
Manner = Literal["reset", "half-close", "stall", "garbage", "repeated", "reordered"]

EARLY: tuple[Moment, ...] = ("before the first append", "mid-append", "after the last append")
LATE: tuple[LateMoment, ...] = ("during prefill", "during decode")
MANNERS: tuple[Manner, ...] = ("reset", "half-close", "stall", "garbage", "repeated", "reordered")

# Seconds that a stream lives whose upstream client does not come back.
BRIEF = 0.6
LONG_PROMPT = 1400
_seeds = itertools.count(5000)


@dataclass
class Cell:
    """One stream, its text, and what its two clients do with it."""

    client: EngineClient
    http: httpx.AsyncClient
    words: Callable[[int, int], str]
    tokens: int = 200
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

    def append_request(self, seq: int = 0, **fields: Any) -> bytes:
        body = {"seq": seq, "text": self.tail, **fields}
        return make_request(f"/prompt_streams/{self.id}/append", body)

    def final_request(self, tokens: int = 4, stream: bool = False, **fields: Any) -> bytes:
        sampling = {**GREEDY, "max_new_tokens": tokens}
        body = {"text": self.head + self.tail, "sampling_params": sampling, "stream": stream}
        return make_request("/generate", {**body, "prompt_stream_id": self.id, **fields})

    async def state(self) -> dict[str, Any]:
        return (await self.http.get(f"/prompt_streams/{self.id}")).json()

    async def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the stream's state, once it fulfils a condition."""
        with anyio.fail_after(20):
            while not condition(state := await self.state()):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return state

    async def wait_for_end(self) -> str:
        """Return how the stream ended, once it has."""
        state = await self.wait_until(lambda state: "error" in state)
        assert state["error"]["code"] == "stream_gone"
        return state["error"]["reason"]

    async def use(self, status: str, tokens: int = 4) -> None:
        """Send the final request; check its status, and that the answer is as without a stream."""
        connection = await RawConnection.open(self.url)
        await connection.send(self.final_request(tokens))
        await self.check_answer(connection, status)
        await connection.close()

    async def check_answer(self, connection: RawConnection, status: str) -> None:
        code, body = await connection.read_answer()
        assert code == 200, body
        assert body["meta_info"]["prompt_stream"]["status"] == status
        await self.check_tokens(body["output_ids"])

    async def check_tokens(self, ids: list[int]) -> None:
        """Check that a plain request has the same answer."""
        sampling = {**GREEDY, "max_new_tokens": len(ids)}
        body = {"text": self.head + self.tail, "sampling_params": sampling}
        plain = (await self.http.post("/generate", json=body)).json()
        assert ids == plain["output_ids"]


async def misbehave(connection: RawConnection, manner: Manner, request_bytes: bytes) -> bytes:
    """Send garbage, or only half of a request. Return the half that is left."""
    if manner == "garbage":
        await connection.send(b"\x00\xffnot HTTP at all\r\n\r\n")
        assert await connection.wait_until_closed()
        await connection.close()
        return b""
    left = await connection.send_half(request_bytes)
    if manner == "reset":
        await connection.reset()
    elif manner == "half-close":
        await connection.half_close()
        assert await connection.wait_until_closed()
        await connection.close()
    return left


async def run_together(cases: dict[str, Callable[[], Awaitable[None]]]) -> None:
    """Run independent cases at once; a failure names its case."""

    async def run_case(name: str, case: Callable[[], Awaitable[None]]) -> None:
        try:
            with anyio.fail_after(60):
                await case()
        except BaseException as error:
            error.add_note(f"case: {name}")
            raise

    async with anyio.create_task_group() as group:
        for name, case in cases.items():
            group.start_soon(run_case, name, case)
