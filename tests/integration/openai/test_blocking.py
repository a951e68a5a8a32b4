"""Test that programs without an event loop are linked like programs with an event loop."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import Queue
from typing import Any

import anyio
import openai
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkOpened
from flashmoa.openai import OpenAI, agent, instrument, run
from tests.conftest import ROOT
from tests.integration.openai.programs import BODY, SETTINGS, TASK, Clients, closed, statuses
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.usefixtures("clients")

Wait = Callable[..., None]


def at_once(*_: str) -> None:
    """Wait for no links."""


class Links:
    """Waits until a run has opened links; a short answer may be faster than they are."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._opened: Queue[str] = Queue()
        self._known: set[str] = set()

    def listen(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LinkOpened):
            self._opened.put(event.agent)

    def wait(self, *agents: str) -> None:
        """Wait until there is a link to each of some agents."""
        while not self._known.issuperset(agents):
            self._known.add(self._opened.get(timeout=60))


@contextmanager
def both(engine: LocalEngine, downstream: LocalEngine) -> Iterator[Sequence[openai.OpenAI]]:
    """Yield a client of this package, and a stock one."""
    stock = openai.OpenAI(base_url=f"{downstream.url}/v1", api_key="EMPTY", max_retries=0)
    with OpenAI(base_url=engine.url, max_retries=0) as first, instrument(stock) as second, stock:
        yield first, second


def ask(client: openai.OpenAI, *contents: str, way: str = "create") -> str:
    """Return the answer to a system message, if there are two contents, and a user's."""
    roles = ("system", "user")[-len(contents) :]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    request: dict[str, Any] = {"messages": messages, "extra_body": BODY, **SETTINGS}
    completions: Any = client.chat.completions
    if way == "stream":
        request["stream_options"] = {"include_usage": True}
        with completions.create(**request, stream=True) as chunks:
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    if way == "raw":
        return completions.with_raw_response.create(**request).parse().choices[0].message.content
    if way == "streaming response":
        with completions.with_streaming_response.create(**request) as response:
            return response.parse().choices[0].message.content
    return completions.create(**request).choices[0].message.content


def chain(clients: Sequence[openai.OpenAI], guide: str, way: str, wait: Wait) -> list[str]:
    """Return the answers of three agents. The second reads one answer, the third reads both."""
    plan = ask(clients[0], TASK, way=way)
    wait("checker")
    with agent("checker"):
        check = ask(clients[1], f"{guide}\nCheck plans.", f"Check:\n{plan}", way=way)
    wait("editor")
    whole = f"{TASK}\nPlan: {plan}\n\nRemarks: {check.strip()}\n\nSum it up."
    with agent("editor"):
        return [plan, check, ask(clients[0], f"{guide}\nSum up.", whole, way=way)]


def play_linked(name: str, program: Callable[[Wait], Any]) -> tuple[Any, list[Event]]:
    """Return the result of a program's second run, and the events of this run."""
    answers, links = list[Any](), Links()
    for wait, listener in ((at_once, lambda _: None), (links.wait, links.listen)):
        # Without names of agents, calls are told apart by the lines that call.
        with run(name, listener=listener):
            answers.append(program(wait))
    assert answers[0] == answers[1]
    return answers[1], links.events


@pytest.mark.parametrize("way", ["create", "stream", "raw", "streaming response"])
async def test_a_second_run_is_linked_and_answers_the_same(
    engine: LocalEngine, downstream: LocalEngine, guide: str, way: str
) -> None:
    def program() -> None:
        with both(engine, downstream) as clients:
            unlinked = chain(clients, guide, way, at_once)
            linked, events = play_linked(f"blocking {way}", partial(chain, clients, guide, way))
        assert linked == unlinked
        assert statuses(events) == [None, "hit", "hit"] and closed(events) == ["used", "used"]

    before = threading.active_count()
    await asyncio.to_thread(program)
    assert threading.active_count() <= before + 1  # The thread of asyncio itself.


async def test_the_calls_of_a_pool_of_threads_are_linked(
    engine: LocalEngine, downstream: LocalEngine, guide: str
) -> None:
    def reviews(clients: Sequence[openai.OpenAI], wait: Wait) -> list[str]:
        def review(who: str) -> str:
            with agent(who):
                return ask(clients[1], f"{guide}\nYou are {who}.", draft)

        draft = ask(clients[0], TASK)
        wait("A", "B")
        with ThreadPoolExecutor() as pool:
            return [draft, *pool.map(review, "AB")]

    def program() -> None:
        with both(engine, downstream) as clients:
            unlinked = reviews(clients, at_once)
            linked, events = play_linked("blocking pool", partial(reviews, clients))
        assert linked == unlinked
        assert statuses(events) == [None, "hit", "hit"]

    await asyncio.to_thread(program)


INTERRUPTED = """
import signal
import sys
import threading
from flashmoa.observe import LinkOpened
from flashmoa.openai import OpenAI, run
from tests.integration.openai.test_blocking import ask

# Shells have what they run in the background ignore interrupts, and tests may run there.
signal.signal(signal.SIGINT, signal.default_int_handler)
opened = threading.Event()

def listener(event):
    if isinstance(event, LinkOpened):
        opened.set()

with OpenAI(base_url=sys.argv[1]) as client:
    for number in range(5):
        with run("interrupted", listener=listener):
            plan = ask(client, "Plan.")
            # Links are late on a busy machine, and the first run has none.
            if number and opened.wait(5):
                print("Linked", flush=True)
                sys.stdin.read()
            ask(client, "Check a long plan: " + "a long day, " * 200 + plan)
"""


async def test_an_interrupted_program_gives_everything_back(
    engine: LocalEngine, client: EngineClient, clients: Clients
) -> None:
    command = [sys.executable, "-c", INTERRUPTED, engine.url]
    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
        assert process.stdout is not None
        text = b""
        with anyio.fail_after(60):
            while b"Linked" not in text:
                text += await process.stdout.receive()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == -signal.SIGINT
    # Not when they expire.
    assert (await wait_until_idle(client)).pinned_streams == 0
