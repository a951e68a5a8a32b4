"""Test runs of programs without an event loop, whose calls may come from several threads."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from flashmoa.engine.wire import CALL_HEADER, STREAM_HEADER
from flashmoa.link.learned_runs import Program
from flashmoa.observe import CallFailed, CallFinished, Event, LinkOpened
from flashmoa.openai import OpenAI, agent, instrument, run
from flashmoa.openai import runs as _runs
from tests.unit.events import of_kind
from tests.unit.openai.fake_server import (
    MESSAGES,
    TEXT,
    URL,
    FakeServer,
    chunk,
    chunks,
    in_pieces,
    lines_of,
    stream,
    whole,
)

# A text that is long enough to be streamed.
DAY, DAYS = "A day in Patan. ", 60


@pytest.fixture(autouse=True)
def no_thread_is_left(programs: dict[str, Program]) -> Generator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before and not _runs._blocking


def ask(client: openai.OpenAI, content: str, **more: Any) -> str:
    messages: Any = [{"role": "user", "content": content}]
    answer: Any = client.chat.completions.create(model="m", messages=messages, **more)
    return answer.choices[0].message.content


def recorded(programs: dict[str, Program]) -> dict[str, int]:
    """Return the number of calls that were learned of each program."""
    return {name: len(program.recorded) for name, program in programs.items()}


def play(server: FakeServer, client: openai.OpenAI, *, is_linked: bool) -> list[Event]:
    """Make two calls in a run, the second one after its link was fed, and return the events."""
    events: list[Event] = []
    opened = threading.Event()

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, LinkOpened):
            opened.set()

    def told(body: Mapping[str, Any]) -> Generator[str]:
        is_writer = "Write." in str(body["messages"])
        yield DAY if is_writer else TEXT
        assert not is_linked or opened.wait(10)
        yield from [DAY] * (DAYS - 1) if is_writer else ()

    server.told, server.awaits_channels = told, is_linked
    server.chat = lambda body: whole(
        message={"role": "assistant", "content": "".join(server.told(body))}
    )
    with run("twice", listener=listener):
        with agent("writer"):
            text = ask(client, "Write.")
        deadline = time.monotonic() + 10
        while is_linked and not streamed(server):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with agent("reader"):
            assert ask(client, f"Read: {text}") == TEXT
    return events


def streamed(server: FakeServer) -> bool:
    """Return whether text of the writer has come to a prompt stream."""
    return any("prompt_streams" in path and DAY in str(body) for path, body, _ in server.requests)


@pytest.mark.parametrize("kind", ["own", "stock"])
def test_a_second_run_is_linked(
    server: FakeServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    with server.blocking_client() if kind == "own" else instrument(stock) as client:
        first, second = (play(server, client, is_linked=each) for each in (False, True))
    assert not of_kind(first, LinkOpened)
    assert {event.agent for event in of_kind(second, LinkOpened)} == {"reader"}
    streams = [headers.get(STREAM_HEADER) for headers in server.headers()]
    assert streams[:3] == [None] * 3 and streams[3] is not None
    assert len({headers[CALL_HEADER] for headers in server.headers()}) == 4
    # A run with links opens one channel, and closes it.
    assert [channel.is_open for _, channel in server.channels] == [False]
    assert [event.text for event in of_kind(second, CallFinished)] == [DAY * DAYS, TEXT]
    assert not caplog.records


def test_a_run_decorates_functions(server: FakeServer, programs: dict[str, Program]) -> None:
    @run("decorated")
    def trip(place: str) -> str:
        return ask(client, place)

    with server.blocking_client() as client:
        assert trip("Nepal") == trip(place="Norway") == TEXT
    assert recorded(programs) == {"decorated": 1}


def test_a_run_that_fails_is_not_learned(server: FakeServer, programs: dict[str, Program]) -> None:
    def answers() -> Generator[str]:
        with run("generator"):
            yield ask(client, "Go.")
            yield ask(client, "Go on.")

    once = run("fails")
    with server.blocking_client() as client:
        with pytest.raises(ZeroDivisionError), once:
            ask(client, "Go.")
            raise ZeroDivisionError
        assert recorded(programs) == {"fails": 0}
        with once, pytest.raises(RuntimeError, match="has not ended"), once:
            pass
        # A generator that is left ends its run, too.
        made = answers()
        assert next(made) == TEXT
        made.close()
    assert recorded(programs) == {"fails": 0, "generator": 0}


def test_a_program_that_never_leaves_its_run_ends() -> None:
    program = """if True:
        from flashmoa.openai import run

        def trip():
            with run("endless"):
                yield

        kept = trip()
        next(kept)
    """
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


FORKING = """
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
import pytest
from flashmoa.openai import run
from flashmoa.openai import runs as _runs
from tests.unit.openai.fake_server import TEXT, serve
from tests.unit.openai.test_blocking_runs import ask, recorded

