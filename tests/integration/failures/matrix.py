"""Define the failure matrix, and check what links report and that nothing is left behind."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import product

import anyio

from flashmoa import FailurePolicy
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.link.failure_policy import Action, Failure
from flashmoa.observe import Event, LinkClosed, LinkOpened, UpstreamFailed
from tests.integration.baseline import Baseline, count_sockets
from tests.integration.support import nightly, slow
from tests.waiting import until

FAILURES: tuple[Failure, ...] = ("error", "cancel", "timeout", "stall")
ACTIONS: tuple[Action, ...] = ("abort", "finalize")
# For each failure, one cell runs more often than every night.
_FAST = (("error", "finalize"), ("stall", "abort"))
_SLOW = (("cancel", "abort"), ("timeout", "finalize"))
CELLS = [
    cell if cell in _FAST else slow(*cell) if cell in _SLOW else nightly(*cell)
    for cell in product(FAILURES, ACTIONS)
]
# Cells of teams take longer.
TEAM_CELLS = [
    slow(*cell) if cell in _FAST + _SLOW else nightly(*cell) for cell in product(FAILURES, ACTIONS)
]
Make = Callable[..., FlashMoAChatCompletionClient]
# Seconds until a text counts as stalled, so that the tests need not wait long.
BRIEF = 1.0
# Seconds until OpenAI's client times out. An answer must begin earlier.
PATIENCE = 5.0


def policy(failure: Failure, action: Action) -> FailurePolicy:
    """Return a policy with ``action`` for that failure, and the other action for all others."""
    other: Action = "finalize" if action == "abort" else "abort"
    actions: dict[str, Action] = dict.fromkeys(FAILURES, other) | {failure: action}
    # In tests of other failures, a stall must not come first.
    seconds = BRIEF if failure == "stall" else 60.0
    return FailurePolicy(**actions, stall_seconds=seconds)  # type: ignore[arg-type]


def reasons(events: Iterable[Event]) -> str:
    """Return why links were closed."""
    return ", ".join(event.reason for event in events if isinstance(event, LinkClosed))


def reported_failures(events: Iterable[Event]) -> list[tuple[str, str, str]]:
    """Return the failures of upstream agents that were reported to their readers."""
    return [(e.upstream, e.failure, e.action) for e in events if isinstance(e, UpstreamFailed)]


def is_linked(events: Sequence[Event]) -> bool:
    return any(isinstance(event, LinkOpened) for event in events)


@asynccontextmanager
async def check_nothing_is_left(*baselines: Baseline) -> AsyncGenerator[None]:
    """Check that KV, requests, sockets and tasks are the same afterwards as before."""
    await anyio.wait_all_tasks_blocked()
    before = count_sockets(os.getpid())
    tasks = asyncio.all_tasks()
    yield
    await until(lambda: count_sockets(os.getpid()) <= before and not asyncio.all_tasks() - tasks)
    for baseline in baselines:
        await baseline.wait_until_restored()
