"""Test what the event loop of all tests has beside pytest-asyncio."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.event_loop import own_task


@asynccontextmanager
async def failing(fails: str) -> AsyncGenerator[anyio.Event]:
    """Open a task group; fail with ``fails`` as the message at the moment that it names."""
    begins = anyio.Event()

    async def work() -> None:
        await begins.wait()
        raise RuntimeError(fails)

    async with anyio.create_task_group() as group:
        if fails == "at the start":
            raise RuntimeError(fails)
        if fails == "while open":
            group.start_soon(work)
        yield begins
        if fails == "at the end":
            raise RuntimeError(fails)


@pytest.fixture
async def begins() -> AsyncGenerator[anyio.Event]:
    async with own_task(failing("never")) as begins:
        yield begins


async def test_a_fixture_may_hold_a_task_group(begins: anyio.Event) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await begins.wait()
    assert scope.cancelled_caught and not begins.is_set()


@pytest.mark.parametrize("fails", ["at the start", "while open", "at the end"])
async def test_errors_in_the_own_task_are_raised(fails: str) -> None:
    opened = False
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match=fails)):
        async with own_task(failing(fails)) as begins:
            opened = True
            begins.set()
            await anyio.wait_all_tasks_blocked()
    assert opened == (fails != "at the start")


async def test_errors_that_nothing_awaits_are_collected(unhandled_errors: list[Exception]) -> None:
    async def fail() -> None:
        raise RuntimeError("in a task")

    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: 1 / 0)
    task = loop.create_task(fail())
    await asyncio.wait([task])
    del task
    collected, unhandled_errors[:] = unhandled_errors.copy(), []
    assert [type(error) for error in collected] == [ZeroDivisionError, RuntimeError]
