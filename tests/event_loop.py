"""What the event loop of all tests needs beside pytest-asyncio.

A ``conftest.py`` imports the fixtures.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


@asynccontextmanager
async def own_task(manager: AbstractAsyncContextManager[T]) -> AsyncGenerator[T]:
    """Enter and leave a context manager in one task, for the fixture that yields its value.

    pytest-asyncio sets a fixture up in one task and tears it down in another. A cancel scope, which
    every task group has, must be left in the task that entered it.

    Raises: what the context manager raises, also while it is open, for example because a task of
        its task group has failed.
    """
    entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    ends = asyncio.Event()

    async def hold() -> None:
        async with manager as value:
            entered.set_result(value)
            await ends.wait()

    task = asyncio.create_task(hold())
    try:
        await asyncio.wait((task, entered), return_when=asyncio.FIRST_COMPLETED)
        if entered.done():
            yield entered.result()
    finally:
        if entered.done():
            ends.set()
        else:
            task.cancel()
        await task


@pytest.fixture(scope="session", autouse=True)
async def unhandled_errors() -> AsyncGenerator[list[Exception]]:
    """Collect errors that nothing awaits: of callbacks, and of tasks that are not awaited."""
    errors: list[Exception] = []

    def collect(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), Exception):
            errors.append(error)
        else:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(collect)
    yield errors
    _raise(errors)


@pytest.fixture(autouse=True)
def no_unhandled_errors(unhandled_errors: list[Exception]) -> Generator[None]:
    """Fail a test if an error occurs that no code awaits."""
    yield
    _raise(unhandled_errors)


def _raise(errors: list[Exception]) -> None:
    if errors:
        raised = errors.copy()
        errors.clear()
        raise ExceptionGroup("errors that nothing in the event loop awaits", raised)
