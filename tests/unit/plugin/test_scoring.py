"""The prompts, candidates and prefills of lists that are scored, without an engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_cpu import torchvision_ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http.errors import CandidateRefused, EngineBusy, MalformedRequest  # noqa: E402
from flashmoa_sglang.http.scoring.answers import ScoreForm  # noqa: E402
from flashmoa_sglang.http.scoring.forwards import ListScorer, PrefillRoom, ScoredPrompt  # noqa: E402
from flashmoa_sglang.http.scoring.questions import (  # noqa: E402
    CandidateTokenizer,
    ClassifyBody,
    RerankBody,
    ScoreBody,
    classify_question,
    document_texts,
    refuse_duplicates,
    rerank_question,
    score_question,
)
from flashmoa_sglang.http.scoring.routes import check_size, stream, while_connected  # noqa: E402
from flashmoa_sglang.http.stream import Terms  # noqa: E402
from flashmoa_sglang.http.streams import Limits  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.unit.plugin.test_token_buffer import byte_level_with_pattern, sentencepiece_like  # noqa: E402

pytestmark = pytest.mark.anyio

RERANKER = 'The answer can only be "yes" or "no". {{ messages[0].content }}'
BODY: dict[str, Any] = {"query": "q", "documents": ["one", "two"]}


def test_template_of_a_reranker_gets_query_and_document_as_messages() -> None:
    body = RerankBody(**BODY, instruct="Find trips.")
    question = rerank_question(body, document_texts(body), RERANKER)
    assert question.answers == ["yes", "no"]
    messages = question.prompts[1].messages
    assert messages == [{"role": "user", "content": "q"}, {"role": "user", "content": "two"}]
    assert question.prompts[1].chat_template_kwargs == {"instruct": "Find trips."}


def test_models_that_can_think_are_told_not_to_unless_the_client_says_so() -> None:
    for kwargs, expected in [(None, False), ({"enable_thinking": True}, True)]:
        body = RerankBody(**BODY, chat_template_kwargs=kwargs)
        question = rerank_question(body, document_texts(body), "{{ messages }}")
        assert question.prompts[0].chat_template_kwargs == {"enable_thinking": expected}
        assert question.answers == ["Yes", "No"]


def test_model_without_a_chat_template_continues_a_text() -> None:
    body = ClassifyBody(input="Cold tea.", labels=["praise", "complaint"])
    question = classify_question(body, "")
    text = question.prompts[0].text
    assert text is not None and text.endswith("Answer with the letter of one label.\nAnswer:")
    assert question.answers == [" A", " B"]


def test_query_may_be_an_object_with_a_text() -> None:
    body = RerankBody(**{**BODY, "query": {"text": "lakes"}})
    text = rerank_question(body, document_texts(body), "").prompts[0].text
    assert text is not None and "Query: lakes\n" in text
    for query in ("  ", {"text": " "}, {"title": "lakes"}):
        with pytest.raises(MalformedRequest, match="query"):
            rerank_question(RerankBody(**{**BODY, "query": query}), ["one"], "")


def test_what_prompts_share_comes_before_what_they_do_not() -> None:
    body = RerankBody(**BODY)
    first, second = (
        prompt.text for prompt in rerank_question(body, document_texts(body), "").prompts
    )
    assert first is not None and second is not None
    assert first.index("one") == second.index("two")
    assert first[: first.index("one")] == second[: second.index("two")]


def test_query_alone_is_a_prompt_and_items_may_come_first() -> None:
    alone = ScoreBody(query="One", candidates=[" two"])
    assert [prompt.text for prompt in score_question(alone).prompts] == ["One"]
    ids = ScoreBody(query=[1, 2], items=[[3], [4]], label_token_ids=[5], item_first=True)
    question = score_question(ids)
    assert [prompt.input_ids for prompt in question.prompts] == [[3, 1, 2], [4, 1, 2]]
    assert question.answers == [[5]] and question.may_repeat


def test_item_continues_the_users_last_message_or_is_one() -> None:
    parts = [{"type": "text", "text": "Hi"}]
    for content, expected in [
        ("Hi", "Hi there"),
        (None, " there"),
        (parts, [*parts, {"type": "text", "text": " there"}]),
    ]:
        messages = [{"role": "user", "content": content}]
        body = ScoreBody(messages=messages, items=[" there"], candidates=["x"])
        assert score_question(body).prompts[0].messages == [{"role": "user", "content": expected}]
    model = {"role": "assistant", "content": "Hello."}
    body = ScoreBody(messages=[model], items=["Go"], candidates=["x"])
    added = {"role": "user", "content": "Go"}
    assert score_question(body).prompts[0].messages == [model, added]


def test_a_document_is_a_text_or_has_one() -> None:
    documents: list[Any] = [{"text": "T", "title": "A"}, "plain"]
    assert document_texts(RerankBody(query="q", documents=documents)) == ["T", "plain"]
    with pytest.raises(MalformedRequest, match=r"documents\[1\] has no text"):
        document_texts(RerankBody(query="q", documents=["a", {"title": "A"}]))


@pytest.mark.parametrize(
    ("fields", "best"),
    [({"top_n": 2}, 2), ({"top_k": 2}, 2), ({"top_n": 0}, None), ({"top_n": 0, "top_k": 2}, 2)],
)
def test_top_k_is_another_name_of_top_n_and_0_asks_for_all(
    fields: dict[str, int], best: int | None
) -> None:
    assert RerankBody(query="q", documents=["a"], **fields).best == best  # type: ignore[arg-type]


def test_candidates_that_are_the_same_tokens_are_refused() -> None:
    refuse_duplicates(["a", "b"], [[1], [2]])
    with pytest.raises(CandidateRefused, match=r"among \['a', \[1\]\]"):
        refuse_duplicates(["a", [1], "b"], [[1], [1], [2]])


@pytest.mark.parametrize("picture", ["<|vision_start|>{{ query }}", "<|image_pad|>"])
def test_templates_of_rerankers_that_see_are_left_to_sglang(picture: str) -> None:
    with pytest.raises(MalformedRequest, match="--flashmoa-scoring off"):
        rerank_question(RerankBody(**BODY), ["one"], RERANKER + picture)
    assert rerank_question(RerankBody(**BODY), ["one"], "{{ messages }}" + picture).prompts


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"temperature": 1.0, "return_token_logprobs": False, "item_embed_overrides": None}, False),
        ({"user": "a client's own field"}, False),
        ({"temperature": 0.5}, True),
        ({"return_token_logprobs": True}, True),
        ({"score_extraction_token": 7}, True),
    ],
)
def test_fields_that_only_sglangs_route_has_are_refused(
    fields: dict[str, Any], refused: bool
) -> None:
    body = ScoreBody.model_validate(
        {"query": "q", "items": ["a"], "label_token_ids": [1, 2], **fields}
    )
    if refused:
        with pytest.raises(MalformedRequest, match="Only SGLang's own route has"):
            body.check()
    else:
        body.check()


@pytest.mark.parametrize(
    ("entries", "shared", "answers", "problem"),
    [
        (11, ["q"], 2, "items has 11 entries; this server takes at most 10. Send several"),
        (
            10,
            ["q"],
            11,
            "10 items with 11 candidates each are 110 scores; this server takes at most",
        ),
        (10, ["q" * 101], 2, "would be 1,010 characters in their prompts together"),
        (
            5,
            [[{"role": "user", "content": "q" * 200}], None],
            2,
            "What all 5 items share would be 1,1",
        ),
    ],
)
def test_lists_that_would_take_too_much_memory_are_refused(
    entries: int, shared: list[object], answers: int, problem: str
) -> None:
    limits = Limits(scored_items=10, scores=100, repeated_characters=1000)
    with pytest.raises(MalformedRequest, match="Send several requests") as raised:
        check_size(limits, "items", ["x"] * entries, shared, answers)
    assert problem in str(raised.value)
    check_size(limits, "items", ["x"] * 10, ["q\n" * 50, None], 10)


PIECES = [
    " the", " Nepal", "al", " lake", "Answer:", "\n", "\n\n", " ", "  ", ".", "12", "3", "é", "中",
    "<|im_start|>", "assistant", "🙂", "Yes", "No", "A", "'s", "\t",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join)
candidates = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)


class CountingTokenizer:
    """Counts the texts that it tokenises, without the special tokens of whole prompts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.count = 0

    def encode(self, text: str) -> list[int]:
        self.count += 1
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def after(self) -> CandidateTokenizer:
        return CandidateTokenizer(lambda: self)  # type: ignore[arg-type, return-value]


