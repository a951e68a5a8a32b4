"""Test clients that fail, at every moment and in every manner (``fault_cells.py`` has the axes).

After every group of cases the streams have ended as documented, and the engine is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.integration.plugin.fault_cells import (
    BRIEF,
    EARLY,
    LATE,
    LONG_PROMPT,
    MANNERS,
    Cell,
    LateMoment,
    Manner,
    Moment,
    misbehave,
    run_together,
)
from tests.integration.raw import RawConnection

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]
Words = Callable[[int, int], str]
# The manners after which the client does not come back.
LOST: tuple[Manner, ...] = ("reset", "half-close", "stall")


@pytest.mark.parametrize("moment", EARLY)
async def test_an_upstream_that_fails_early(moment: Moment, make: Callable[..., Cell]) -> None:
    await run_together({manner: partial(upstream, make, moment, manner) for manner in MANNERS})


async def upstream(make: Callable[..., Cell], moment: Moment, manner: Manner) -> None:
    """An append that arrives in part is ignored; the stream waits for it until it expires."""
    lost = manner in LOST
    cell = make(ttl=BRIEF if lost else 60)
    await cell.open()
    if moment == "after the last append":
        await cell.append()
    connection = await RawConnection.open(cell.url)
    following = 1 if moment == "after the last append" else 0
    taken = following
    if manner == "repeated":
        # The same append is sent twice at once; after the end it is the last append again.
        await connection.send(cell.append_request(0, end=True) * 2)
        for _ in range(2):
            assert (await connection.read_answer())[0] == 200
        taken = 1
    elif manner == "reordered":
        await connection.send(
            cell.append_request(following + 1) + cell.append_request(following + 2)
        )
        for _ in range(2):
            code, body = await connection.read_answer()
            assert (code, body["error"]["code"]) == (409, "out_of_order")
    elif manner == "garbage" and moment == "mid-append":
        await connection.send(cell.append_request(0).replace(b'"seq"', b'\xffseq"'))
        assert (await connection.read_answer())[0] == 400
    else:
        await misbehave(connection, manner, cell.append_request(following))
    if lost:
        assert await cell.wait_for_end() == "expired"
    else:
        assert (await cell.state())["next_seq"] == taken
        if not taken:
            await cell.append()
        await cell.use("hit")
        assert await cell.wait_for_end() == "used"
    await connection.close()


@pytest.mark.parametrize("moment", LATE)
async def test_an_upstream_that_fails_late(moment: LateMoment, make: Callable[..., Cell]) -> None:
    late = prefilling_upstream if moment == "during prefill" else decoding_upstream
    await run_together({manner: partial(late, make, manner) for manner in MANNERS})


async def prefilling_upstream(make: Callable[..., Cell], manner: Manner) -> None:
    """Fail while an increment of the stream is computed."""
    cell = make(tokens=LONG_PROMPT)
    await cell.open()
    await cell.wait_until(lambda state: state["prefilling"])
    connection = await RawConnection.open(cell.url)
    if manner in ("repeated", "reordered"):
        last, next_one = cell.append_request(0, end=True), cell.append_request(1)
        await connection.send(last + (last if manner == "repeated" else next_one))
        codes = [(await connection.read_answer())[0] for _ in range(2)]
        assert codes == ([200, 200] if manner == "repeated" else [200, 409])
    else:
        left = await misbehave(connection, manner, cell.append_request(0, end=True))
        assert (await cell.state())["next_seq"] == 0
        if manner == "stall":
            await connection.send(left)
            assert (await connection.read_answer())[0] == 200
        else:
            await cell.append()
    await cell.use("hit")
    await connection.close()


async def decoding_upstream(make: Callable[..., Cell], manner: Manner) -> None:
    """Fail while the final request decodes: an append comes too late then, and does no harm."""
    cell = make()
    await cell.open()
    await cell.append()
    request = await RawConnection.open(cell.url)
    await request.send(cell.final_request(40, stream=True))
    await request.read_until(b"data: ")
    connection = await RawConnection.open(cell.url)
    if manner in ("repeated", "reordered"):
        await connection.send(cell.append_request(0 if manner == "repeated" else 5) * 2)
        for _ in range(2):
            code, body = await connection.read_answer()
            assert (code, body["error"]["reason"]) == (410, "used")
    else:
        await misbehave(connection, manner, cell.append_request(1))
    answer = await request.read_until(b"data: [DONE]")
    assert b'"status":"hit"' in answer
    assert await cell.wait_for_end() == "used"
    await request.close()
    await connection.close()


@pytest.mark.parametrize("moment", EARLY)
async def test_a_downstream_that_fails_early(moment: Moment, make: Callable[..., Cell]) -> None:
    await run_together({manner: partial(downstream, make, moment, manner) for manner in MANNERS})


async def downstream(make: Callable[..., Cell], moment: Moment, manner: Manner) -> None:
    """A request that never arrived leaves the stream; one that did uses it, once."""
    cell = make(ttl=BRIEF if manner == "stall" else 60)
    await cell.open()
    appending = await RawConnection.open(cell.url)
    left = await appending.send_half(cell.append_request()) if moment == "mid-append" else b""
    if moment == "after the last append":
        await cell.append()
    connection = await RawConnection.open(cell.url)
    if manner == "repeated":
        again = await RawConnection.open(cell.url)
        await connection.send(cell.final_request())
        await cell.wait_until(lambda state: "error" in state or state["in_use"])
        await again.send(cell.final_request())
        await cell.check_answer(connection, "hit")
        await cell.check_answer(again, "used")
        await again.close()
    elif manner == "reordered":
        # The request comes before the append. It has its whole prompt anyway.
        await cell.use("hit")
    else:
        rest = await misbehave(connection, manner, cell.final_request())
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


@pytest.mark.parametrize("moment", LATE)
async def test_a_downstream_that_fails_late(moment: LateMoment, make: Callable[..., Cell]) -> None:
    await run_together(
        {manner: partial(late_downstream, make, moment, manner) for manner in MANNERS}
    )


async def late_downstream(make: Callable[..., Cell], moment: LateMoment, manner: Manner) -> None:
    """If the client has disconnected, its request is aborted; otherwise it is answered."""
    disconnects = manner in ("reset", "half-close")
    cell = make(tokens=LONG_PROMPT if moment == "during prefill" else 60)
    await cell.open()
    await cell.append()
    connection = await RawConnection.open(cell.url)
    # Decoding all of these would take longer than the test waits, so the request must be aborted.
    await connection.send(cell.final_request(9000 if disconnects else 30, stream=True))
    if moment == "during decode":
        await connection.read_until(b"data: ")
    else:
        await cell.wait_until(lambda state: "error" in state or state["in_use"])
    if disconnects:
        await (connection.reset() if manner == "reset" else connection.half_close())
    elif manner == "garbage":
        other = await RawConnection.open(cell.url)
        await other.send(cell.final_request().replace(b'"text"', b'\xfftext"'))
        assert (await other.read_answer())[0] == 400
        await other.close()
    elif manner == "repeated":
        await cell.use("used")
    elif manner == "reordered":
        other = await RawConnection.open(cell.url)
        await other.send(cell.append_request(1))
        assert (await other.read_answer())[1]["error"]["reason"] == "used"
        await other.close()
    # A client that stalls reads nothing until the stream has ended.
    assert await cell.wait_for_end() == "used"
    if not disconnects:
        assert b'"status":"hit"' in await connection.read_until(b"data: [DONE]")
    await connection.close()
