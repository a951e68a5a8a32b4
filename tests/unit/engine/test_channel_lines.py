"""Test reading what an engine tells on a channel."""

import json
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import EngineClient, errors
from flashmoa.engine.generation import read_lines

URL, CHANNEL = "http://engine:30000", "0123456789abcdef"


class Pieces(httpx.AsyncByteStream):
    """Is an answer in pieces; an exception among them ends it."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self.is_closed = True


Answer = Callable[..., list[httpx.Request]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Have all requests answered so; return them."""

    def answer(status: int, **content: Any) -> list[httpx.Request]:
        async def handle(_: object, request: httpx.Request) -> httpx.Response:
            seen.append(request)
            return httpx.Response(status, **content)

        seen: list[httpx.Request] = []
        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        return seen

    return answer


async def hear(**more: Any) -> list[dict[str, Any]]:
    async with EngineClient(URL, **more) as engine, engine.hear(CHANNEL) as lines:
        return [line async for line in lines]


# U+2028 and others end a line for Python, but not in JSON.
TEXTS = st.text(st.sampled_from("a\u00e9\u2028\u2029\u0085\x0b\x0c\r\n\U0001f98a"), max_size=5)
LINES = st.lists(st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=3), max_size=4)


@given(
    told=LINES,
    end=st.sampled_from(["\n", "\r\n", "\n\n\n", "\n \n"]),
    is_ascii=st.booleans(),
    data=st.data(),
)
def test_lines_are_read_however_they_are_cut(
    told: list[dict[str, Any]], end: str, is_ascii: bool, data: st.DataObject
) -> None:
    sent = "".join(json.dumps(each, ensure_ascii=is_ascii) + end for each in told).encode()
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=9))
    pieces = [sent[a:b] for a, b in pairwise(sorted([0, *cuts, len(sent)]))]

    async def read() -> list[dict[str, Any]]:
        return [line async for line in read_lines(httpx.Response(200, stream=Pieces(*pieces)))]

    assert anyio.run(read) == told


async def test_each_line_is_told_when_it_has_ended() -> None:
    passed: list[dict[str, Any]] = []
    known: list[int] = []

    class Counted(Pieces):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in super().__aiter__():
                known.append(len(passed))
                yield piece

    sent = Counted(b'{"a": 1}\n{"b"', b": 2}", b"\n", b'{"cut": ')
    async for line in read_lines(httpx.Response(200, stream=sent)):
        passed += [line]
    assert passed == [{"a": 1}, {"b": 2}] and known == [0, 1, 1, 2]


@pytest.mark.parametrize("odd", [b"[1]", b"null", b"7", b"{", b"<html>", b"[" * 100_000])
async def test_a_line_that_is_no_object_is_no_engines(odd: bytes, answer: Answer) -> None:
    stream = Pieces(b'{"listening": true}\n' + odd + b"\n", b'{"more": 1}\n')
    answer(200, stream=stream)
    async with EngineClient(URL) as engine:
        with pytest.raises(errors.BadAnswer, match=f"{URL}/flashmoa/calls is not an engine's"):
            async with engine.hear(CHANNEL) as lines:
                assert await anext(lines) == {"listening": True}
                await anext(lines)
        assert stream.is_closed


async def test_a_channel_is_asked_for_by_its_id(answer: Answer) -> None:
    seen = answer(200, stream=Pieces(b'{"a": 1}\n'))
    assert await hear(headers={"authorization": "Bearer key"}) == [{"a": 1}]
    (request,) = seen
    assert (request.method, request.url.path) == ("GET", "/flashmoa/calls")
    assert request.headers["X-FlashMoA-Channel"] == CHANNEL
    assert request.headers["authorization"] == "Bearer key"
    # An engine tells at least every 5 s that the channel is open.
    assert 5.0 < request.extensions["timeout"]["read"] < 60.0


REFUSED = {"error": {"message": "no", "code": "engine_failed"}}


@pytest.mark.parametrize(
    ("status", "answered", "kind"),
    [
        (404, {"detail": "Not Found"}, errors.PluginMissing),
        (500, REFUSED, errors.RequestRefused),
        (200, httpx.ReadError("reset"), errors.EngineUnreachable),
        (200, httpx.ReadTimeout("silent"), errors.EngineTimeout),
    ],
)
async def test_a_refused_broken_or_silent_channel_raises(
    status: int, answered: Any, kind: type[errors.EngineError], answer: Answer
) -> None:
    if status == 200:
        answer(200, stream=(stream := Pieces(b'{"a": 1}\n', answered)))
    else:
        answer(status, json=answered)
    with pytest.raises(kind):
        await hear()
    assert status != 200 or stream.is_closed


async def test_leaving_a_channel_closes_its_connection(answer: Answer) -> None:
    stream = Pieces(*[b'{"a": 1}\n'] * 3)
    answer(200, stream=stream)
    async with EngineClient(URL) as engine:
        async with engine.hear(CHANNEL) as lines:
            await anext(lines)
        assert stream.is_closed


@pytest.mark.parametrize("is_chat", [False, True])
async def test_what_a_reader_raises_is_not_translated(is_chat: bool, answer: Answer) -> None:
    kind = "text/event-stream" if is_chat else "application/x-ndjson"
    sent = Pieces(b"data: {}\n\n" if is_chat else b"{}\n")
    answer(200, headers={"content-type": kind}, stream=sent)
    async with EngineClient(URL) as engine:
        with pytest.raises(httpx.ConnectError, match="its own"):
            async with engine.chat([]) if is_chat else engine.hear(CHANNEL) as items:
                async for _ in items:
                    raise httpx.ConnectError("its own")
    assert sent.is_closed
