"""Test that calls are heard on a channel of their engine."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from flashmoa import EngineClient
from flashmoa._concurrency import TaskHost
from flashmoa.engine.wire import CALL_HEADER
from flashmoa.link import hearing, reasons
from flashmoa.link.hearing import CallChannel
from tests.unit.openai.fake_server import URL, Channel, FakeServer, serve
from tests.waiting import until


class Listener:
    """Listens to a fake server, which tells lines on its channels as a test wants."""

    def __init__(self, server: FakeServer, engine: EngineClient, host: TaskHost) -> None:
        self.server = server
        self.host = host
        self.channel = CallChannel(engine, host)
        self.calls = ExitStack()

    def call(self) -> tuple[str, list[str]]:
        """Begin to hear a call; return its id, and a list that gets its texts."""
        texts: list[str] = []
        return self.calls.enter_context(self.channel.hearing(texts.append)), texts

    def channels(self) -> list[Channel]:
        """Return the channels that it has opened so far."""
        return [channel for _, channel in self.server.channels]

    async def opened(self) -> Channel:
        """Return the channel that it has opened last, once the channel is open."""
        self.channel.open()
        await until(lambda: self.channels() and self.channels()[-1].is_open)
        return self.channels()[-1]

    async def tell(self, *lines: dict[str, Any]) -> None:
        """Tell lines, and wait until they are heard."""
        channel = await self.opened()
        channel.tell(*lines)
        await until(lambda: channel.is_read)


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Listener]:
    monkeypatch.setattr(hearing, "RETRY_SECONDS", 0.0)
    server, host = serve(monkeypatch), TaskHost("Listening failed")
    server.told = lambda _: []
    async with EngineClient(URL) as engine:
        yield Listener(server, engine, host)
        await host.close()


def text(call: str, content: str, at: int) -> dict[str, Any]:
    return {"call": call, "content": content, "at": at}


async def test_a_late_channel_has_the_whole_text(listener: Listener) -> None:
    call, heard = listener.call()
    assert not listener.server.channels
    await listener.tell(text(call, "The ", 0))
    await listener.tell(text(call, "quick\u2028", 4), text(call, "\U0001f98a", 10))
    assert heard == ["The ", "quick\u2028", "\U0001f98a"]


async def test_each_call_gets_its_text_only(listener: Listener) -> None:
    (first, heard), (second, also_heard) = listener.call(), listener.call()
    await listener.tell(
        {"call": first, "reasoning": "Hm", "at": 0},
        text(second, "two", 0),
        {"call": first, "text": "one", "at": 0},
        {"call": first, "tool": "look"},
        {"call": first, "end": "stop", "usage": None},
        text("0" * 32, "another's", 0),
    )
    assert (heard, also_heard) == (["one"], ["two"])


async def test_odd_lines_are_passed_over(listener: Listener) -> None:
    call, heard = listener.call()
    odd = [
        {},
        {"call": None},
        {"content": 7, "at": 0},
        {"content": "b"},
        {"content": "b", "at": "0"},
    ]
    await listener.tell(*({"call": call, **each} for each in odd), text(call, "a", 0))
    assert heard == ["a"]


async def test_text_told_twice_is_passed_on_once(listener: Listener) -> None:
    call, heard = listener.call()
    told = [("ab", 0), ("ab", 0), ("b", 1), ("abc", 0), ("bcd", 1), ("a", 0), ("e", 4)]
    await listener.tell(*(text(call, *each) for each in told))
    assert heard == ["ab", "c", "d", "e"]


async def test_a_gap_ends_the_hearing_of_its_call_only(listener: Listener) -> None:
    (first, heard), (second, also_heard) = listener.call(), listener.call()
    await listener.tell(text(first, "a", 0), text(second, "a", 0))
    await listener.tell(text(first, "c", 2), text(second, "b", 1), text(first, "d", 3))
    assert (heard, also_heard) == (["a"], ["a", "b"])


async def test_a_broken_channel_is_opened_again(listener: Listener) -> None:
    call, heard = listener.call()
    await listener.tell(text(call, "a", 0))
    for number, end in enumerate([None, b"not JSON\n", b"[1]\n"], 1):
        broken = await listener.opened()
        broken.send(end)
        await until(lambda broken=broken: listener.channels()[-1] is not broken)
        await listener.tell(text(call, "abcd"[number], number))
    assert "".join(heard) == "abcd"
    # An engine knows a client's calls by the id of its channel.
    assert {name for name, _ in listener.server.channels} == {call[:16]}
    assert listener.channel.problem is None
    # All connections but the last one are closed.
    assert [each.is_open for each in listener.channels()] == [False] * 3 + [True]


async def test_the_problem_is_why_nothing_is_heard(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "RETRY_SECONDS", 600.0)
    assert listener.channel.problem is None
    (await listener.opened()).send(b"<html>\n")
    await until(lambda: listener.channel.problem)
    assert "is not an engine's" in f"{listener.channel.problem}"


async def test_a_plain_server_is_asked_once_a_minute(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(hearing, "time", SimpleNamespace(monotonic=lambda: now))
    told, listener.server.told = listener.server.told, None
    for minute in (1, 2):
        for _ in range(3):
            listener.channel.open()
            await anyio.wait_all_tasks_blocked()
        assert len(listener.server.channels) == minute
        assert listener.channel.problem == reasons.UNHEARD
        now += 61.0
    listener.server.told = told
    call, heard = listener.call()
    await listener.tell(text(call, "a", 0))
    assert heard == ["a"] and listener.channel.problem is None


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_closed_channel_leaves_nothing(listener: Listener, is_open: bool) -> None:
    before = asyncio.all_tasks()
    if is_open:
        channel = await listener.opened()
        await until(lambda: channel.is_read)
    else:
        listener.channel.open()
    listener.channel.close()
    listener.channel.open()
    await until(lambda: asyncio.all_tasks() == before)
    assert not any(each.is_open for each in listener.channels())
    assert len(listener.channels()) == is_open


async def test_a_host_that_closes_ends_the_channel(listener: Listener) -> None:
    channel = await listener.opened()
    await listener.host.close()
    assert not channel.is_open


async def test_ids_differ_and_begin_with_the_channels(listener: Listener) -> None:
    await listener.opened()
    ids: list[str] = []
    for _ in range(3):
        with listener.channel.hearing(lambda _: None) as call:
            headers = listener.channel.headers(call)
            name = headers[CALL_HEADER]
            assert headers == {CALL_HEADER: name}
            assert str(uuid.UUID(name)) == name
            ids.append(name.replace("-", ""))
    ((channel, _),) = listener.server.channels
    assert len(channel) == 16 and {each[:16] for each in ids} == {channel}
    assert len(set(ids)) == 3
    assert CallChannel(listener.channel.engine, listener.host)._id != channel


async def test_text_after_its_calls_end_is_dropped(listener: Listener) -> None:
    call, heard = listener.call()
    await listener.tell(text(call, "a", 0))
    listener.calls.close()
    other, also_heard = listener.call()
    await listener.tell(text(call, "b", 1), text(other, "c", 0))
    assert (heard, also_heard) == (["a"], ["c"])


async def test_a_threads_call_is_heard_in_the_loop(listener: Listener) -> None:
    pieces: list[str] = []
    channel, loop = await listener.opened(), asyncio.get_running_loop()

    def hear(piece: str) -> None:
        assert asyncio.get_running_loop() is loop
        pieces.append(piece)

    def call() -> None:
        with listener.channel.hearing(hear) as call_id:
            for at, word in enumerate("ab"):
                channel.tell(text(call_id, word, at))
            anyio.from_thread.run(until, lambda: channel.is_read)

    await anyio.to_thread.run_sync(call)
    assert pieces == ["a", "b"]
