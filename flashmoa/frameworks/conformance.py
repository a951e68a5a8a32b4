"""Test an adapter on real engines: linked equals unlinked, and engines get their KV back.

The author of an adapter writes one function. It makes a small team of the framework, links it if it
is given a listener, runs it once, and closes the link::

    async def run_team(listener: Listener | None) -> list[str]:
        team = make_team(...)
        link = None if listener is None else my_adapter.link(team, listener=listener)
        try:
            return [message.text for message in await team.run("Plan a trip.")]
        finally:
            if link is not None:
                await link.close()

    @pytest.mark.anyio
    async def test_the_adapter() -> None:
        async with EngineClient("http://127.0.0.1:30000") as engine:
            await check_adapter(run_team, [engine], linkable=2)

The team must ask at temperature 0, and write a few dozen tokens in each call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio

from flashmoa.engine import EngineClient
from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import Event, LinkClosed, LinkOpened, Listener

# Runs a new team once, linked if it is given a listener; returns the agents' texts.
RunTeam = Callable[[Listener | None], Awaitable[Sequence[str]]]

_RELEASE_SECONDS = 30.0


async def check_adapter(
    run_team: RunTeam, engines: Sequence[EngineClient], *, linkable: int
) -> list[Event]:
    """Check an adapter with a team on engines that serve nobody else.

    Args:
        engines: the engines that the team asks; they have the plugin.
        linkable: the number of calls in a run that can be linked, mostly all but the first.

    Returns: the events of a linked run.

    Raises: AssertionError, which names the problem.
    """
    await _flush(engines)
    unlinked = list(await run_team(None))
    assert all(unlinked), f"an agent wrote nothing, so that nothing was streamed: {unlinked}"
    for is_last in (False, False, True):
        events: list[Event] = []
        await _flush(engines)
        linked = list(await run_team(events.append))
        assert linked == unlinked, f"linking has changed the answers from {unlinked} to {linked}"
        hits = _count_hits(calls(events), linkable)
        await _check_released(engines, events)
        # Some links are late on a busy machine; most links of a slow adapter are late each time.
        if 2 * hits >= linkable:
            break
        assert not is_last, f"in three runs, links came too late for most of {linkable} calls"
    await _check_cancelled(run_team, engines)
    return events


def status(call: Call) -> str:
    """Return the engine's word for how a call found its prompt stream.

    It is ``late`` if the call came before its link was made, ``unlinked`` if it had no link.
    """
    if call.usage is not None and call.usage.prompt_stream is not None:
        return call.usage.prompt_stream.status
    return "late" if call.started.late else "unlinked"


async def _flush(engines: Sequence[EngineClient]) -> None:
    for engine in engines:
        await engine.flush_cache()


def _count_hits(made: Sequence[Call], linkable: int) -> int:
    table = ", ".join(f"{call.agent}: {status(call)}" for call in made)
    assert all(call.ended for call in made), f"a call's end was not reported: {table}"
    found = Counter(map(status, made))
    predicted = found["hit"] + found["late"]
    assert found.keys() <= {"hit", "late", "unlinked"}, f"forecasts were wrong: {table}"
    assert predicted >= linkable, f"only {predicted} of {linkable} calls were forecast: {table}"
    return found["hit"]


async def _check_released(engines: Sequence[EngineClient], events: Sequence[Event]) -> None:
    with anyio.move_on_after(_RELEASE_SECONDS):
        while any([await _holds_kv(engine) for engine in engines]):  # noqa: ASYNC110
            await anyio.sleep(0.02)
    held = [engine.url for engine in engines if await _holds_kv(engine)]
    assert not held, f"{held} still hold KV of a run that is over; is host.close() awaited?"
    opened, closed = (
        {event.stream_id for event in events if isinstance(event, kind)}
        for kind in (LinkOpened, LinkClosed)
    )
    assert opened <= closed, f"links were not closed: {opened - closed}"


async def _holds_kv(engine: EngineClient) -> bool:
    info = await engine.info()
    # The radix tree does not know all KV of a running request yet.
    return bool(info.prompt_streams or any(kv.free + kv.evictable < kv.total for kv in info.kv))


async def _check_cancelled(run_team: RunTeam, engines: Sequence[EngineClient]) -> None:
    events: list[Event] = []
    opened = asyncio.Event()

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, LinkOpened):
            opened.set()

    await _flush(engines)
    running = asyncio.ensure_future(run_team(listener))
    try:
        with anyio.fail_after(_RELEASE_SECONDS):
            await opened.wait()
    finally:
        # Frameworks are cancelled once; a cancel scope would also cancel their cleanup.
        running.cancel()
    outcome = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(outcome[0], asyncio.CancelledError | list), f"cancelled: {outcome[0]!r}"
    await _check_released(engines, events)
