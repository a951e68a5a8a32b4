"""Long texts: they are tokenised once, no further than is certain, and beside other requests."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.bodies import PromptReader
from flashmoa_sglang.http.errors import MalformedRequest, PromptTooLarge, StreamGone
from flashmoa_sglang.http.rendering import Piece, RenderedPrompt
from flashmoa_sglang.http.scoring.questions import Question
from flashmoa_sglang.http.scoring.routes import ScoringApi
from flashmoa_sglang.http.stream import PromptStream
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.http.tokens.token_buffer import LONG_TEXT, TokenBuffer

from tests.unit.plugin.http.tokens.families import SCRIPTS, canonical
from tests.waiting import until

ROOM = 20_000
CHARACTERS_PER_TOKEN = 64
BEGINNING, END = "Once upon a time, ", "there was a king."


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

    def take(self) -> int:
        """Return the number of characters since the last call."""
        characters, self.characters = self.characters, 0
        return characters

    async def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Return the task of work once it tokenises a long text. The text goes on later."""
        self.came.clear()
        self.goes_on.clear()
        task = asyncio.create_task(work)
        await until(self.came.is_set)
        return task


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    tokenizer = canonical("smollm-like")
    counter, windows = Counter(tokenizer._encode), tokenizer.encode_window

    def encode_window(text: str, start: int, end: int, anchored: bool) -> Any:
        counter.characters += end - start
        return windows(text, start, end, anchored)

    monkeypatch.setattr(tokenizer, "_encode", counter)
    monkeypatch.setattr(tokenizer, "encode_window", encode_window)
    return counter


@pytest.fixture
def reader(engine: Any) -> PromptReader:
    engine.max_prompt_tokens, engine.vocabulary = ROOM, 10_000
    engine.tokenizer, engine.max_queued_requests = canonical("smollm-like"), None
    renderer: Any = SimpleNamespace()
    return PromptReader(engine, renderer, CHARACTERS_PER_TOKEN)


@pytest.fixture
def api(engine: Any, reader: PromptReader, table: StreamTable) -> ScoringApi:
    renderer: Any = SimpleNamespace()
    return ScoringApi(engine, reader, renderer, table)


@pytest.fixture
def stream() -> PromptStream:
    return PromptStream(60.0, TokenBuffer(canonical("smollm-like"), add_special_tokens=False))


