"""The failure matrix: what its cells are, what each ended in, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from flashmoa import FailurePolicy
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.linking.failure_policy import Action, Failure
from flashmoa.observe import Event, LinkClosed, LinkOpened, UpstreamFailed
from tests.integration.baseline import Baseline, count_sockets

FAILURES: tuple[Failure, ...] = ("error", "cancel", "timeout", "stall")
ACTIONS: tuple[Action, ...] = ("abort", "finalize")
Make = Callable[..., FlashMoAChatCompletionClient]
# What a reader that answers has read.
HAD_ARRIVED, WHOLE = "what had arrived, prefilled", "the whole text, unlinked"
# A stall that is waited for need not take long here.
BRIEF = 0.4
# Within this long an answer must have begun that OpenAI's client is to give up waiting for.
PATIENCE = 1.5


def policy(failure: Failure, action: Action) -> FailurePolicy:
    """Return a policy with that action for that failure alone, to tell it from the others."""
    other: Action = "finalize" if action == "abort" else "abort"
    actions: dict[str, Action] = dict.fromkeys(FAILURES, other) | {failure: action}
    # Where a stall is not the matter, it must not come first.
    seconds = BRIEF if failure == "stall" else 60.0
    return FailurePolicy(**actions, stall_seconds=seconds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cell:
    """What one cell ended in."""

    where: str
    failure: str
    action: str
    reader: str
    link: str


cells: list[Cell] = []


def record_cell(
    where: str, failure: str, action: str, reader: str, events: Iterable[Event]
) -> Cell:
    """Note a cell."""
    closed = [event.reason for event in events if isinstance(event, LinkClosed)]
    cell = Cell(where, failure, action, reader, ", ".join(closed))
    cells.append(cell)
    return cell


def reported_failures(events: Iterable[Event]) -> list[tuple[str, str, str]]:
    """Return what readers were told of their upstream."""
    return [(e.upstream, e.failure, e.action) for e in events if isinstance(e, UpstreamFailed)]


async def wait_until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


def is_linked(events: Sequence[Event]) -> bool:
    return any(isinstance(event, LinkOpened) for event in events)


@asynccontextmanager
async def check_nothing_is_left(*baselines: Baseline) -> AsyncGenerator[None]:
    """Engines, and this process, are afterwards as they were: KV, requests, sockets, tasks."""
    await anyio.wait_all_tasks_blocked()
    before = count_sockets(os.getpid())
    tasks = asyncio.all_tasks()
    yield
    await wait_until(
        lambda: count_sockets(os.getpid()) <= before and not asyncio.all_tasks() - tasks
    )
    for baseline in baselines:
        await baseline.wait_until_restored()
