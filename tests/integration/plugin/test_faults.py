"""Clients that fail, aborts, the end of a ttl and a drain, at every moment of a stream's life.

The first axis is who fails: the **upstream** client, which appends; the **downstream** client,
whose request uses the stream; or the engine. The second is the *moment* in the life of a stream.
For clients, the third is the *manner*: how the connection fails. After every group of cases
the streams have ended as documented, and the engine is as it was before.
"""

import itertools
import os
import re
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.errors import EngineDraining, StreamGone
from tests.integration.baseline import Baseline
from tests.integration.raw import RawConnection, make_request
from tests.integration.support import (
    GREEDY,
    Body,
    Words,
    fetch_stream,
    wait_for_state,
    wait_until_prefilled,
)
from tests.waiting import LAG, until

pytestmark = pytest.mark.timeout(90)
Moment = Literal["before the first append", "mid-append", "after the last append"]
LateMoment = Literal["during prefill", "during decode"]
Manner = Literal["reset", "half-close", "stall"]

EARLY: tuple[Moment, ...] = ("before the first append", "mid-append", "after the last append")
LATE: tuple[LateMoment, ...] = ("during prefill", "during decode")
MANNERS: tuple[Manner, ...] = ("reset", "half-close", "stall")

# Seconds that a stream lives whose upstream client does not come back.
BRIEF = 0.6
LONG_PROMPT = 1400
# More tokens than are decoded before the request is aborted.
ENDLESS = 9000
_seeds = itertools.count(5000)