def real(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(
    scope="module",
    params=[real, lambda _: byte_level_with_pattern(), lambda _: sentencepiece_like()],
    ids=["served", "llama 3", "llama 2"],
)
def tokenizer(request: pytest.FixtureRequest, model: Path) -> CountingTokenizer:
    make: Callable[[Path], Any] = request.param
    return CountingTokenizer(make(model))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompt=texts, candidate=candidates)
def test_candidate_is_tokenised_as_after_its_prompt_or_refused(
    tokenizer: CountingTokenizer, prompt: str, candidate: str
) -> None:
    before = tokenizer.tokenizer.encode(prompt)
    whole = tokenizer.tokenizer.encode(prompt + candidate)
    try:
        found = tokenizer.after().tokenize(before, candidate)
    except CandidateRefused as refused:
        joins = whole[: len(before)] != before
        assert joins or "give candidates as token ids" in str(refused)
        return
    assert [*before, *found] == whole


def test_ordinary_candidates_are_never_refused(tokenizer: CountingTokenizer) -> None:
    encode = tokenizer.tokenizer.encode
    for prompt in ("Is it good?\nAnswer:", "<|im_start|>assistant\n", "One two", "Hi"):
        for candidate in ["Yes", "No"] if prompt.endswith("\n") else [" Yes", " No"]:
            found = tokenizer.after().tokenize(encode(prompt), candidate)
            assert [*encode(prompt), *found] == encode(prompt + candidate)


