"""Test what a workflow does with odd texts and answers, without an engine that links."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from flashmoa import Text, UpstreamCancelled, Workflow
from flashmoa._concurrency import TaskHost, all_of
from flashmoa.engine.wire import Delta
from flashmoa.errors import BadAnswer
from tests.unit.moa.scripted_engine import Script, scripted_engine

pytestmark = pytest.mark.anyio
SCRIPTS: dict[str, Script] = {"plain": ["It is ", "18."]}


class Engine:
    """A client whose engine ends each answer with the finish reason that is the model's name.

    Attributes:
        contents: the contents of the requests' last messages.
    """

    url = "http://engine"

    def __init__(self, model: str = "tiny") -> None:
        self.model = model
        self.contents: list[object] = []

    @asynccontextmanager
    async def chat(
        self, messages: list[dict[str, object]], *, model: str = "stop", **_: object
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        self.contents.append(messages[-1]["content"])

        async def deltas() -> AsyncGenerator[Delta]:
            yield Delta(text="It is 18.")
            yield Delta(text="", finish_reason=None if model == "none" else model)

        yield deltas()


def workflow(engine: Engine) -> Workflow:
    return Workflow(engine, ahead="nothing")  # type: ignore[arg-type]


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("model", "problem"), [("none", "the answer was cut off"), ("abort", "aborted its answer")]
)
async def test_answer_that_is_cut_off_fails_and_no_one_reads_it(model: str, problem: str) -> None:
    engine = Engine()
    async with workflow(engine) as flow:
        answer = flow.ask(user("?"), model=model)
        reader = flow.ask(user(f"Read {answer}"), model="stop")
        for text in (answer, reader):
            with pytest.raises(BadAnswer, match=problem):
                await text
    assert engine.contents == ["?"]


async def test_text_itself_can_be_the_content_of_a_message() -> None:
    engine = Engine()
    async with workflow(engine) as flow:
        draft = flow.text("draft")
        answers = [flow.ask(user(draft), model="stop")]
        answers.append(flow.ask(user([{"type": "text", "text": draft}]), model="stop"))
        draft.write("A draft.")
        draft.close()
        assert [await answer for answer in answers] == ["It is 18."] * 2
    assert engine.contents == ["A draft.", [{"type": "text", "text": "A draft."}]]


async def test_text_that_could_not_be_replaced_is_refused() -> None:
    async with (
        scripted_engine(SCRIPTS) as (_, client),
        Workflow(client) as flow,
        Workflow(client) as other,
    ):
        foreign, draft = other.text("foreign"), flow.text("draft")
        with pytest.raises(ValueError, match="'foreign' is a text of another workflow"):
            flow.ask(user(f"Read {foreign}"))
        with pytest.raises(ValueError, match="'draft' was turned into JSON"):
            flow.ask(user(json.dumps({"draft": f"{draft}"})))
        # What only looks like a mark is a user's text.
        quoted = flow.ask(user("What is \u27e6x:0123456789abcdef\u27e7?"), model="plain")
        assert await quoted == "It is 18."


async def test_several_answers_at_once_are_refused() -> None:
    async with scripted_engine(SCRIPTS) as (_, client), Workflow(client) as flow:
        with pytest.raises(ValueError, match="n is 2; an answer is one text"):
            flow.ask(user("?"), model="plain", n=2)


async def test_reader_does_not_wait_for_other_texts_once_one_has_failed() -> None:
    async with scripted_engine(SCRIPTS) as (_, client), Workflow(client) as flow:
        unwritten, failed = flow.text("unwritten"), flow.text("failed")
        reader = flow.ask(user(f"{unwritten} {failed}"), model="plain")
        failed.fail(RuntimeError("no"))
        with anyio.fail_after(5), pytest.raises(RuntimeError, match="no"):
            await reader


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
async def test_readers_of_a_cancelled_writer_are_not_cancelled(error: BaseException) -> None:
    text = Text("draft")
    with pytest.raises(type(error)), text:
        raise error
    with pytest.raises(UpstreamCancelled, match="draft was cancelled") as raised:
        await text
    assert raised.value.__cause__ is error and text.failure == "cancel"


async def test_names_of_texts_differ() -> None:
    async with scripted_engine(SCRIPTS) as (_, client), Workflow(client) as flow:
        names = [flow.text(name).name for name in ("a", "a-2", "a", "a", "b")]
    assert names == ["a", "a-2", "a-3", "a-4", "b"]


async def test_tasks_end_before_a_cancelled_close_returns() -> None:
    """They need what their owner closes next, to release streams."""
    host, ended = TaskHost("failed"), anyio.Event()

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                ended.set()

    host.start(work)
    await anyio.wait_all_tasks_blocked()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await host.close()
    assert ended.is_set()


@pytest.mark.parametrize(
    ("model", "own", "namespace"),
    [
        ("base:adapter", {}, {"model": "base:adapter"}),
        ("base:adapter", {"cache_salt": "s"}, {"model": "base:adapter", "cache_salt": "s"}),
        ("base:adapter", {"model": "stop"}, None),
        ("base", {"model": "stop", "cache_salt": "s"}, {"cache_salt": "s"}),
    ],
)
async def test_a_link_is_in_the_namespace_of_its_request(
    model: str, own: dict[str, str], namespace: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespaces: list[object] = []
    monkeypatch.setattr(Workflow, "_link", lambda *given: namespaces.append(given[-1]))
    async with workflow(Engine(model)) as flow:
        draft = flow.ask(user("Draft."), model="stop")
        await flow.ask(user(f"Shorten {draft}"), **own)
    assert namespaces == [namespace]


async def test_call_that_was_cancelled_elsewhere_is_named() -> None:
    async def cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(RuntimeError, match="was cancelled elsewhere"):
        await all_of([cancelled])


async def test_many_escaped_brackets_are_no_marks() -> None:
    """They were searched from each one to the end of the string."""
    text = json.dumps({"semantics": "\u27e6x\u27e7 " * 200 + "\u27e6" * 20_000})
    assert text.count("u27e6") == 20_200
    engine = Engine()
    with anyio.fail_after(5):
        async with workflow(engine) as flow:
            assert await flow.ask(user(text), model="stop") == "It is 18."
