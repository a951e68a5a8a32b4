"""Test what a workflow does with odd texts and answers, without an engine that links."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import anyio
import pytest

from flashmoa import EngineClient, Text, UpstreamCancelled, Workflow
from flashmoa._concurrency import TaskHost, all_of
from flashmoa.engine.wire import Delta, kv_namespace
from flashmoa.errors import BadAnswer, EngineUnreachable
from flashmoa.observe import Event, LinkDeclined
from tests.event_loop import own_task
from tests.unit.events import of_kind, warnings
from tests.unit.link.hung_engine import hung_engine, user
from tests.waiting import until

TOOL_PIECES: list[dict[str, Any]] = [
    {"index": 0, "id": "c0", "function": {"name": "look", "arguments": '{"at"'}},
    {"index": 0, "function": {"arguments": ': "it"}'}},
    {"index": 1, "id": "c1", "function": {"name": "walk", "arguments": "{}"}},
]


class Engine:
    """A client whose models are named after their finish reasons.

    Attributes:
        contents: the contents of the requests' last messages.
        bodies: the other fields of the requests.
        rendered: the fields of the requests to render a prompt, without the messages.
    """

    url = "http://engine"

    def __init__(self, model: str = "tiny", **namespace: str) -> None:
        self.model = model
        self.namespace = namespace
        self.contents: list[object] = []
        self.bodies: list[dict[str, object]] = []
        self.rendered: list[dict[str, object]] = []

    async def render(self, _messages: object, **fields: object) -> str:
        self.rendered.append(fields)
        raise EngineUnreachable(f"it did not render prompt {len(self.rendered)}")

    @asynccontextmanager
    async def chat(
        self, messages: list[dict[str, object]], *, model: str = "stop", **more: object
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        self.contents.append(messages[-1]["content"])
        self.bodies.append(more)

        async def deltas() -> AsyncGenerator[Delta]:
            if model == "tool_calls":
                for piece in TOOL_PIECES:
                    yield Delta(text="", tool_calls=[piece])
                yield Delta(text="", finish_reason=model)
                return
            yield Delta(text="It is 18.")
            yield Delta(text="", finish_reason=None if model == "none" else model)

        yield deltas()


def workflow(engine: Engine) -> Workflow:
    return Workflow(engine, ahead="nothing")  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def flow(engine: Engine) -> AsyncGenerator[Workflow]:
    async with own_task(workflow(engine)) as flow:
        yield flow


@pytest.mark.parametrize(
    ("model", "problem"), [("none", "the answer was cut off"), ("abort", "aborted its answer")]
)
async def test_a_cut_answer_fails_and_is_not_read(
    flow: Workflow, engine: Engine, model: str, problem: str
) -> None:
    answer = flow.ask(user("?"), model=model)
    reader = flow.ask(user(f"Read {answer}"), model="stop")
    for text in (answer, reader):
        with pytest.raises(BadAnswer, match=problem):
            await text
    assert engine.contents == ["?"]


async def test_only_texts_are_written(flow: Workflow) -> None:
    answer, text = flow.ask(user("?"), model="stop"), flow.text()
    written = flow.version(answer)
    for name in ("write", "close", "finish", "fail", "__enter__"):
        assert not hasattr(answer, name)
        assert hasattr(text, name) and hasattr(written, name)
    reader = flow.ask(user(f"{text} {written} {answer.name}"), model="stop")
    text.write("Read ")
    text.finish("Read this:")
    written.write(await answer)
    written.close()
    assert await reader == "It is 18."
    assert answer.finish_reason == "stop"


async def test_irreplaceable_text_is_refused(flow: Workflow) -> None:
    async with workflow(Engine()) as other:
        foreign, draft = other.text("foreign"), flow.text("draft")
        with pytest.raises(ValueError, match="'foreign' is a text of another workflow"):
            flow.ask(user(f"Read {foreign}"))
        for change in (str.upper, quote, json.dumps, lambda mark: mark[1:], lambda mark: mark[:-1]):
            with pytest.raises(ValueError, match="'draft' was changed before it was complete"):
                flow.ask(user(f"{change(f'{draft}')}"))
        for end in (-3, -9, -13):
            with pytest.raises(ValueError, match="'a text' was changed before it was complete"):
                flow.ask(user(f"Read {draft}"[:end]))
        with pytest.raises(ValueError, match="'draft' is in a parameter"):
            flow.ask(user("Read."), tools=[{"function": {"description": f"Reads {draft}"}}])
        # A text of a user may look like a mark.
        quoted = flow.ask(user("What is \u27e6x:0123456789abcdef\u27e7?"))
        assert await quoted == "It is 18."


async def test_a_failed_text_ends_the_wait_for_others(flow: Workflow) -> None:
    unwritten, failed = flow.text("unwritten"), flow.text("failed")
    reader = flow.ask(user(f"{unwritten} {failed}"))
    failed.fail(RuntimeError("no"))
    with anyio.fail_after(5), pytest.raises(RuntimeError, match="no"):
        await reader


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
async def test_a_cancelled_writer_cancels_no_readers(error: BaseException) -> None:
    text = Text("draft")
    with pytest.raises(type(error)), text:
        raise error
    with pytest.raises(UpstreamCancelled, match="draft was cancelled") as raised:
        await text
    assert raised.value.__cause__ is error and text.failure == "cancel"


async def test_names_of_texts_differ(flow: Workflow) -> None:
    names = [flow.text(name).name for name in ("a", "a-2", "a", "a", "b")]
    assert names == ["a", "a-2", "a-3", "a-4", "b"]


@pytest.mark.parametrize("by", ["anyio", "asyncio"])
async def test_tasks_end_before_a_cancelled_close(by: str) -> None:
    """To release streams, tasks need connections that their owner closes next."""
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
    if by == "anyio":
        with anyio.CancelScope() as scope:
            scope.cancel()
            await host.close()
    else:
        closing = asyncio.ensure_future(host.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert ended.is_set()


@pytest.mark.parametrize(
    ("model", "own", "namespace"),
    [
        ("base:adapter", {}, {"model": "base:adapter"}),
        ("base:adapter", {"cache_salt": "s"}, {"model": "base:adapter", "cache_salt": "s"}),
        ("base:adapter", {"model": "stop"}, {}),
        ("base", {"model": "stop", "cache_salt": "s"}, {"cache_salt": "s"}),
    ],
)
@pytest.mark.parametrize("of_client", [{}, {"extra_key": "tenant"}])
async def test_a_link_is_in_its_requests_namespace(
    model: str, own: Any, namespace: Any, of_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr(Workflow, "_link", lambda *given: found.append(kv_namespace(given[-1])))
    async with workflow(Engine(model, **of_client)) as flow:
        draft = flow.ask(user("Draft."), model="stop")
        await flow.ask(user(f"Shorten {draft}"), **own)
    assert found == [{**namespace, **of_client}]


async def test_a_call_cancelled_elsewhere_is_named() -> None:
    async def cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(RuntimeError, match="was cancelled elsewhere"):
        await all_of([cancelled])


async def test_many_escaped_brackets_are_no_marks(flow: Workflow) -> None:
    """A search from each bracket to the end of the string would be slow."""
    text = json.dumps({"semantics": "\u27e6x\u27e7 " * 200 + "\u27e6" * 20_000})
    assert text.count("u27e6") == 20_200
    with anyio.fail_after(5):
        assert await flow.ask(user(text), model="stop") == "It is 18."


async def test_prompts_are_built_of_texts_as_of_strings(flow: Workflow, engine: Engine) -> None:
    draft = flow.text("draft")
    uses: list[tuple[object, object]] = [
        (draft, "it"),
        ([{"type": "text", "text": draft}], [{"type": "text", "text": "it"}]),
        (f"{draft!r}", "it"),
        ("Read " + draft, "Read it"),
        (draft + "!", "it!"),
        ("%s" % draft, "it"),  # noqa: UP031
        ("\n".join(map(str, [draft, "all"])), "it\nall"),
        (f"Read {[draft]}", "Read [it]"),
        (f"Read { {'it': draft} }", "Read {'it': it}"),
        (f"{draft}", "it"),
        (json.dumps([f"{draft}"], ensure_ascii=False), '["it"]'),
    ]
    answers = [flow.ask(user(use), model="stop") for use, _ in uses]
    draft.finish("it")
    assert {await answer for answer in answers} == {"It is 18."}
    assert engine.contents == [content for _, content in uses]


async def test_parameters_of_other_clients_are_refused(flow: Workflow) -> None:
    for name in ("extra_headers", "timeout", "stream", "functions", "function_call"):
        with pytest.raises(TypeError, match=f"no parameter '{name}'"):
            flow.ask(user("?"), **{name: 1})


@pytest.mark.parametrize("messages", ["?", ["?"], {"role": "user", "content": "?"}])
async def test_only_lists_of_messages_are_accepted(flow: Workflow, messages: Any) -> None:
    for method in (flow.ask, flow.expect):
        with pytest.raises(TypeError, match=r"messages are \[.*, not .*[?]"):
            method(messages)


async def test_messages_may_come_one_by_one(flow: Workflow, engine: Engine) -> None:
    draft = flow.ask(user("Draft."))
    messages: Any = iter(user(f"Shorten: {draft}"))
    await flow.ask(messages)
    assert engine.contents == ["Draft.", f"Shorten: {await draft}"]


async def test_a_request_stays_as_it_was_asked(flow: Workflow, engine: Engine) -> None:
    parts, stop = [{"type": "text", "text": "first"}], ["A"]
    asked = flow.ask(user(parts), stop=stop)
    parts[0]["text"] = stop[0] = "changed"
    await asked
    assert engine.contents == [[{"type": "text", "text": "first"}]]
    assert engine.bodies == [{"stop": ["A"]}]


async def test_extra_body_is_part_of_the_body(flow: Workflow, engine: Engine) -> None:
    await flow.ask(user("?"), max_tokens=3, extra_body={"guided_regex": "a*"})
    with pytest.raises(TypeError, match="extra_body cannot have 'messages'"):
        flow.ask(user("?"), extra_body={"messages": []})
    several: Any
    for several in ({"n": 2}, {"extra_body": {"n": 2}}):
        with pytest.raises(ValueError, match="n is 2; an answer is one text"):
            flow.ask(user("?"), **several)
    assert engine.bodies == [{"max_tokens": 3, "guided_regex": "a*"}]


async def test_tool_calls_of_an_answer_are_available(flow: Workflow) -> None:
    answer = flow.ask(user("?"), model="tool_calls", tools=[{"type": "function"}])
    assert await answer == "" and answer.finish_reason == "tool_calls"
    calls = [(call["id"], *call["function"].values()) for call in answer.tool_calls]
    assert calls == [("c0", "look", '{"at": "it"}'), ("c1", "walk", "{}")]


async def test_an_error_that_nobody_awaited_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with workflow(Engine()) as flow:
        flow.ask(user("?"), model="none", name="lost")
        read = flow.ask(user("?"), model="none", name="read")
        flow.ask(user(f"Read {read}"), model="stop", name="reader")
        awaited = flow.ask(user("?"), model="none", name="awaited")
        flow.ask(user("?"), model="stop", name="cancelled").cancel()
        with pytest.raises(BadAnswer):
            await awaited
    # The reader fails with the failure of the text that it reads.
    failed = [each.getMessage().split()[0] for each in caplog.records]
    assert failed == ["lost", "reader"]


def test_a_workflow_is_used_in_its_block() -> None:
    engine = Engine()
    flow = workflow(engine)
    with pytest.raises(RuntimeError, match="use it inside `async with Workflow"):
        flow.ask(user("?"))

    async def run() -> str:
        async with flow:
            with pytest.raises(RuntimeError, match="is running already"):
                await flow.__aenter__()
            return await flow.ask(user("?"))

    assert asyncio.run(run()) == "It is 18."


async def test_leaving_a_workflow_in_another_task() -> None:
    flow, may_leave = workflow(Engine()), asyncio.Event()
    waiting: list[Text] = []

    async def enter() -> None:
        await flow.__aenter__()
        waiting.append(flow.ask(user(f"Read {flow.text('never')}")))
        await may_leave.wait()

    entering = asyncio.create_task(enter())
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(RuntimeError, match="entered in another task"):
        await flow.__aexit__(None, None, None)
    with pytest.raises(UpstreamCancelled):
        await waiting[0]
    may_leave.set()
    await entering


async def test_fields_of_a_prompt_are_rendered() -> None:
    engine = Engine()
    fields: dict[str, Any] = {
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "continue_final_message": True,
    }
    async with Workflow(engine) as flow:  # type: ignore[arg-type]
        draft = flow.text("draft")
        answer = flow.ask(user(f"{draft}"), temperature=0, extra_body={"thinking": True}, **fields)
        await until(lambda: engine.rendered)
        draft.close()
        await answer
    assert engine.rendered == [{**fields, "thinking": True}]


async def test_a_problem_of_rendering_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmoa.link.prompt_feed._logged", set())
    events: list[Event] = []
    engine = Engine()
    async with Workflow(engine, listener=events.append) as flow:  # type: ignore[arg-type]
        for number in range(3):
            with flow.text() as text:
                answer = flow.ask(user(f"{text}"))
                await until(lambda: len(engine.rendered) > number)  # noqa: B023
            await answer
    assert len(warnings(caplog)) == 1 and len(of_kind(events, LinkDeclined)) == 3
    assert [note.kind for note in flow.report.notes] == ["declined"] * 3
    assert len(flow.report.calls) == 3


async def test_requests_are_in_the_clients_namespace() -> None:
    namespace = {"cache_salt": "tenant"}
    async with (
        hung_engine() as engine,
        EngineClient(engine.url, model="base:adapter", namespace=namespace) as client,
        Workflow(client) as flow,
    ):
        draft = flow.text("draft")
        flow.expect(user(f"Read {draft}"))
        await engine.until("open")
        await flow.ask(user("?"))
    (opened,), (chat,) = engine.bodies("open"), engine.bodies("chat")
    for body in (opened, chat):
        assert (body["cache_salt"], body["model"]) == ("tenant", "base:adapter")
