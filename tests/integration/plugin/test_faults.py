"""Test clients that fail, at every moment and in every manner (``fault_cells.py`` has the axes).

After every group of cells, the streams must have ended as documented, and the engine be idle.
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
    Late,
    Manner,
    Moment,
    misbehave,
    run_cells,
)
from tests.integration.raw import RawConnection

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]
Words = Callable[[int, int], str]
LOST: tuple[Manner, ...] = ("reset", "half-close", "stall")


@pytest.mark.parametrize("moment", EARLY)
async def test_an_upstream_that_fails_early(moment: Moment, make: Callable[..., Cell]) -> None:
    await run_cells({manner: partial(upstream, make, moment, manner) for manner in MANNERS})


async def upstream(make: Callable[..., Cell], moment: Moment, manner: Manner) -> None:
    """An append that arrives in part is not applied; the stream waits for it until its TTL."""
    lost = manner in LOST
    cell = make(ttl=BRIEF if lost else 60)
    await cell.open()
    if moment == "after the last append":
        await cell.append()
    connection = await RawConnection.open(cell.url)
    following = 1 if moment == "after the last append" else 0
    taken = following
    if manner == "repeated":
        # The same append twice, sent together; after the end, the last append again.
        await connection.send(cell.make_append(0, end=True) * 2)
        for _ in range(2):
            assert (await connection.read_answer())[0] == 200
        taken = 1
    elif manner == "reordered":
        await connection.send(cell.make_append(following + 1) + cell.make_append(following + 2))
        for _ in range(2):
            code, body = await connection.read_answer()
            assert (code, body["error"]["code"]) == (409, "out_of_order")
    elif manner == "garbage" and moment == "mid-append":
        await connection.send(cell.make_append(0).replace(b'"seq"', b'\xffseq"'))
        assert (await connection.read_answer())[0] == 400
    else:
        await misbehave(connection, manner, cell.make_append(following))
    if lost:
        assert await cell.wait_for_end() == "expired"
    else:
        assert (await cell.state())["next_seq"] == taken
        if not taken:
            await cell.append()
        await cell.check_request("hit")
        assert await cell.wait_for_end() == "used"
    await connection.close()


@pytest.mark.parametrize("moment", LATE)
async def test_an_upstream_that_fails_late(moment: Late, make: Callable[..., Cell]) -> None:
    late = prefilling_upstream if moment == "during prefill" else decoding_upstream
    await run_cells({manner: partial(late, make, manner) for manner in MANNERS})


async def prefilling_upstream(make: Callable[..., Cell], manner: Manner) -> None:
    """The upstream client fails while an increment of the stream is computed."""
    cell = make(tokens=LONG_PROMPT)
    await cell.open()
    await cell.wait_for_state(lambda state: state["prefilling"])
    connection = await RawConnection.open(cell.url)
    if manner in ("repeated", "reordered"):
        last, then = cell.make_append(0, end=True), cell.make_append(1)
        await connection.send(last + (last if manner == "repeated" else then))
        codes = [(await connection.read_answer())[0] for _ in range(2)]
        assert codes == ([200, 200] if manner == "repeated" else [200, 409])
    else:
        left = await misbehave(connection, manner, cell.make_append(0, end=True))
        assert (await cell.state())["next_seq"] == 0
        if manner == "stall":
            await connection.send(left)
            assert (await connection.read_answer())[0] == 200
        else:
            await cell.append()
    await cell.check_request("hit")
    await connection.close()


async def decoding_upstream(make: Callable[..., Cell], manner: Manner) -> None:
    """The upstream client fails while the stream's request decodes, which does no harm."""
    cell = make()
    await cell.open()
    await cell.append()
    request = await RawConnection.open(cell.url)
    await request.send(cell.make_generate(40, stream=True))
    await request.read_until(b"data: ")
    connection = await RawConnection.open(cell.url)
    if manner in ("repeated", "reordered"):
        await connection.send(cell.make_append(0 if manner == "repeated" else 5) * 2)
        for _ in range(2):
            code, body = await connection.read_answer()
            assert (code, body["error"]["reason"]) == (410, "used")
    else:
        await misbehave(connection, manner, cell.make_append(1))
    answer = await request.read_until(b"data: [DONE]")
    assert b'"status":"hit"' in answer
    assert await cell.wait_for_end() == "used"
    await request.close()
    await connection.close()


