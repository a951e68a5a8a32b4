"""The prefills of lists that are scored, and their answers, with a fake engine."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from flashmoa_sglang.http.errors import EngineBusy, MalformedRequest
from flashmoa_sglang.http.scoring.answers import ScoreForm
from flashmoa_sglang.http.scoring.forwards import ListScorer, PrefillRoom, ScoredPrompt
from flashmoa_sglang.http.scoring.routes import stream, while_connected
from flashmoa_sglang.http.stream import Terms
from starlette.requests import ClientDisconnect


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a plain object in place of SGLang's request, whose module imports the whole engine."""
    module = SimpleNamespace(GenerateReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", module)


class CountingEngine:
    """Answers batches after some turns of the event loop, and counts the prefills under way.

    Attributes:
        batches: the requests, in order.
        refuses: messages of aborted prefills, by the last token of their prompts.
        retracts: the last tokens of prompts whose prefill SGLang interrupts once.
        error: raised by each request, or by batches only if ``after_first``.
        hangs: whether the first request is never answered.
    """

    role = None
    error: Exception | None = None
    after_first = hangs = False
    refuses: dict[int, str] = {}  # noqa: RUF012
    retracts: frozenset[int] = frozenset()

    def __init__(self, queue: int | None = None, **given: Any) -> None:
        vars(self).update(given)
        self.max_queued_requests = queue
        self.under_way = self.most_under_way = 0
        self.batches: list[Any] = []

    async def run(self, request: Any, _http_request: object) -> AsyncGenerator[dict[str, Any]]:
        self.batches.append(request)
        is_first = isinstance(request.rid, str)
        if self.error is not None and not (self.after_first and is_first):
            raise self.error
        if is_first:  # It is no batch.
            if self.hangs:
                await anyio.sleep_forever()
            fields = {name: [value] for name, value in vars(request).items()}
            yield {"meta_info": self._answer(SimpleNamespace(**fields), 0)}
            return
        self.under_way += len(request.input_ids)
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(20):
            await asyncio.sleep(0)
        # SGLang answers in the order of its forwards.
        for index in reversed(range(len(request.input_ids))):
            self.under_way -= 1
            if request.input_ids[index][-1] in self.retracts:
                yield {"index": index, "meta_info": unfinished(request.input_ids[index])}
            yield {"index": index, "meta_info": self._answer(request, index)}

    def _answer(self, request: Any, index: int) -> dict[str, Any]:
        ids = request.input_ids[index]
        if message := self.refuses.get(ids[-1]):
            return {"finish_reason": {"type": "abort", "status_code": 503, "message": message}}
        start, candidates = request.logprob_start_len[index], request.token_ids_logprob[index]
        return {
            **unfinished(ids),
            "finish_reason": {"type": "length", "length": 0},
            "input_token_logprobs": [(-0.5, token, None) for token in ids[start:]],
            "output_token_ids_logprobs": [[(-float(token), token, None) for token in candidates]],
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
    found, fake = list[ScoredPrompt](), cast("Any", engine)
    room = room or PrefillRoom(engine.max_queued_requests)
    terms = Terms(dp_rank=1)
    scorer = ListScorer(fake, terms, None, room, shares, found.append, prompt_stream)
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


async def test_lists_at_once_share_the_room_and_take_turns() -> None:
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
    # Many short lists fill the engine.
    engine.most_under_way = 0
    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(score(engine, 1, [[7]], room=room))
    assert engine.most_under_way == 50


async def test_a_list_whose_client_leaves_takes_no_room() -> None:
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


async def test_interrupted_prefills_do_not_count() -> None:
    engine = CountingEngine(retracts={0, 2, 8})
    found = await score(engine, 3, [[5], [7], [6, 8]])
    assert [scores.logprobs for scores in found] == [[-5.0, -7.0, -1.0]] * 3
    assert {scores.computed for scores in found} == {2}


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


async def test_an_error_of_a_whole_list_names_no_item() -> None:
    engine = CountingEngine(error=MalformedRequest("The adapter is not loaded."))
    with pytest.raises(MalformedRequest, match=r"^The adapter") as raised:
        await score(engine, 3, [[7]])
    assert not raised.value.details


async def test_candidates_of_one_token_share_a_prefill() -> None:
    engine = CountingEngine()
    found = await score(engine, 3, [[7], [8, 9, 9], [6]])
    (batch,) = engine.batches
    assert batch.input_ids == [ids for i in range(3) for ids in ([1, 2, i], [1, 2, i, 8, 9, 9])]
    assert batch.token_ids_logprob == [[7, 6], []] * 3
    assert batch.logprob_start_len == [-1, 2] * 3
    assert batch.routed_dp_rank == 1 and batch.stream
    assert len(set(batch.rid)) == 6
    # The first value belongs to the prompt's last token, which is no part of the candidate.
    assert [scores.logprobs for scores in found] == [[-7, 3 * -0.5, -6]] * 3
    assert [scores.prompt_tokens for scores in found] == [9] * 3


async def test_a_common_prefix_is_computed_before_its_use() -> None:
    engine = CountingEngine()
    await score(engine, 3, [[7], [8, 9]], shares=False)
    assert [batch.input_ids for batch in engine.batches] == [
        [[1, 2, 0]],
        [[1, 2, 1], [1, 2, 2]],
        [[1, 2, i, 8, 9] for i in range(3)],
    ]


class PromptStream:
    """Stands for a prompt stream; ``log`` has the calls."""

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
async def test_only_the_first_prefill_uses_the_stream(shares: bool) -> None:
    engine, stream = CountingEngine(), PromptStream()
    (only,) = await score(engine, 1, [[7], [8, 9], [8, 5]], shares=shares, prompt_stream=stream)
    assert only.logprobs == [-7, -1, -1]
    assert [batch.input_ids for batch in engine.batches] == [
        [1, 2, 0],
        [[1, 2, 0, 8, 9], [1, 2, 0, 8, 5]],
    ]
    assert stream.log[:3] == ["used by [1, 2, 0]", "annotated", "closed"]


@pytest.mark.parametrize("after_first", [False, True])
@pytest.mark.parametrize("shares", [True, False])
async def test_a_refused_list_gives_its_stream_back(shares: bool, after_first: bool) -> None:
    stream, error = PromptStream(), EngineBusy("The queue is full.")
    engine = CountingEngine(error=error, after_first=after_first, hangs=shares)
    with pytest.raises(EngineBusy):
        await score(engine, 1, [[7], [8, 9]], shares=shares, prompt_stream=stream)
    assert (stream.log[0], stream.log[-1]) == ("used by [1, 2, 0]", "given back")


@pytest.mark.parametrize("shares", [True, False])
async def test_lists_of_one_item_and_of_none_are_scored(shares: bool) -> None:
    engine = CountingEngine()
    assert await score(engine, 0, [[7]], shares=shares) == []
    (only,) = await score(engine, 1, [[7]], shares=shares)
    assert (only.logprobs, len(engine.batches)) == ([-7], 1)


async def test_a_prefill_that_sglang_aborts_is_named() -> None:
    engine = CountingEngine(refuses={30: "The queue is full."})
    says = r"items\[30\]: SGLang has aborted .* queue is full"
    with pytest.raises(EngineBusy, match=says) as raised:
        await score(engine, 40, [[7]])
    assert raised.value.details["item"] == 30


@pytest.mark.parametrize("fails", [None, RuntimeError("broken"), MalformedRequest("refused")])
async def test_the_end_of_a_stream_tells_what_has_failed(fails: Exception | None) -> None:
    engine: Any = CountingEngine(error=fails)
    scorer = ListScorer(engine, Terms(), None, PrefillRoom(None), shares=True)
    form = ScoreForm("m", softmax=False, with_tokens=False)
    prompts = [ScoredPrompt(0, "items[0]", [1], [[7, 8]])]
    *_, end, done = [event.removeprefix("data: ") async for event in stream(scorer, prompts, form)]
    assert done.strip() == "[DONE]"
    end = json.loads(end)
    if fails is None:
        assert end["usage"]["prefills"] == 1
    else:
        known = isinstance(fails, MalformedRequest)
        assert end["error"]["code"] == ("malformed" if known else "engine_failed")
        assert ("broken" in end["error"]["message"]) is False


async def test_work_ends_when_its_client_leaves() -> None:
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
