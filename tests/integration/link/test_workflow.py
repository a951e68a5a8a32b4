"""Test calls that are linked without an agent framework."""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI

from flashmoa import EngineClient, FailurePolicy, Workflow
from flashmoa.engine import PromptUsage
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import (
    CallFinished,
    CallStarted,
    Event,
    LinkOpened,
    UpstreamFailed,
)
from tests.integration.support import (
    chat_text,
    wait_for_streams,
    wait_until_idle,
    wait_until_prefilled,
)
from tests.waiting import LAG

PARAMETERS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture
async def reader(downstream_client: EngineClient) -> AsyncGenerator[EngineClient]:
    await downstream_client.flush_cache()
    yield downstream_client
    await wait_until_idle(downstream_client)


def asks(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


async def answer_to(engine: EngineClient, text: str) -> str:
    return await chat_text(engine, asks(text), **PARAMETERS)


def status(usage: PromptUsage | None) -> str | None:
    return usage.prompt_stream.status if usage is not None and usage.prompt_stream else None


async def test_linked_answers_equal_unlinked_ones(
    client: EngineClient, reader: EngineClient, guide: str
) -> None:
    """Three calls write at once, one reads them all, and another reads that one."""
    questions = [f"{guide[:300]} Part {number}?" for number in range(3)]
    events: list[Event] = []
    async with Workflow(client, listener=events.append) as flow:
        parts = [flow.ask(asks(question), name="part", **PARAMETERS) for question in questions]
        joined = "\n\n".join(f"{n}. {part}" for n, part in enumerate(parts, 1))
        whole = flow.ask(asks(f"{guide[:1500]}\n{joined}\nAll?"), engine=reader, **PARAMETERS)
        last = flow.ask(asks(f"In short: {whole}"), name="last", **PARAMETERS)
        texts = [await part for part in parts]
        assert f"{parts[0]}" == texts[0] and parts[0].is_complete
    assert [part.name for part in parts] == ["part", "part-2", "part-3"]
    assert status(whole.usage) == status(last.usage) == "hit"
    reports = [event for event in events if event.agent == "last"]
    calls = [type(event) for event in reports if isinstance(event, CallStarted | CallFinished)]
    assert calls == [CallStarted, CallFinished]
    (finished,) = [event for event in reports if isinstance(event, CallFinished)]
    assert (finished.text, finished.usage) == (await last, last.usage)
    opened = [event for event in events if isinstance(event, LinkOpened)]
    assert ("part", "part-2", "part-3") in {event.upstream for event in opened}
    await client.flush_cache()
    await reader.flush_cache()
    expected = [await answer_to(client, question) for question in questions]
    assert texts == expected
    joined = "\n\n".join(f"{n}. {text}" for n, text in enumerate(expected, 1))
    expected_whole = await answer_to(reader, f"{guide[:1500]}\n{joined}\nAll?")
    assert await whole == expected_whole
    assert await last == await answer_to(client, f"In short: {expected_whole}")
    await wait_until_idle(client)


@pytest.mark.parametrize(
    "sentence",
    [
        "The caravan reached the old town at noon, and everybody rested. ",
        "第一天抵达加德满都，休息后步行前往老城区。第二天乘车前往博卡拉！",
        "กองคาราวานมาถึงเมืองเก่าตอนเที่ยงและทุกคนพักผ่อนก่อน",
    ],
)
async def test_few_tokens_are_left_of_a_text_in_any_script(
    reader: EngineClient, sentence: str
) -> None:
    parameters = {**PARAMETERS, "max_tokens": 8}
    whole = sentence * (600 // len(sentence))
    async with Workflow(reader) as flow:
        plain = flow.ask(asks(f"Review: {whole}"), **parameters)
        expected = await plain
    assert plain.usage is not None
    await reader.flush_cache()
    ids: list[str] = []
    opened = anyio.Event()

    def listener(event: Event) -> None:
        if isinstance(event, LinkOpened):
            ids.append(event.stream_id)
            opened.set()
            for start in range(0, len(whole), 6):
                draft.write(whole[start : start + 6])

    async with Workflow(reader, listener=listener) as flow:
        draft = flow.text("draft")
        review = flow.ask(asks(f"Review: {draft}"), **parameters)
        await opened.wait()
        # The rest is text that further text may change, and tokens too few for an increment.
        few = LAG + 16
        await wait_until_prefilled(reader, ids[0], plain.usage.prompt_tokens - few)
        draft.close()
        assert await review == expected
    assert status(review.usage) == "hit"
    assert review.usage is not None and review.usage.late_tokens <= few


async def test_two_calls_of_an_openai_client_can_be_linked(
    engine: LocalEngine, reader: EngineClient, guide: str
) -> None:
    settings: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 16}
    opened = anyio.Event()
    async with (
        AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as writing,
        AsyncOpenAI(base_url=f"{reader.url}/v1", api_key="none") as reading,
        Workflow(
            reader, listener=lambda event: opened.set() if isinstance(event, LinkOpened) else None
        ) as flow,
    ):
        draft = flow.text("draft")
        review = flow.expect(asks(f"{guide[:1500]}\nReview this: {draft}"))
        # On a busy machine, 16 tokens may be written before the engine has opened the stream.
        await opened.wait()
        stream = await writing.chat.completions.create(
            messages=asks("Write."),  # type: ignore[arg-type]
            stream=True,
            **settings,
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                draft.write(chunk.choices[0].delta.content)
        draft.close()
        sent = await review.messages()
        answer = await reading.chat.completions.create(
            messages=sent,  # type: ignore[arg-type]
            extra_body=review.claim(),
            **settings,
        )
    assert await draft in sent[1]["content"]
    assert answer.usage is not None
    assert status(PromptUsage.from_openai(answer.usage.model_dump())) == "hit"


async def test_a_plain_server_answers_with_what_had_arrived(plain_engine: LocalEngine) -> None:
    events: list[Event] = []
    policy = FailurePolicy(error="finalize")
    async with (
        EngineClient(plain_engine.url) as plain,
        Workflow(plain, on_failure=policy, listener=events.append) as flow,
    ):
        draft = flow.text("draft")
        review = flow.ask(asks(f"Review: {draft}"), **PARAMETERS)
        draft.write("half a")
        draft.fail(ValueError("broken"))
        assert await review == await answer_to(plain, "Review: half a")
    failed = [event for event in events if isinstance(event, UpstreamFailed)]
    assert [(event.upstream, event.failure) for event in failed] == [("draft", "error")]


async def test_a_request_that_is_never_sent(reader: EngineClient, guide: str) -> None:
    """It is claimed, and then the workflow is cancelled."""
    with anyio.CancelScope() as scope:
        async with Workflow(reader) as flow:
            draft = flow.text("draft")
            expected = flow.expect(asks(f"{guide[:900]} {draft}"))
            await wait_for_streams(reader)
            draft.finish("a plan")
            await expected.messages()
            assert expected.claim()
            scope.cancel()
            await anyio.sleep_forever()
    assert (await wait_until_idle(reader)).pinned_streams == 0
