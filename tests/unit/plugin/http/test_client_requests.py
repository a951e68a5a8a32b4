"""Clients' requests and the plugin's routes, with a fake engine."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import HTTPException
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.http import bodies, client_requests, rendering
from flashmoa_sglang.http.api import Api
from flashmoa_sglang.http.bodies import PromptReader
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import PromptTooLarge, TooManyStreams
from flashmoa_sglang.http.stream import PromptStream, Terms
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.sglang.releases import RELEASE, Release0512
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.http.fakes import FakeEngine, generation, open_stream

TOKEN = {"text": "a", "meta_info": {"finish_reason": None, "completion_tokens": 1}}


def http_request(**hints: object) -> Any:
    """Make the request of a client that stays connected."""
    is_disconnected = AsyncMock(return_value=False)
    return SimpleNamespace(
        _json=hints, state=SimpleNamespace(), headers={}, is_disconnected=is_disconnected
    )


def ended_stream(table: StreamTable, ids: Sequence[int], **fields: Any) -> PromptStream:
    """Open a stream of token ids that has ended, unless the fields say otherwise."""
    return open_stream(table, ids=ids, **{"ended_at": 1.0, **fields})


def buffered_stream(table: StreamTable, tokens: list[int], **fields: Any) -> PromptStream:
    """Open a stream of text with these tokens. The last token is not certain."""
    certain = tokens[:-1]
    buffer: Any = SimpleNamespace(certain_tokens=len(certain), tokens=array("q", certain))
    buffer.encode_piece, buffer.whole_text = lambda *_: tokens, ""
    buffer.snapshot = lambda: buffer
    stream = PromptStream(9, buffer, **fields)
    table._open[stream.id] = stream
    return stream


def refusal(status: int, tokens: int = 0) -> dict[str, Any]:
    reason = {"type": "abort", "status_code": status, "message": "no"}
    return {"text": "", "meta_info": {"finish_reason": reason, "completion_tokens": tokens}}


async def send(
    table: StreamTable,
    stream: str,
    *outcomes: Exception | dict[str, Any],
    prompt: dict[str, Any] | None = None,
    **hints: Any,
) -> Any:
    """Send a stream's final request to an engine, which answers with ``outcomes``.

    Return the request that the engine gets.
    """

    async def answer(*_: object) -> AsyncGenerator[dict[str, Any]]:
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome

    fields = {"sampling_params": {}, "stream": True, "routed_dp_rank": None, "rid": None}
    body = generation(None, **fields, **(prompt or {"input_ids": [*range(10)]}))
    manager = SimpleNamespace(flashmoa_table=table, mm_processor=None)
    request = http_request(prompt_stream_id=stream, **hints)
    client_requests.current.set(None)
    with suppress(ValueError, HTTPException):
        async for _ in client_requests.generate_request(answer, manager, body, request):
            pass
    return body


@pytest.mark.parametrize(
    ("outcomes", "stays"),
    [
        ([ValueError("too long")], True),
        ([HTTPException(503, "The request queue is full.")], True),
        ([HTTPException(500, "A bug.")], False),
        # A streamed answer tells of a refusal as its only output.
        ([refusal(400)], True),
        ([refusal(503)], True),
        ([refusal(500)], False),
        ([TOKEN, refusal(503, tokens=1)], False),
        ([TOKEN], False),
    ],
)
async def test_refused_request_does_not_use_up_its_stream(
    table: StreamTable, outcomes: list[Exception | dict[str, Any]], stays: bool
) -> None:
    stream = open_stream(table)
    await send(table, stream.id, *outcomes)
    assert (stream.closed, stream.claimed) == ((None, False) if stays else ("used", True))
    if stays:
        await send(table, stream.id, TOKEN)
    assert stream.closed == "used"


async def test_a_request_learns_the_saved_time(engine: FakeEngine, table: StreamTable) -> None:
    saved: list[float | None] = []
    for costs in (engine.costs, Costs(((10, 0.1), (110, 1.1)), decode_step=0.01)):
        engine.costs = costs
        stream = open_stream(table)
        stream.computed = 50
        request = client_requests.StreamRequest(table, stream.id)
        request.annotate({"meta_info": {"prompt_tokens": 80, "cached_tokens": 60}})
        assert request.usage is not None
        saved.append(request.usage["prompt_stream"]["saved_seconds"])
    # 20 tokens are computed with the request, and would be 70; nothing is known unless measured.
    assert saved == [None, pytest.approx(0.5)]


async def test_a_pinned_stream_replaces_a_named_one_that_is_gone(table: StreamTable) -> None:
    named = open_stream(table, ids=range(5))
    for other in (named.id, named.id, "unknown"):
        pinned = ended_stream(table, [*range(5)], pinned_from=2)
        is_open = named.closed is None
        answer = {"text": "", "meta_info": {"prompt_tokens": 10, "cached_tokens": 5}}
        await send(table, other, answer)
        used = answer["meta_info"]["prompt_stream"]
        assert (used["id"], used["status"]) == (named.id if is_open else pinned.id, "hit")
        assert (named.closed, pinned.closed, pinned.claimed) == ("used", "used", not is_open)
    # A stream of another client is not taken.
    others = ended_stream(table, [*range(5)])
    await send(table, named.id, answer := {"text": "", "meta_info": {**answer["meta_info"]}})
    assert answer["meta_info"]["prompt_stream"]["status"] == "used" and others.closed is None


async def test_an_ended_stream_is_not_used(table: StreamTable) -> None:
    stream = open_stream(table)
    request = client_requests.StreamRequest(table, stream.id)
    table.close(stream, "expired")
    request.use(generation([1], routed_dp_rank=None), multimodal=False)
    assert request.status == "expired" and not stream.claimed


@pytest.mark.parametrize(
    ("enabled", "low_first", "priority"), [(False, False, None), (True, False, 5), (True, True, -5)]
)
def test_larger_priorities_are_urgent(enabled: bool, low_first: bool, priority: int | None) -> None:
    arguments = SimpleNamespace(
        enable_priority_scheduling=enabled, schedule_low_priority_values_first=low_first
    )
    engine: Any = SimpleNamespace(_arguments=arguments)
    assert Engine.own_priority(engine, 5) == priority


@pytest.mark.parametrize(
    ("role", "why", "request_", "says"),
    [
        ("prefill", None, lambda: generation([1]), "one of a PD pair"),
        (None, "It keeps no KV", lambda: generation([1]), "no prompt can be warmed"),
        (None, None, lambda: generation([[1], [2]]), "one by one"),
        (None, None, lambda: generation(None, text=["a", "b"]), "one by one"),
        (None, None, lambda: generation([1], sampling_params={"n": 2}), "one by one"),
    ],
    ids=["pair", "no KV", "batch", "texts", "answers"],
)
async def test_what_cannot_be_prewarmed_is_refused(
    role: str, why: str | None, request_: Callable[[], Any], says: str
) -> None:
    engine = SimpleNamespace(role=role, why_no_kv=lambda: why)
    manager = SimpleNamespace(flashmoa_table=SimpleNamespace(engine=engine))
    outputs = client_requests.prewarm(pytest.fail, manager, request_(), None, 60)
    with pytest.raises(ValueError, match=says):
        await anext(outputs)


@pytest.mark.parametrize("role", [None, "prefill"])
async def test_prewarming_uses_the_stream(engine: Any, table: StreamTable, role: str) -> None:
    engine.role, engine.why_no_kv = role, lambda: None
    stream = open_stream(table, ids=range(5))
    warm = {"meta_info": {**TOKEN["meta_info"], "prompt_tokens": 10, "cached_tokens": 5}}
    chat: dict[str, Any] = {"messages": [], "prompt_cache_options": {"prewarm": True}}
    sent = await send(table, stream.id, warm, **chat)
    # The scheduler makes no more increments of a stream whose request has come.
    assert role is not None or client_requests.has_stream(sent)
    # An engine that refuses to prewarm leaves it.
    assert stream.closed == ("used" if role is None else None)
    assert ("prompt_stream" in warm["meta_info"]) == (role is None)


async def test_a_text_with_too_many_characters_is_refused() -> None:
    engine: Any = SimpleNamespace(max_prompt_tokens=10, tokenizer=SimpleNamespace(prefix=[]))
    renderer: Any = None
    message = "has 31 characters; this server takes at most 10 tokens"
    with pytest.raises(PromptTooLarge, match=message):
        await PromptReader(engine, renderer, 3).tokenize(bodies.Prompt(text="a" * 31))


@pytest.mark.parametrize("packs_items", [False, True])
def test_scoring_is_no_capability_where_sglang_scores(packs_items: bool) -> None:
    engine: Any = SimpleNamespace(role=None, packs_items=packs_items, why_no_kv=lambda: None)
    table: Any = SimpleNamespace(limits=SimpleNamespace(characters_per_token=3))
    renderer: Any = None
    capabilities = Api(engine, table, renderer)._capabilities()
    assert ("scoring" in capabilities) == (not packs_items)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def may_be_its_own(prompt: list[int], stream: PromptStream) -> int:
    """Return, token by token, what `PromptStream.agrees_with` should."""
    pairs = zip(prompt, stream.ids, strict=False)
    agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if stream.pinned_from is None:
        return agreed if stream.ended_at is not None and agreed == len(stream.ids) else 0
    return agreed if agreed > stream.pinned_from else 0


@given(
    prompt=PROMPTS,
    streams=st.lists(
        st.tuples(PROMPTS, *[st.booleans()] * 3, st.none() | st.integers(1, 5)), max_size=4
    ),
)
async def test_a_prompt_finds_its_stream(prompt: list[int], streams: list[Any]) -> None:
    table = StreamTable(FakeEngine())  # type: ignore[arg-type]
    expected, most = None, 0
    for ids, ended, claimed, salted, pinned_from in streams:
        stream = ended_stream(
            table,
            ids,
            terms=Terms(cache_salt="salt" if salted else None),
            ended_at=1.0 if ended or pinned_from else None,
            pinned_from=min(pinned_from, len(ids)) if pinned_from else None,
            claimed=claimed,
        )
        agreed = may_be_its_own(prompt, stream)
        if agreed > most and not (claimed or salted):
            expected, most = stream, agreed
    found = client_requests.find_by_prompt(table, generation(prompt), array("q", prompt))
    assert (found.stream_id if found else None) == (expected.id if expected else None)
    for stream in list(table._open.values()):
        table.close(stream, "deleted")


@pytest.mark.parametrize(
    "request_",
    [
        generation([[1, 2, 3]]),
        generation(None, text="1 2 3"),
        generation([1, 2, 3], session_params={"id": "s"}),
        generation([1, 2, 3], image_data=["cat.png"]),
        generation([1, 2, 3], extra_key="other"),
    ],
    ids=["batch", "text", "session", "picture", "namespace"],
)
async def test_more_than_tokens_finds_no_stream(table: StreamTable, request_: Any) -> None:
    ended_stream(table, [1, 2])

    def find(obj: Any) -> Any:
        obj.stream = True
        return client_requests.find_by_prompt(table, obj, client_requests.sent_tokens(obj))

    assert find(generation([1, 2, 3])) is not None
    assert find(request_) is None


@pytest.mark.parametrize("ids", [[2**63], [-(2**70), 1], ["x"]])
def test_ids_of_no_vocabulary_are_left_to_sglang(ids: list[Any]) -> None:
    assert client_requests.sent_tokens(generation(ids)) is None


@pytest.mark.parametrize(
    ("prompts", "used", "sent"),
    [
        ({"input_ids": [[0, 1, 2, 9]]}, True, {"input_ids": [[0, 1, 2, 9]]}),
        ({"text": ["one"]}, True, {"text": None, "input_ids": [[0, 1, 2]]}),
        pytest.param(
            *({"text": ["one"], "cache_salt": ["salt"]}, True, {"input_ids": [[0, 1, 2]]}),
            marks=pytest.mark.skipif(
                isinstance(RELEASE, Release0512), reason="/generate of this release has no salt"
            ),
        ),
        ({"text": ["one", "two"]}, False, {"text": ["one", "two"]}),
        ({"input_ids": [[0, 1, 2], [0, 1, 2]]}, False, {"input_ids": [[0, 1, 2], [0, 1, 2]]}),
        # SGLang computes the tokens, and reads no text.
        ({"text": "one", "input_ids": [0, 1, 2]}, True, {"text": "one", "input_ids": [0, 1, 2]}),
    ],
)
async def test_a_list_of_one_prompt_uses_its_stream(
    table: StreamTable, prompts: dict[str, Any], used: bool, sent: dict[str, Any]
) -> None:
    terms = Terms(cache_salt="salt" if "cache_salt" in prompts else None)
    stream = buffered_stream(table, [0, 1, 2], terms=terms)
    if "text" not in prompts:
        stream.buffer = None
    meta: dict[str, Any] = {"prompt_tokens": 4, "cached_tokens": 3}
    output = {"text": "", "meta_info": meta}
    body = await send(table, stream.id, output, prompt=prompts)
    assert (stream.closed == "used") == used
    assert {name: getattr(body, name) for name in sent} == sent
    assert meta.get("prompt_stream", {}).get("status") == ("hit" if used else None)


@pytest.mark.parametrize(
    ("prompt", "end", "is_its_own"),
    [([1, 2, 3, 4], [3], True), ([1, 2, 3, 4], [4], False), ([1, 3, 2], [3], False)],
)
async def test_a_request_may_overtake_its_streams_end(
    table: StreamTable, prompt: list[int], end: list[int], is_its_own: bool
) -> None:
    stream = ended_stream(table, [1, 2], ended_at=None)
    figures = {"cached_tokens": 2, "prompt_tokens": len(prompt), "finish_reason": None}
    refused = refusal(503)

    async def answer() -> AsyncGenerator[dict[str, Any]]:
        yield {"meta_info": dict(figures)}
        yield refused
        yield {"meta_info": dict(figures)}

    outputs = client_requests.watch_for_end(answer(), table, generation(prompt), array("q", prompt))
    await anext(outputs)
    assert stream.closed is None
    await table.append(stream, 0, end, end=True)
    # A refused request leaves the stream to the next one.
    assert await anext(outputs) == refused and stream.closed is None and not stream.claimed
    (last,) = [output async for output in outputs]
    assert stream.closed == ("used" if is_its_own else None)
    found = table.take_figures(stream.id)
    assert (found and found["prompt_stream"]["status"]) == ("hit" if is_its_own else None)
    assert table.take_figures(stream.id) is None
    # Its answer has no fields that other answers have not.
    assert last == {"meta_info": figures}


class Tokens(array):  # type: ignore[type-arg]
    """Tokens that refuse to be compared as a whole."""

    def __getitem__(self, place: Any) -> Any:
        assert not isinstance(place, slice)
        return super().__getitem__(place)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_mark_leaves_a_clients_own_params(is_list: bool) -> None:
    own = {"max_new_tokens": 1, "custom_params": {"mine": [1, "two"]}}
    asked, mark = generation([5], sampling_params=[own] if is_list else own), RequestMark("a")
    client_requests.put_mark(asked, mark)
    params = asked.sampling_params[0] if is_list else asked.sampling_params
    assert params == own | {"custom_params": {"mine": [1, "two"], **mark.to_custom_params()}}
    assert own["custom_params"] == {"mine": [1, "two"]}


def test_one_token_tells_that_a_stream_is_no_prompt() -> None:
    long = PromptStream(ttl_seconds=9, buffer=None, ids=Tokens("q", [1, 2, 3]))
    assert not any(long.may_become(array("q", prompt)) for prompt in ([1, 2], [1, 2, 4, 5]))
    stream = PromptStream(ttl_seconds=9, buffer=None)
    assert not stream.may_become(array("q", [1]))
    stream.ids.extend([1, 2, 3])
    prompts = [1, 2, 3], [1, 2, 3, 4], [1, 0, 3]
    assert [stream.may_become(array("q", prompt)) for prompt in prompts] == [True, True, False]


async def test_a_thread_without_context_takes_the_streams_tokens(table: StreamTable) -> None:
    """As SGLang makes prompts since 0.5.22; another chat in the same thread has its own tokens."""
    tokenizer: Any = SimpleNamespace(encode=lambda *_, **__: [0])
    stream = buffered_stream(table, [7, 8])

    def process(_chat: object, text: str, _is_multimodal: bool) -> list[int]:
        return rendering.encode_chat(lambda tokenizer, *_: tokenizer.encode(), tokenizer, text)

    def convert(chat: object, text: str, _request: object) -> list[int]:
        ids = rendering.note_served(process, chat, text, is_multimodal=False)
        assert rendering.served.get() is None
        return ids

    linked, other = http_request(prompt_stream_id=stream.id), http_request()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        for request, expected in ((linked, [7, 8]), (other, [0]), (linked, [7, 8])):
            client_requests.bind(table, request)
            ids = await loop.run_in_executor(
                thread, client_requests.convert_chat, convert, None, "text", request
            )
            assert ids == expected
    client_requests.current.set(None)


async def test_sglang_keeps_no_tokens_of_rendered_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so for models of pictures, and would take none for the prompt of a later request."""
    kept: list[bool] = []

    def process(_chat: object, _request: object, is_multimodal: bool) -> None:
        kept.append(is_multimodal)
        tokenizer.encode("A prompt.")

    tokenizer: Any = SimpleNamespace(encode=lambda *_, **__: [0], apply_chat_template=None)
    # SGLang would be imported.
    monkeypatch.setattr(RELEASE, "prepare_tokenizer", lambda _: None)
    rendering.wrap_encode(tokenizer)
    with rendering._recording() as rendered:
        rendering.note_served(process, None, "of /render_response", True)
    assert rendered.text == "A prompt." and rendering.served.get() is None
    rendering.note_served(process, None, "of a client", is_multimodal=True)
    assert kept == [False, True] and rendering.served.get() == "of a client"
    rendering.served.set(None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_sglang_still_encodes_long_chats_in_parallel(model: Path) -> None:
    if RELEASE.CHAT_ENCODER is None:
        pytest.skip("this SGLang encodes chats in one piece")
    pytest.importorskip("torch")
    RELEASE.prepare_import()
    from sglang.srt.entrypoints.openai.parallel_prompt_encode import _plan_for
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rendering.wrap_encode(tokenizer)
    assert "encode" in vars(tokenizer) and _plan_for(tokenizer) is not None


async def test_a_pinned_stream_yields_to_a_clients_at_the_limit(table: StreamTable) -> None:
    pinned = [ended_stream(table, [], pinned_from=1) for _ in range(2)]
    for _ in range(table.limits.streams):
        open_stream(table)
    assert [stream.closed for stream in pinned] == ["expired", "expired"]
    with pytest.raises(TooManyStreams):
        open_stream(table)