parent = os.getpid()
client = serve(pytest.MonkeyPatch()).blocking_client()

def ask_thrice():
    with ThreadPoolExecutor() as pool:
        assert [ask(client, "Go."), *pool.map(ask, [client] * 2, "ab")] == [TEXT] * 3

def work():
    signal.alarm(30)  # Its parent sees that it did not end by itself.
    ask_thrice()
    assert recorded(_runs._programs) == {"forked": 0}
    with run("own"):
        ask_thrice()
    assert recorded(_runs._programs) == {"forked": 0, "own": 3}

def fork():
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode

with run("forked"):
    ask(client, "Go.")
    if sys.argv[1] == "os.fork":
        if child := os.fork():
            ended = os.waitpid(child, 0)[1]
        else:
            work()
            ended = 0
    elif sys.argv[1] == "thread":
        codes = []
        thread = threading.Thread(target=lambda: codes.append(fork()))
        thread.start()
        thread.join()
        ended = codes[0]
    else:
        ended = fork()
assert ended == 0, ended
assert os.getpid() != parent or recorded(_runs._programs) == {"forked": 1}
"""


@pytest.mark.parametrize("way", ["multiprocessing", "thread", "os.fork"])
def test_a_forked_process_runs_unlinked(way: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, way]
    ended = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (warning,) = ended.stderr.splitlines()
    assert "was forked within a run" in warning


def test_threads_are_in_the_only_run(server: FakeServer, programs: dict[str, Program]) -> None:
    with ThreadPoolExecutor() as pool, server.blocking_client() as client:
        ask(client, "Go.")
        with run("pool"):
            assert list(pool.map(lambda _: ask(client, "Go."), range(4))) == [TEXT] * 4
        pool.submit(ask, client, "Go.").result()
    assert recorded(programs) == {"pool": 4}


def test_a_threads_call_is_in_its_contexts_run(
    server: FakeServer, programs: dict[str, Program]
) -> None:
    both, done = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)

    def program(name: str) -> None:
        with run(name), ThreadPoolExecutor() as pool:
            both.wait()
            pool.submit(ask, client, f"{name}: without a context").result()
            context = copy_context()
            pool.submit(context.run, ask, client, f"{name}: with it").result()
            ask(client, f"{name}: itself")
            done.wait()

    with server.blocking_client() as client, ThreadPoolExecutor() as pool:
        list(pool.map(program, "ab"))
    assert programs.keys() == {"a", "b"}
    for name, program in programs.items():
        contents = [call.request.messages[0]["content"] for call in program.recorded.values()]
        assert contents == [f"{name}: with it", f"{name}: itself"]


def test_a_loop_is_not_in_another_threads_run(
    server: FakeServer, programs: dict[str, Program]
) -> None:
    """It may serve somebody else's requests."""

    async def serve() -> None:
        async with server.client() as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    with run("other"), ThreadPoolExecutor() as pool:
        pool.submit(asyncio.run, serve()).result()
        context = copy_context()
        pool.submit(context.run, asyncio.run, serve()).result()
    assert recorded(programs) == {"other": 1}


