"""Long texts: they are tokenised once, no further than is certain, and beside other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.bodies import PromptReader
from flashmoa_sglang.http.errors import PromptTooLarge, StreamGone
from flashmoa_sglang.http.rendering import Piece, RenderedPrompt
from flashmoa_sglang.http.scoring.questions import Question
from flashmoa_sglang.http.scoring.routes import ScoringApi
from flashmoa_sglang.http.stream import PromptStream
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.http.tokens.token_buffer import (
    LONG_TEXT,
    CanonicalTokenizer,
    TokenBuffer,
)

from tests.unit.plugin.http.fake_engine import FakeEngine
from tests.unit.plugin.http.tokens.test_token_buffer import SCRIPTS, smollm_like

ROOM = 20_000
CHARACTERS_PER_TOKEN = 64


@pytest.fixture(scope="module")
def shared_tokenizer() -> CanonicalTokenizer:
    return CanonicalTokenizer(smollm_like())


class Counter:
    """Counts the characters that a tokenizer gets, and may stop it until it may go on.

    Attributes:
        came: is set when a long text comes.
        goes_on: long texts wait for it.
    """

    def __init__(self, encode: Callable[..., list[int]]) -> None:
        self._encode = encode
        self.characters = 0
        self.came, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def __call__(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        if len(text) > LONG_TEXT // 2:
            self.came.set()
            assert self.goes_on.wait(60)
        return self._encode(text, **options)


@pytest.fixture
def counter(shared_tokenizer: CanonicalTokenizer, monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(shared_tokenizer._encode)
    monkeypatch.setattr(shared_tokenizer, "_encode", counter)
    windows = shared_tokenizer.encode_window

    def encode_window(text: str, start: int, end: int, anchored: bool) -> Any:
        counter.characters += end - start
        return windows(text, start, end, anchored)

    monkeypatch.setattr(shared_tokenizer, "encode_window", encode_window)
    return counter


@pytest.fixture
def engine(shared_tokenizer: CanonicalTokenizer) -> Any:
    engine: Any = FakeEngine()
    engine.max_prompt_tokens, engine.tokenizer, engine.vocabulary = ROOM, shared_tokenizer, 10_000
    return engine


@pytest.fixture
async def table(engine: Any) -> StreamTable:
    return StreamTable(engine)


@pytest.fixture
def reader(engine: Any) -> PromptReader:
    renderer: Any = SimpleNamespace()
    return PromptReader(engine, renderer, CHARACTERS_PER_TOKEN)


@pytest.fixture
def api(engine: Any, reader: PromptReader, table: StreamTable) -> ScoringApi:
    renderer: Any = SimpleNamespace()
    engine.max_queued_requests = None
    return ScoringApi(engine, reader, renderer, table, lambda _: None)


def new_stream(tokenizer: CanonicalTokenizer) -> PromptStream:
    return PromptStream(60.0, TokenBuffer(tokenizer, add_special_tokens=False))


def text_of(characters: int, script: str = "english") -> str:
    return (SCRIPTS[script] * (characters // len(SCRIPTS[script]) + 1))[:characters]


# The most characters that are tokenised to know that a text is too long.
ENOUGH = 1.1 * len(text_of(4 * ROOM)) + 2 * LONG_TEXT


async def test_a_long_prompt_is_tokenised_to_its_limit(
    reader: PromptReader, counter: Counter
) -> None:
    prompt = bodies.Prompt(text=text_of(CHARACTERS_PER_TOKEN * ROOM))
    with pytest.raises(PromptTooLarge, match=f"at least .* takes at most {ROOM}"):
        await reader.tokenize(prompt)
    assert 0 < counter.characters < ENOUGH


@pytest.mark.parametrize("script", ["english", "thai", "digits"])
async def test_a_long_piece_is_tokenised_to_its_limit(
    table: StreamTable, shared_tokenizer: CanonicalTokenizer, counter: Counter, script: str
) -> None:
    stream = new_stream(shared_tokenizer)
    await table.append(stream, 0, "Once upon a time, ", end=False)
    known = list(stream.known())
    for end in (False, True):
        counter.characters = 0
        with pytest.raises(PromptTooLarge, match="was not added"):
            await table.append(stream, 1, text_of(CHARACTERS_PER_TOKEN * ROOM - 99, script), end)
        assert 0 < counter.characters < ENOUGH
    # The stream is as it was before, and goes on.
    assert list(stream.known())[: len(known)] == known
    await table.append(stream, 1, "there was a king.", end=True)
    assert list(stream.ids) == shared_tokenizer.encode("Once upon a time, there was a king.")


async def test_a_long_beginning_is_tokenised_to_its_limit(
    reader: PromptReader, engine: Any, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat that the model continues is two texts. The first is encoded by itself."""
    pieces = [Piece(text_of(CHARACTERS_PER_TOKEN * ROOM - 99), False), Piece("Yes", True)]
    monkeypatch.setattr(reader, "render", lambda _: RenderedPrompt(pieces))
    with pytest.raises(PromptTooLarge):
        await reader.new_buffer(bodies.Prompt(messages=[]))
    assert 0 < counter.characters < ENOUGH


