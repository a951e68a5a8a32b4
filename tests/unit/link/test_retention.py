"""Test that a process which makes calls for ever keeps nothing of its calls."""

import asyncio
import gc
from collections.abc import AsyncGenerator

import anyio
import anyio.to_thread
import httpx
import pytest

from flashmoa import EngineClient, Workflow
from flashmoa.errors import EngineError
from tests.event_loop import own_task
from tests.retention import few_or_many, kept_by
from tests.unit.openai.fake_server import TEXT, URL, FakeServer, serve
from tests.waiting import until

LIMITS = ["workflow.MAX_REMEMBERED", "workflow.MAX_CALLS_AT_ONCE", "_limits.MAX_REMEMBERED",
          "observe.report.MAX_REMEMBERED"]  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    for limit in LIMITS:
        monkeypatch.setattr(f"flashmoa.{limit}", 20)
    return serve(monkeypatch, same_ids=True)


@pytest.fixture
async def flow(server: FakeServer) -> AsyncGenerator[Workflow]:
    async with EngineClient(URL) as engine, own_task(Workflow(engine)) as flow:
        yield flow


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": f"{content}".ljust(100)}]


@few_or_many
async def test_a_workflow_keeps_none_of_its_requests(
    flow: Workflow, server: FakeServer, steps: int
) -> None:
    async def ask(number: int) -> None:
        server.forget()
        draft = flow.ask(user(f"Write {number}"), name=f"draft {number}")
        version = flow.version(draft)
        review = flow.ask(user(f"Review {draft} {flow.text()!r:.0}"), name="review")
        reader = flow.ask(user(f"Read {version}"))
        version.finish(await draft)
        await review
        await reader

    async def expect(number: int) -> None:
        server.forget()
        with flow.text() as draft:
            expected = flow.expect(user(f"Read {draft} {number}"))
        await expected.messages()
        expected.claim()

    assert await kept_by(ask, steps) < 1
    assert await kept_by(expect, steps) < 1


async def test_unawaited_failures_are_not_kept(
    flow: Workflow, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("flashmoa.workflow.logger.warning", lambda _, name, __: logged.append(name))
    server.chat = lambda _: httpx.Response(503, text="no room")

    async def fail(number: int) -> None:
        server.forget()
        flow.ask(user(f"Ask {number}"), name="lost")
        awaited = flow.ask(user(f"Ask again {number}"), name="awaited")
        with pytest.raises(EngineError):
            await awaited
        await until(lambda: logged)
        assert logged.pop().startswith("lost") and not logged

    assert await kept_by(fail, 30) < 1


async def test_a_text_that_ends_early_keeps_no_link(flow: Workflow, server: FakeServer) -> None:
    draft, other = flow.text(), flow.text("other")
    answer = server.answer

    def finish_and_answer(request: httpx.Request) -> httpx.Response:
        draft.finish("Done.")
        return answer(request)

    server.answer = finish_and_answer  # type: ignore[method-assign]
    reader = flow.ask(user(f"Read {draft} {other}"))
    await until(lambda: other._links)
    other.finish("Done, too.")
    assert await reader == TEXT
    assert draft._links == []


async def test_a_mark_whose_text_is_gone_is_refused(flow: Workflow) -> None:
    async def marked(number: int) -> str:
        draft = flow.ask(user(f"Write {number}"), name="draft")
        mark = f"{draft}"
        await draft
        return mark

    marks = [await marked(number) for number in range(21)]
    gc.collect()
    assert await flow.ask(user(f"Read {marks[1:]}")) == TEXT
    with pytest.raises(ValueError, match="'draft' is gone, and only the mark"):
        flow.ask(user(f"Read {marks[0]}"))


async def test_an_unfinished_text_and_its_name_are_known(flow: Workflow) -> None:
    long = flow.text("long")
    prompt = f"Read {long}"
    for number in range(50):
        _ = f"{flow.text(f'other {number}')}"
    assert (long.name, flow.text("long").name) == ("long", "long-2")
    reader = flow.ask(user(prompt))
    long.finish("Done.")
    assert await reader == TEXT


async def test_threads_with_one_client_leave_nothing(server: FakeServer) -> None:
    engine, answers = EngineClient(URL), set[str]()

    async def work() -> None:
        async with Workflow(engine) as flow:
            draft = flow.ask(user("Write."))
            answers.add(await flow.ask(user(f"Review {draft}")))

    async def step(_number: int) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(anyio.to_thread.run_sync, asyncio.run, work())
        server.forget()

    assert await kept_by(step, 30) < 1
    assert answers == {TEXT}