@pytest.mark.parametrize("moment", EARLY)
async def test_a_downstream_that_fails_early(moment: Moment, make: Callable[..., Cell]) -> None:
    await run_cells({manner: partial(downstream, make, moment, manner) for manner in MANNERS})


async def downstream(make: Callable[..., Cell], moment: Moment, manner: Manner) -> None:
    """A request that never arrives completely does not use the stream; others use it once."""
    cell = make(ttl=BRIEF if manner == "stall" else 60)
    await cell.open()
    appending = await RawConnection.open(cell.url)
    left = await appending.send_half(cell.make_append()) if moment == "mid-append" else b""
    if moment == "after the last append":
        await cell.append()
    connection = await RawConnection.open(cell.url)
    if manner == "repeated":
        again = await RawConnection.open(cell.url)
        await connection.send(cell.make_generate())
        await cell.wait_for_state(lambda state: "error" in state or state["in_use"])
        await again.send(cell.make_generate())
        await cell.check_answer(connection, "hit")
        await cell.check_answer(again, "used")
        await again.close()
    elif manner == "reordered":
        # The request comes before the append, and has its whole prompt anyway.
        await cell.check_request("hit")
    else:
        rest = await misbehave(connection, manner, cell.make_generate())
        if manner == "stall":
            assert await cell.wait_for_end() == "expired"
            await connection.send(rest)
            await cell.check_answer(connection, "expired")
        else:
            await cell.check_request("hit")
    if left:
        await appending.send(left)
        assert (await appending.read_answer())[0] == 410
    assert await cell.wait_for_end() == ("expired" if manner == "stall" else "used")
    await appending.close()
    await connection.close()


@pytest.mark.parametrize("moment", LATE)
async def test_a_downstream_that_fails_late(moment: Late, make: Callable[..., Cell]) -> None:
    await run_cells({manner: partial(late_downstream, make, moment, manner) for manner in MANNERS})


async def late_downstream(make: Callable[..., Cell], moment: Late, manner: Manner) -> None:
    """The engine stops decoding for a client that has gone, and answers the others."""
    gone = manner in ("reset", "half-close")
    cell = make(tokens=LONG_PROMPT if moment == "during prefill" else 60)
    await cell.open()
    await cell.append()
    connection = await RawConnection.open(cell.url)
    # More tokens than can be decoded within the test's timeout, unless it is aborted.
    await connection.send(cell.make_generate(9000 if gone else 30, stream=True))
    if moment == "during decode":
        await connection.read_until(b"data: ")
    else:
        await cell.wait_for_state(lambda state: "error" in state or state["in_use"])
    if gone:
        await (connection.reset() if manner == "reset" else connection.half_close())
    elif manner == "garbage":
        other = await RawConnection.open(cell.url)
        await other.send(cell.make_generate().replace(b'"text"', b'\xfftext"'))
        assert (await other.read_answer())[0] == 400
        await other.close()
    elif manner == "repeated":
        await cell.check_request("used")
    elif manner == "reordered":
        other = await RawConnection.open(cell.url)
        await other.send(cell.make_append(1))
        assert (await other.read_answer())[1]["error"]["reason"] == "used"
        await other.close()
    # A stalled client reads nothing until long after the stream's end.
    assert await cell.wait_for_end() == "used"
    if not gone:
        assert b'"status":"hit"' in await connection.read_until(b"data: [DONE]")
    await connection.close()