def test_a_call_is_answered_in_a_blocked_loop(
    server: FakeServer, programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runs, "_LOOP_TIMEOUT_SECONDS", 0.01)

    async def program() -> None:
        async with run("blocked"):
            with ThreadPoolExecutor() as pool, server.blocking_client() as client:
                for _ in range(2):
                    context = copy_context()
                    # No coroutine should wait for a thread like this.
                    assert pool.submit(context.run, ask, client, "Go.").result() == TEXT
                monkeypatch.setattr(_runs, "_LOOP_TIMEOUT_SECONDS", 30)
                for _ in range(10):  # Here the event loop answers.
                    await asyncio.sleep(0)
                assert await asyncio.to_thread(ask, client, "Go on.") == TEXT

    asyncio.run(program())
    (blocked, free) = programs["blocked"].recorded.values()
    assert blocked.has_failed and free.answer == TEXT


@pytest.mark.parametrize("begins_here", [True, False])
def test_a_stream_may_pass_from_thread_to_thread(
    server: FakeServer, begins_here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is linked whichever thread has begun it, also in the run's own event loop."""
    server.chat = lambda body: (
        stream([*(chunk({"content": DAY}) for _ in range(DAYS)), chunk({}, "stop")])
        if "Write." in str(body["messages"])
        else whole()
    )
    events: list[Event] = []

    async def trip(*, is_linked: bool) -> None:
        def read_days(text: Any) -> list[str]:
            # The reader's link is open; the text has yet to come.
            deadline = time.monotonic() + 10
            while is_linked and not of_kind(events, LinkOpened):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            return [each.choices[0].delta.content or "" for each in text]

        with server.blocking_client() as client:
            begin = partial(client.chat.completions.create, model="m", stream=True)
            async with run("passed", listener=events.append):
                asked: Any = {"messages": [{"role": "user", "content": "Write."}]}
                with agent("writer"):
                    text: Any = begin(**asked) if begins_here else await in_thread(begin, **asked)
                day = next(text).choices[0].delta.content
                days = "".join(await in_thread(read_days, text))
                with agent("reader"):
                    await in_thread(ask, client, f"Read: {day}{days}")

    async def in_thread(function: Any, *given: Any, **named: Any) -> Any:
        return await asyncio.to_thread(function, *given, **named)

    asyncio.run(trip(is_linked=False))
    events.clear()
    asyncio.run(trip(is_linked=True))
    assert streamed(server) and not caplog.records
    assert [event.text for event in of_kind(events, CallFinished)] == [DAY * DAYS, TEXT]


def test_a_stream_may_be_read_after_its_run(server: FakeServer) -> None:
    with server.blocking_client() as client:
        create: Any = client.chat.completions.create
        with run("outlived"):
            answer = create(model="m", messages=MESSAGES, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in answer) == TEXT


def test_an_interrupt_ends_the_run(server: FakeServer, programs: dict[str, Program]) -> None:
    def interrupted() -> Generator[bytes]:
        yield lines_of(chunks())[0][:40]
        raise KeyboardInterrupt

    events: list[Event] = []
    server.chat = lambda _: in_pieces(interrupted())
    with server.blocking_client() as client, suppress(KeyboardInterrupt):
        with run("interrupted", listener=events.append):
            ask(client, "Go.")
        raise AssertionError
    assert [each.error_type for each in of_kind(events, CallFailed)] == ["KeyboardInterrupt"]
    assert recorded(programs) == {"interrupted": 0}


def test_a_blocking_http_client_may_be_observed(server: FakeServer) -> None:
    server.chat = lambda _: whole()
    with httpx.Client() as http, OpenAI(base_url=URL, http_client=http) as client:
        with run("shared"):
            assert ask(client, "Go.") == TEXT
        assert ask(client, "Go.") == TEXT