@dataclass
class Cell:
    """One stream, its text, and what its two clients do with it."""

    client: EngineClient
    http: httpx.AsyncClient
    words: Words
    tokens: int = 200
    ttl: float = 60.0
    head: str = field(init=False)
    tail: str = field(init=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.head = self.words(self.tokens, next(_seeds))
        self.tail = " " + self.words(12, next(_seeds))[4:]

    async def connect(self) -> RawConnection:
        return await RawConnection.open(str(self.http.base_url))

    async def open(self) -> None:
        self.id = (await self.client.open_stream(text=self.head, ttl_seconds=self.ttl)).id

    async def append(self) -> None:
        await self.client.append(self.id, 0, text=self.tail, end=True)

    async def reach(self, moment: Moment) -> None:
        await self.open()
        if moment == "mid-append":
            await wait_until_prefilled(self.client, self.id, 1)
        elif moment == "after the last append":
            await self.append()

    def append_request(self, seq: int = 0, **fields: Any) -> bytes:
        body = {"seq": seq, "text": self.tail, **fields}
        return make_request(f"/prompt_streams/{self.id}/append", body)

    def final_request(self, tokens: int = 4, stream: bool = False) -> bytes:
        sampling = {**GREEDY, "max_new_tokens": tokens}
        body = {"text": self.head + self.tail, "sampling_params": sampling, "stream": stream}
        return make_request("/generate", {**body, "prompt_stream_id": self.id})

    async def state(self) -> Body:
        return await fetch_stream(self.http, self.id)

    async def wait_until(self, condition: Callable[[Body], object]) -> Body:
        return await wait_for_state(self.http, self.id, condition)

    async def wait_for_use(self) -> None:
        await self.wait_until(lambda state: "error" in state or state["in_use"])

    async def wait_for_end(self) -> str:
        """Return how the stream ended, once it has."""
        state = await self.wait_until(lambda state: "error" in state)
        assert state["error"]["code"] == "stream_gone"
        return state["error"]["reason"]

    async def use(self, status: str, tokens: int = 4) -> None:
        """Send the final request; check its status, and that the answer is as without a stream."""
        connection = await self.connect()
        await connection.send(self.final_request(tokens))
        await self.check_answer(connection, status)
        await connection.close()

    async def check_answer(self, connection: RawConnection, status: str) -> None:
        code, body = await connection.read_answer()
        assert code == 200, body
        assert body["meta_info"]["prompt_stream"]["status"] == status
        sampling = {**GREEDY, "max_new_tokens": len(body["output_ids"])}
        plain = {"text": self.head + self.tail, "sampling_params": sampling}
        expected = (await self.http.post("/generate", json=plain)).json()
        assert body["output_ids"] == expected["output_ids"]


Make = Callable[..., Cell]


@pytest.fixture
async def make(engine: LocalEngine, base: Baseline, words: Words) -> AsyncGenerator[Make]:
    """Makes cells; afterwards, the engine must be in the state before them."""
    async with (
        EngineClient(engine.url, timeout=60) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        yield partial(Cell, client, http, words)
    await base.wait_until_restored()


async def fail(connection: RawConnection, manner: Manner, request_bytes: bytes) -> bytes:
    """Send half of a request, and fail. Return the half that is left."""
    left = await connection.send_half(request_bytes)
    if manner == "reset":
        await connection.reset()
    elif manner == "half-close":
        await connection.half_close()
        assert await connection.wait_until_closed()
        await connection.close()
    return left


async def run_together(case: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Run a case in each manner, all at once; a failure names its case."""

    async def run_case(manner: Manner) -> None:
        try:
            with anyio.fail_after(60):
                await case(*arguments, manner)
        except BaseException as error:
            error.add_note(f"case: {manner}")
            raise

    async with anyio.create_task_group() as group:
        for manner in MANNERS:
            group.start_soon(run_case, manner)


@pytest.mark.parametrize("moment", EARLY)
async def test_an_upstream_that_fails_early(moment: Moment, make: Make) -> None:
    """An append that arrives in part is ignored; the stream waits for it until it expires."""

    async def upstream(manner: Manner) -> None:
        cell = make(ttl=BRIEF)
        connection = await cell.connect()
        await cell.reach(moment)
        following = 1 if moment == "after the last append" else 0
        left = await fail(connection, manner, cell.append_request(following))
        assert await cell.wait_for_end() == "expired"
        # Requests that name it afterwards are answered so.
        if manner == "stall":
            await connection.send(left)
            code, body = await connection.read_answer()
            assert (code, body["error"]["reason"]) == (410, "expired")
        await cell.use("expired")
        await connection.close()

    await run_together(upstream)


async def test_an_upstream_that_fails_while_an_increment_is_computed(make: Make) -> None:
    async def upstream(manner: Manner) -> None:
        cell = make(tokens=LONG_PROMPT)
        await cell.open()
        await cell.wait_until(lambda state: state["prefilling"])
        connection = await cell.connect()
        left = await fail(connection, manner, cell.append_request(0, end=True))
        assert (await cell.state())["next_seq"] == 0
        if manner == "stall":
            await connection.send(left)
            assert (await connection.read_answer())[0] == 200
        else:
            await cell.append()
        await cell.use("hit")
        await connection.close()

    await run_together(upstream)


async def test_an_upstream_that_fails_while_the_request_decodes(make: Make) -> None:
    """An append comes too late then, and does no harm."""

    async def upstream(manner: Manner) -> None:
        cell = make()
        await cell.open()
        request, connection, late = [await cell.connect() for _ in range(3)]
        await request.send(cell.final_request(40, stream=True))
        await request.read_until(b"data: ")
        await fail(connection, manner, cell.append_request())
        await late.send(cell.append_request())
        code, body = await late.read_answer()
        assert (code, body["error"]["reason"]) == (410, "used")
        assert b'"status":"hit"' in await request.read_until(b"data: [DONE]")
        assert await cell.wait_for_end() == "used"
        for one in (request, connection, late):
            await one.close()

    await run_together(upstream)


@pytest.mark.parametrize("moment", EARLY)
async def test_a_downstream_that_fails_early(moment: Moment, make: Make) -> None:
    """A request that never arrived leaves the stream; one that did uses it, once."""

    async def downstream(manner: Manner) -> None:
        cell = make(ttl=BRIEF if manner == "stall" else 60)
        appending, connection = await cell.connect(), await cell.connect()
        await cell.open()
        left = await appending.send_half(cell.append_request()) if moment == "mid-append" else b""
        if moment == "after the last append":
            await cell.append()
        rest = await fail(connection, manner, cell.final_request())
        if manner == "stall":
            assert await cell.wait_for_end() == "expired"
            await connection.send(rest)
            await cell.check_answer(connection, "expired")
        else:
            await cell.use("hit")
        if left:
            await appending.send(left)
            assert (await appending.read_answer())[0] == 410
        assert await cell.wait_for_end() == ("expired" if manner == "stall" else "used")
        await appending.close()
        await connection.close()

    await run_together(downstream)


async def test_a_request_that_is_repeated_while_the_first_one_runs(make: Make) -> None:
    cell = make()
    await cell.open()
    first, again = await cell.connect(), await cell.connect()
    await first.send(cell.final_request())
    await cell.wait_for_use()
    await again.send(cell.final_request())
    await cell.check_answer(first, "hit")
    await cell.check_answer(again, "used")
    await first.close()
    await again.close()


@pytest.mark.parametrize("moment", LATE)
async def test_a_downstream_that_fails_late(moment: LateMoment, make: Make) -> None:
    """If the client has disconnected, its request is aborted; otherwise it is answered."""

    async def downstream(manner: Manner) -> None:
        cell = make(tokens=LONG_PROMPT if moment == "during prefill" else 60)
        await cell.open()
        await cell.append()
        connection = await cell.connect()
        # Decoding ENDLESS tokens takes longer than the test waits: the request must be aborted.
        stalls = manner == "stall"
        await connection.send(cell.final_request(30 if stalls else ENDLESS, stream=True))
        if moment == "during decode":
            await connection.read_until(b"data: ")
        else:
            await cell.wait_for_use()
        if not stalls:
            await (connection.reset() if manner == "reset" else connection.half_close())
        # A client that stalls reads nothing until the stream has ended.
        assert await cell.wait_for_end() == "used"
        if stalls:
            assert b'"status":"hit"' in await connection.read_until(b"data: [DONE]")
        await connection.close()

    await run_together(downstream)


async def abort(cell: Cell) -> None:
    """Abort all requests with SGLang's own route, three times, as before an update of weights."""
    for _ in range(3):
        answer = await cell.http.post("/abort_request", json={"abort_all": True})
        assert answer.status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("moment", EARLY)
async def test_an_abort_does_not_end_waiting_streams(moment: Moment, make: Make) -> None:
    cell = make()
    await cell.reach(moment)
    await abort(cell)
    if moment != "after the last append":
        await cell.append()
    await cell.use("hit")


async def test_an_aborted_increment_is_repeated(make: Make) -> None:
    cell = make(tokens=LONG_PROMPT)
    await cell.open()
    await cell.wait_until(lambda state: state["prefilling"])
    await abort(cell)
    state = await cell.wait_until(lambda state: state["prefilled_tokens"] >= LONG_PROMPT - 1 - LAG)
    assert state["failure"] is None
    await cell.append()
    await cell.use("hit")


@pytest.mark.slow
@pytest.mark.parametrize("moment", LATE)
async def test_an_aborted_request_frees_its_stream(moment: LateMoment, make: Make) -> None:
    cell = make(tokens=LONG_PROMPT if moment == "during prefill" else 60)
    await cell.open()
    connection = await cell.connect()
    await connection.send(cell.final_request(ENDLESS, stream=True))
    if moment == "during decode":
        await connection.read_until(b"data: ")
    else:
        await cell.wait_for_use()
    await abort(cell)
    assert b'"type":"abort"' in await connection.read_until(b"data: [DONE]")
    assert await cell.wait_for_end() == "used"
    await connection.close()


@pytest.fixture
async def doomed(engines: LocalEngines, model: Path) -> LocalEngine:
    return await engines.start(model, core=1, arguments=["--max-total-tokens", "12000"])


@pytest.mark.slow
async def test_a_drain_ends_every_stream_and_finishes_every_request(
    doomed: LocalEngine, words: Words
) -> None:
    """SIGTERM comes when there is a stream at every moment; then the process ends by itself."""
    async with (
        EngineClient(doomed.url, timeout=60) as client,
        httpx.AsyncClient(base_url=doomed.url, timeout=60) as http,
    ):
        make = partial(Cell, client, http, words)
        early = [make() for _ in EARLY]
        for cell, moment in zip(early, EARLY, strict=True):
            await cell.reach(moment)
        half = await RawConnection.open(doomed.url)
        left = await half.send_half(early[1].append_request())
        decoding, prefilling, growing = make(), make(tokens=LONG_PROMPT), make(tokens=LONG_PROMPT)
        decode, prefill = [await RawConnection.open(doomed.url) for _ in range(2)]
        await decoding.open()
        await prefilling.open()
        await decode.send(decoding.final_request(400, stream=True))
        await decode.read_until(b"data: ")
        await growing.open()
        await growing.wait_until(lambda state: state["prefilling"])
        await prefill.send(prefilling.final_request(4))
        await prefilling.wait_for_use()
        assert (await http.get("/health/ready")).status_code == 200
        before = len(doomed.log.read_text())
        os.kill(doomed.pid, signal.SIGTERM)
        for cell in [*early, growing]:
            assert await cell.wait_for_end() == "drained"
        assert (await http.get("/health/ready")).json()["error"]["code"] == "draining"
        with pytest.raises(EngineDraining):
            await client.open_stream(text="one more")
        with pytest.raises(EngineDraining):
            await client.prefill_only(text="one more")
        with pytest.raises(StreamGone, match="drained"):
            await client.append(early[0].id, 0, text="one more")
        await half.send(left)
        assert (await half.read_answer())[1]["error"]["reason"] == "drained"
        # Requests that were running are answered, exactly.
        await prefilling.check_answer(prefill, "hit")
        assert b'"status":"hit"' in await decode.read_until(b"data: [DONE]")
        for connection in (half, decode, prefill):
            await connection.close()
    await until(lambda: not doomed.is_running())
    # On a slow machine SGLang is still starting at the drain, and logs that this failed.
    start = r"post-warmup freeze_gc failed\n(?:(?!\[\d).*\n)*"
    assert "Traceback" not in re.sub(start, "", doomed.log.read_text()[before:])