def test_prompts_that_end_alike_are_tokenised_once(tokenizer: CountingTokenizer) -> None:
    after, encode = tokenizer.after(), tokenizer.tokenizer.encode
    ending = " Is it good? Please say so. Say it in one word.\nAnswer:"
    first = after.tokenize(encode("One" + ending), " Yes")
    count = tokenizer.count
    assert after.tokenize(encode("Another" + ending), " Yes") == first
    assert after.tokenize(encode("Another" + ending), [5]) == [5]
    assert tokenizer.count == count


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a plain object in place of SGLang's request, whose module imports the whole engine."""
    module = SimpleNamespace(GenerateReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", module)


class CountingEngine:
    """Answers batches after some turns of the event loop, and counts the prefills under way.

    Attributes:
        batches: the requests, in the order in which they came.
        refuses: the message of a prefill that SGLang aborts, by the last token of its prompt.
        retracts: the last tokens of prompts whose prefill SGLang interrupts once.
    """

    role = "null"

    def __init__(self, queue: int | None = None) -> None:
        self.max_queued_requests = queue
        self.under_way = self.most_under_way = 0
        self.batches: list[Any] = []
        self.refuses: dict[int, str] = {}
        self.retracts: set[int] = set()

    async def run(self, request: Any, _http_request: object) -> AsyncGenerator[dict[str, Any]]:
        self.batches.append(request)
        if isinstance(request.rid, str):  # It is no batch.
            fields = {name: [value] for name, value in vars(request).items()}
            yield {"meta_info": self._answer(SimpleNamespace(**fields), 0)}
            return
        self.under_way += len(request.input_ids)
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(20):
            await asyncio.sleep(0)
        # SGLang answers in the order in which they are computed.
        for index in reversed(range(len(request.input_ids))):
            self.under_way -= 1
            if request.input_ids[index][-1] in self.retracts:
                yield {"index": index, "meta_info": unfinished(request.input_ids[index])}
            yield {"index": index, "meta_info": self._answer(request, index)}

    def _answer(self, request: Any, index: int) -> dict[str, Any]:
        ids = request.input_ids[index]
        if message := self.refuses.get(ids[-1]):
            return {"finish_reason": {"type": "abort", "status_code": 503, "message": message}}
        return {
            **unfinished(ids),
            "finish_reason": {"type": "length", "length": 0},
            "input_token_logprobs": [
                (-0.5, token, None) for token in ids[request.logprob_start_len[index] :]
            ],
            "output_token_ids_logprobs": [
                [(-float(token), token, None) for token in request.token_ids_logprob[index]]
            ],
        }


def unfinished(ids: Sequence[int]) -> dict[str, Any]:
    """Return what SGLang streams of a prefill that is interrupted."""
    return {
        "finish_reason": None,
        "prompt_tokens": len(ids),
        "cached_tokens": 0,
        "input_token_logprobs": [],
        "output_token_ids_logprobs": [],
    }


async def score(
    engine: CountingEngine,
    items: int,
    candidates: list[list[int]],
    *,
    shares: bool = True,
    room: PrefillRoom | None = None,
    prompt_stream: Any = None,
) -> list[ScoredPrompt]:
    found: list[ScoredPrompt] = []
    room = room or PrefillRoom(engine.max_queued_requests)
    scorer = ListScorer(
        engine,  # type: ignore[arg-type]
        Terms(dp_rank=1),
        None,
        room,
        shares,
        found.append,
        prompt_stream,
    )
    prompts = [ScoredPrompt(i, f"items[{i}]", [1, 2, i], candidates) for i in range(items)]
    await scorer.run(prompts)
    return found


@pytest.mark.parametrize(
    ("queue", "items", "candidates", "most", "largest"),
    [
        (None, 600, 1, 256, 16),
        (None, 100, 5, 256, 16),
        (None, 1, 400, 256, 16),
        (None, 9, 1, 9, 9),
        (100, 600, 1, 48, 16),
        (10, 600, 1, 5, 5),
        (1, 3, 4, 1, 1),
    ],
)
async def test_a_list_fills_neither_the_engine_nor_its_queue(
    queue: int | None, items: int, candidates: int, most: int, largest: int
) -> None:
    engine = CountingEngine(queue)
    found = await score(engine, items, [[7, number] for number in range(candidates)])
    assert engine.most_under_way == most
    assert max(len(batch.input_ids) for batch in engine.batches) == largest
    assert sorted(scores.index for scores in found) == list(range(items))
    assert sum(len(batch.input_ids) for batch in engine.batches) == items * candidates


async def test_lists_at_once_fill_the_engine_no_more_than_one_and_take_turns() -> None:
    engine, room = CountingEngine(100), PrefillRoom(100)
    ends: list[int] = []

    async def one(items: int) -> None:
        assert len(await score(engine, items, [[7]], room=room)) == items
        ends.append(items)

    async with asyncio.TaskGroup() as group:
        for items in (600, 500, 40):
            group.create_task(one(items))
    assert engine.most_under_way == 48
    assert ends[0] == 40


async def test_many_short_lists_fill_the_engine() -> None:
    engine, room = CountingEngine(100), PrefillRoom(100)
    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(score(engine, 1, [[7]], room=room))
    assert engine.most_under_way == 50


async def test_a_list_whose_client_leaves_while_it_waits_takes_no_room() -> None:
    engine, room = CountingEngine(100), PrefillRoom(100)
    async with asyncio.TaskGroup() as group:
        for seconds in range(40):
            task = group.create_task(score(engine, 60, [[7]], room=room))
            for _ in range(seconds):
                await asyncio.sleep(0)
            task.cancel()
        engine.under_way = engine.most_under_way = 0
    with anyio.fail_after(5):
        assert len(await score(engine, 400, [[7]], room=room)) == 400
    assert engine.most_under_way == 48


async def test_outputs_of_prefills_that_are_interrupted_do_not_count() -> None:
    engine = CountingEngine()
    engine.retracts = {0, 2, 8}
    found = await score(engine, 3, [[5], [7], [6, 8]])
    assert [scores.logprobs for scores in found] == [[-5.0, -7.0, -1.0]] * 3
    assert {scores.usage.prefills for scores in found} == {2}


async def test_a_list_that_fails_gives_its_room_back() -> None:
    engine, room = CountingEngine(100), PrefillRoom(100)
    for _ in range(3):
        engine.refuses = {30: "The queue is full."}
        with pytest.raises(EngineBusy):
            await score(engine, 400, [[7]], room=room)
        engine.refuses, engine.under_way = {}, 0
    with anyio.fail_after(5):
        assert len(await score(engine, 400, [[7]], room=room)) == 400
    assert engine.most_under_way == 48


async def test_what_is_wrong_with_a_whole_list_names_no_item() -> None:
    engine = CountingEngine()

    async def run(_request: object, _http_request: object) -> AsyncGenerator[dict[str, Any]]:
        raise MalformedRequest("The adapter is not loaded.")
        yield {}

    engine.run = run  # type: ignore[method-assign]
    with pytest.raises(MalformedRequest, match=r"^The adapter") as raised:
        await score(engine, 3, [[7]])
    assert not raised.value.details


async def test_candidates_of_one_token_have_one_prefill_and_each_longer_one_its_own() -> None:
    engine = CountingEngine()
    found = await score(engine, 3, [[7], [8, 9, 9], [6]])
    (batch,) = engine.batches
    assert batch.input_ids == [ids for i in range(3) for ids in ([1, 2, i], [1, 2, i, 8, 9, 9])]
    assert batch.token_ids_logprob == [[7, 6], []] * 3
    assert batch.logprob_start_len == [-1, 2] * 3
    assert batch.routed_dp_rank == 1 and batch.stream
    assert len(set(batch.rid)) == 6
    # The first of the values is that of the prompt's last token, which is no part of the candidate.
    assert [scores.logprobs for scores in found] == [[-7, 3 * -0.5, -6]] * 3
    assert [scores.usage.prompt_tokens for scores in found] == [9] * 3


async def test_on_an_engine_that_does_not_share_what_is_shared_is_computed_before() -> None:
    engine = CountingEngine()
    await score(engine, 3, [[7], [8, 9]], shares=False)
    assert [batch.input_ids for batch in engine.batches] == [
        [[1, 2, 0]],
        [[1, 2, 1], [1, 2, 2]],
        [[1, 2, i, 8, 9] for i in range(3)],
    ]


class PromptStream:
    """A prompt stream in the place of one in the table of streams; ``log`` has what was done."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def use(self, request: Any, *, multimodal: bool) -> None:
        self.log.append(f"used by {request.input_ids}")

    def annotate(self, _answer: dict[str, Any]) -> None:
        self.log.append("annotated")

    def give_stream_back(self) -> None:
        self.log.append("given back")

    def close_stream(self) -> None:
        if "given back" not in self.log:
            self.log.append("closed")


@pytest.mark.parametrize("shares", [True, False])
async def test_the_first_prefill_uses_the_prompt_stream_in_a_request_of_its_own(
    shares: bool,
) -> None:
    engine, stream = CountingEngine(), PromptStream()
    (only,) = await score(engine, 1, [[7], [8, 9], [8, 5]], shares=shares, prompt_stream=stream)
    assert only.logprobs == [-7, -1, -1]
    assert [batch.input_ids for batch in engine.batches] == [
        [1, 2, 0],
        [[1, 2, 0, 8, 9], [1, 2, 0, 8, 5]],
    ]
    assert stream.log[:3] == ["used by [1, 2, 0]", "annotated", "closed"]


@pytest.mark.parametrize("refuses", ["first", "later"])
@pytest.mark.parametrize("shares", [True, False])
async def test_a_list_that_is_refused_leaves_its_prompt_stream_to_the_next(
    shares: bool, refuses: str
) -> None:
    class FullEngine(CountingEngine):
        async def run(self, request: Any, _http_request: object) -> AsyncGenerator[dict[str, Any]]:
            if refuses == "first" or not isinstance(request.rid, str):
                raise EngineBusy("The queue is full.")
            if shares:
                await anyio.sleep_forever()
            async for output in super().run(request, None):
                yield output

    stream = PromptStream()
    with pytest.raises(EngineBusy):
        await score(FullEngine(), 1, [[7], [8, 9]], shares=shares, prompt_stream=stream)
    assert (stream.log[0], stream.log[-1]) == ("used by [1, 2, 0]", "given back")


@pytest.mark.parametrize("shares", [True, False])
async def test_lists_of_one_item_and_of_none_are_scored(shares: bool) -> None:
    engine = CountingEngine()
    assert await score(engine, 0, [[7]], shares=shares) == []
    (only,) = await score(engine, 1, [[7]], shares=shares)
    assert (only.logprobs, len(engine.batches)) == ([-7], 1)


async def test_a_prefill_that_sglang_aborts_is_named() -> None:
    engine = CountingEngine()
    engine.refuses[30] = "The queue is full."
    with pytest.raises(
        EngineBusy, match=r"items\[30\]: SGLang has aborted .* queue is full"
    ) as raised:
        await score(engine, 40, [[7]])
    assert raised.value.details["item"] == 30


@pytest.mark.parametrize("fails", [None, RuntimeError("broken"), MalformedRequest("refused")])
async def test_the_end_of_a_stream_tells_what_has_failed(fails: Exception | None) -> None:
    engine = CountingEngine(None)
    room = PrefillRoom(None)
    scorer = ListScorer(engine, Terms(), None, room, shares=True, on_scores=print)  # type: ignore[arg-type]
    form = ScoreForm("m", softmax=False, with_tokens=False)

    async def run(_request: object, _http_request: object) -> AsyncGenerator[dict[str, Any]]:
        assert fails is not None
        raise fails
        yield {}

    if fails is not None:
        engine.run = run  # type: ignore[method-assign]
    events = [
        event.removeprefix("data: ").strip()
        async for event in stream(scorer, [ScoredPrompt(0, "items[0]", [1], [[7, 8]])], form)
    ]
    assert events[-1] == "[DONE]"
    end = json.loads(events[-2])
    if fails is None:
        assert end["usage"]["prefills"] == 1
    else:
        known = isinstance(fails, MalformedRequest)
        assert end["error"]["code"] == ("malformed" if known else "engine_failed")
        assert ("broken" in end["error"]["message"]) is False


async def test_work_ends_when_the_client_of_a_whole_answer_leaves() -> None:
    left, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            left.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    client: Any = SimpleNamespace(receive=receive)
    with pytest.raises(ClientDisconnect):
        await while_connected(client, work())
    assert ended.is_set()
    with pytest.raises(MalformedRequest, match="refused"):
        await while_connected(SimpleNamespace(receive=asyncio.Event().wait), refuse())  # type: ignore[arg-type]


async def refuse() -> None:
    raise MalformedRequest("refused")