def text_of(characters: int, script: str = "english") -> str:
    return (SCRIPTS[script] * (characters // len(SCRIPTS[script]) + 1))[:characters]


def encode(text: str) -> list[int]:
    return canonical("smollm-like").encode(text)


async def test_long_candidates_count_for_each_item(api: ScoringApi, engine: Any) -> None:
    """They are tokenised, and kept, for each item."""
    engine.require_prefills = lambda: None
    candidates = [f"{number}{'y' * 4000}" for number in range(100)]
    body = {"query": "q", "items": ["x"] * 10_000, "candidates": candidates}
    request: Any = SimpleNamespace(body=AsyncMock(return_value=json.dumps(body).encode()))
    with pytest.raises(MalformedRequest, match="characters in their prompts together"):
        await api.score(request)


# The most characters that are tokenised to know that a text is too long.
ENOUGH = 1.1 * len(text_of(4 * ROOM)) + 2 * LONG_TEXT
LONG, MEDIUM = text_of(CHARACTERS_PER_TOKEN * ROOM - 99), text_of(3 * LONG_TEXT)


async def read_head(text: str, reader: PromptReader, **_: Any) -> None:
    """Read a chat that the model continues. The chat is encoded apart from the answer."""
    pieces = RenderedPrompt([Piece(text, False), Piece("Yes", True)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "render", lambda _: pieces)
        await reader.new_buffer(bodies.Prompt(messages=[]))


async def test_long_prompts_are_tokenised_to_their_limit(
    reader: PromptReader, counter: Counter
) -> None:
    with pytest.raises(PromptTooLarge, match=f"at least .* takes at most {ROOM}"):
        await reader.tokenize(bodies.Prompt(text=text_of(CHARACTERS_PER_TOKEN * ROOM)))
    assert 0 < counter.take() < ENOUGH
    with pytest.raises(PromptTooLarge):
        await read_head(LONG, reader)
    assert 0 < counter.take() < ENOUGH


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("script", ["english", "thai", "digits"])
async def test_long_pieces_are_tokenised_to_their_limit(
    table: StreamTable, stream: PromptStream, counter: Counter, script: str
) -> None:
    await table.append(stream, 0, BEGINNING, end=False)
    known = list(stream.known())
    for end in (False, True):
        counter.take()
        with pytest.raises(PromptTooLarge, match="was not added"):
            await table.append(stream, 1, text_of(len(LONG), script), end)
        assert 0 < counter.take() < ENOUGH
    # The stream is as it was before, and goes on.
    assert list(stream.known())[: len(known)] == known
    await table.append(stream, 1, END, end=True)
    assert list(stream.ids) == encode(BEGINNING + END)


async def test_an_allowed_text_is_tokenised_once(
    reader: PromptReader, table: StreamTable, stream: PromptStream, counter: Counter
) -> None:
    text = text_of(3 * ROOM)
    whole = await reader.tokenize(bodies.Prompt(text=text))
    assert len(text) <= counter.take() < 1.01 * len(text)
    await table.append(stream, 0, text, end=True)
    assert len(text) <= counter.take() < 1.01 * len(text)
    assert list(stream.ids) == whole == encode(text)


async def test_lists_are_tokenised_once_and_to_the_limit(api: ScoringApi, counter: Counter) -> None:
    shared, names = text_of(2 * ROOM), ["items[0]", "items[1]"]
    texts = [shared + item for item in (" One two. ", " Three four. ")]
    prompts = [bodies.Prompt(text=text) for text in texts]
    ids = await api._tokenize(prompts, names)
    assert len(shared) < counter.take() < 1.01 * len(shared)
    assert [list(each) for each in ids] == [encode(text) for text in texts]
    counter.take()
    long = bodies.Prompt(text=text_of(CHARACTERS_PER_TOKEN * ROOM))
    with pytest.raises(PromptTooLarge, match=r"items\[1\]"):
        await api._tokenize([prompts[0], long], names)
    assert 0 < counter.take() < ENOUGH + len(shared)


WORKS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "prompt": lambda text, reader, **_: reader.tokenize(bodies.Prompt(text=text)),
    "beginning": read_head,
    "stream": lambda text, table, stream, **_: table.add_text(stream, text),
    "append": lambda text, table, stream, **_: table.append(stream, 0, text, end=True),
    "list": lambda text, api, **_: api._tokenize([bodies.Prompt(text=text)], ["items[0]"]),
    "document": lambda text, api, **_: api._cut([text], len(text) // 8),
    "candidate": lambda text, api, **_: api._read_answers(Question("items", [], [text]), [5, 6]),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
async def test_requests_go_on_while_a_text_is_tokenised(
    api: ScoringApi, table: StreamTable, stream: PromptStream, counter: Counter, work: Any
) -> None:
    """The tokenizer waits for the other request here: without a thread, for ever."""
    other = PromptStream(60.0, TokenBuffer(canonical("smollm-like"), add_special_tokens=False))
    doing = work(text=MEDIUM, reader=api._reader, table=table, api=api, stream=stream)
    task = await counter.begin(doing)
    await table.append(other, 0, "Meanwhile. ", end=False)
    assert not task.done()
    counter.goes_on.set()
    await task


@pytest.mark.usefixtures("reader")
async def test_pieces_keep_their_order_while_one_waits(
    table: StreamTable, stream: PromptStream, counter: Counter
) -> None:
    table.open(stream)
    first = await counter.begin(table.append(stream, 0, MEDIUM, end=False))
    # A client that has waited for long sends the first piece again.
    again = asyncio.create_task(table.append(stream, 0, MEDIUM, end=False))
    last = asyncio.create_task(table.append(stream, 1, END, end=True))
    # It does not expire while it grows.
    stream.deadline = 0.0
    table._expire(1.0)
    assert stream.closed is None and stream.known_tokens() == 0
    counter.goes_on.set()
    await asyncio.gather(first, again, last)
    assert list(stream.ids) == encode(MEDIUM + END)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("ending", ["closed", "claimed", "cancelled"])
async def test_a_stream_used_while_a_piece_waits_is_the_same(
    table: StreamTable, stream: PromptStream, counter: Counter, ending: str
) -> None:
    await table.append(stream, 0, BEGINNING, end=False)
    table.open(stream)
    before = list(stream.known())
    task = await counter.begin(table.append(stream, 1, MEDIUM, end=False))
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
        await table.append(stream, 1, END, end=True)
        assert list(stream.ids) == encode(BEGINNING + END)