async def test_an_allowed_text_is_tokenised_once(
    reader: PromptReader,
    table: StreamTable,
    shared_tokenizer: CanonicalTokenizer,
    counter: Counter,
) -> None:
    text = text_of(3 * ROOM)
    whole = await reader.tokenize(bodies.Prompt(text=text))
    assert len(text) <= counter.characters < 1.01 * len(text)
    counter.characters = 0
    stream = new_stream(shared_tokenizer)
    await table.append(stream, 0, text, end=True)
    assert len(text) <= counter.characters < 1.01 * len(text)
    assert list(stream.ids) == whole == shared_tokenizer.encode(text)


async def test_lists_are_tokenised_once_and_to_the_limit(
    engine: Any, api: ScoringApi, counter: Counter
) -> None:
    shared, items = text_of(2 * ROOM), [" One two. ", " Three four. "]
    prompts = [bodies.Prompt(text=shared + item) for item in items]
    ids = await api._tokenize(prompts, ["items[0]", "items[1]"])
    assert len(shared) < counter.characters < 1.01 * len(shared)
    assert [list(each) for each in ids] == [
        engine.tokenizer.encode(shared + item) for item in items
    ]
    counter.characters = 0
    long = bodies.Prompt(text=text_of(CHARACTERS_PER_TOKEN * ROOM))
    with pytest.raises(PromptTooLarge, match=r"items\[1\]"):
        await api._tokenize([prompts[0], long], ["items[0]", "items[1]"])
    assert 0 < counter.characters < ENOUGH + len(shared)


async def begin(counter: Counter, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return the task of work that tokenises a long text, once it does; the text goes on later."""
    counter.came.clear()
    counter.goes_on.clear()
    task = asyncio.create_task(work)
    with anyio.fail_after(30):
        while not counter.came.is_set():  # noqa: ASYNC110 - it is another thread's event
            await anyio.sleep(0.001)
    return task


async def read_head(text: str, reader: PromptReader, **_: Any) -> None:
    pieces = RenderedPrompt([Piece(text, False), Piece("Yes", True)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "render", lambda _: pieces)
        await reader.new_buffer(bodies.Prompt(messages=[]))


WORKS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "prompt": lambda text, reader, **_: reader.tokenize(bodies.Prompt(text=text)),
    "beginning": read_head,
    "stream": lambda text, table, stream, **_: table.add_text(stream, text),
    "append": lambda text, table, stream, **_: table.append(stream, 0, text, end=True),
    "list": lambda text, api, **_: api._tokenize([bodies.Prompt(text=text)], ["items[0]"]),
    "document": lambda text, api, **_: api._cut([text], len(text) // 8),
    "candidate": lambda text, api, **_: api._read_answers(Question("items", [], [text]), [5, 6]),
}


@pytest.mark.parametrize("work", WORKS)
async def test_requests_go_on_while_a_text_is_tokenised(
    reader: PromptReader,
    table: StreamTable,
    api: ScoringApi,
    shared_tokenizer: CanonicalTokenizer,
    counter: Counter,
    work: str,
) -> None:
    """The tokenizer waits for the other request here: without a thread, for ever."""
    stream, other = new_stream(shared_tokenizer), new_stream(shared_tokenizer)
    text = text_of(3 * LONG_TEXT)
    task = await begin(
        counter, WORKS[work](text=text, reader=reader, table=table, api=api, stream=stream)
    )
    await table.append(other, 0, "Meanwhile. ", end=False)
    assert not task.done()
    counter.goes_on.set()
    await task


async def test_pieces_keep_their_order_while_one_waits(
    table: StreamTable, shared_tokenizer: CanonicalTokenizer, counter: Counter
) -> None:
    stream, text = new_stream(shared_tokenizer), text_of(3 * LONG_TEXT)
    table.open(stream)
    first = await begin(counter, table.append(stream, 0, text, end=False))
    # A client that has waited for long sends the first piece again.
    again = asyncio.create_task(table.append(stream, 0, text, end=False))
    last = asyncio.create_task(table.append(stream, 1, "The end.", end=True))
    # It does not expire while it grows.
    stream.deadline = 0.0
    table._expire(1.0)
    assert stream.closed is None and stream.known_tokens() == 0
    counter.goes_on.set()
    await asyncio.gather(first, again, last)
    assert list(stream.ids) == shared_tokenizer.encode(text + "The end.")
    table.close(stream, "deleted")


@pytest.mark.parametrize("ending", ["closed", "claimed", "cancelled"])
async def test_a_stream_used_while_a_piece_waits_is_the_same(
    table: StreamTable, shared_tokenizer: CanonicalTokenizer, counter: Counter, ending: str
) -> None:
    stream = new_stream(shared_tokenizer)
    await table.append(stream, 0, "Once upon a time, ", end=False)
    table.open(stream)
    before, text = list(stream.known()), text_of(3 * LONG_TEXT)
    task = await begin(counter, table.append(stream, 1, text, end=False))
    if ending == "closed":
        table.close(stream, "deleted")
    elif ending == "claimed":
        table.claim(stream)
    else:
        task.cancel()
        await asyncio.wait([task])
    counter.goes_on.set()
    with pytest.raises((StreamGone, asyncio.CancelledError)):
        await task
    assert list(stream.known()) == before and stream.next_seq == 1
    if ending == "cancelled":
        await table.append(stream, 1, "there was a king.", end=True)
        assert list(stream.ids) == shared_tokenizer.encode("Once upon a time, there was a king.")
    table.close(stream, "deleted")
