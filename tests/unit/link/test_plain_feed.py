"""Test links to engines without the plugin: their prefills, reports and ends."""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient, EngineSettings, PromptUsage, StreamState
from flashmoa.engine.plain import PlainServer
from flashmoa.errors import EngineUnreachable, PluginMissing
from flashmoa.link.learned_texts import common_prefix
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.observe import Event, LinkAdvanced, LinkClosed, LinkOpened, Listener
from flashmoa.observe.events import LATE, ignore
from tests.unit.events import of_kind
from tests.waiting import until

HEAD = "head" * 100


class FakeServer(PlainServer):
    """Takes four characters for a token. Finds prefilled prompts again, unless it ``forgets``."""

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]
        self.prompts: list[str] = []
        self.namespaces: list[Mapping[str, str]] = []
        self.hangs = False
        self.may_answer = anyio.Event()
        self.may_answer.set()
        self.cancelled = 0
        self.error: Exception | None = None
        self._forgets = forgets

    async def prefill(
        self, prompt: str, namespace: Mapping[str, str]
    ) -> tuple[PromptUsage, float | None]:
        known = max((common_prefix(prompt, each) for each in self.prompts), default=0)
        cached = 0 if self._forgets else known // 4
        self.prompts.append(prompt)
        self.namespaces.append(namespace)
        try:
            await (anyio.sleep_forever() if self.hangs else self.may_answer.wait())
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        # The time that this takes says nothing.
        tokens = len(prompt) // 4
        return PromptUsage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=cached), None

    async def wait_for(self, prompts: int) -> None:
        """Wait until N prompts have been sent."""
        await until(lambda: len(self.prompts) >= prompts)


class PlainEngine(EngineClient):
    """An engine without the plugin."""

    def __init__(self, server: FakeServer, **options: Any) -> None:
        super().__init__("http://127.0.0.1:9", **options)
        self.plain = server

    async def open_stream(self, **_: object) -> StreamState:
        raise PluginMissing("http://127.0.0.1:9 runs without the flashmoa-sglang plugin")


@asynccontextmanager
async def running(link: Link) -> AsyncGenerator[Link]:
    async with anyio.create_task_group() as group:
        group.start_soon(link.run)
        yield link
        link.end("closed")


def make_link(
    server: FakeServer, listener: Listener = ignore, *segments: str | Slot, **options: Any
) -> Link:
    """Return a link to a prompt, by default ``HEAD`` and the text of A."""
    prompt, expect = Prompt(segments or [HEAD, Slot("A")]), {"A": options.pop("expected", None)}.get
    engine = PlainEngine(server, **options)
    return Link(engine, prompt, agent="B", expect=expect, listener=listener)


settle = anyio.wait_all_tasks_blocked


async def test_written_text_is_sent_in_halves() -> None:
    server, events = FakeServer(), list[Event]()
    async with running(make_link(server, events.append, expected=800)) as link:
        await settle()
        for _ in range(80):
            link.feed("A", "word" * 10)
            await settle()
        assert link.claim() is None
    sizes = [len(prompt) // 4 for prompt in server.prompts]
    assert sizes == [100, 100 + 400, 100 + 600, 100 + 700, 100 + 770]
    assert all(prompt.startswith(HEAD) for prompt in server.prompts)
    kinds = [type(event) for event in events]
    assert kinds == [LinkOpened, *[LinkAdvanced] * 5, LinkClosed]
    assert [event.prefilled_tokens for event in of_kind(events, LinkAdvanced)] == sizes
    (closed,) = of_kind(events, LinkClosed)
    assert (closed.reason, closed.stream_id, link.used_id) == ("used", *[link.stream_id] * 2)
    assert link.stream_id is not None and link.unused_reason != LATE


@pytest.mark.parametrize(("without_plugin", "head"), [("prefill", "short"), ("off", HEAD)])
async def test_a_short_prompt_is_left_to_its_request(without_plugin: Any, head: str) -> None:
    """And so are all prompts if a program does not want prefills."""
    server, events = FakeServer(), list[Event]()
    settings = EngineSettings(without_plugin=without_plugin)
    link = make_link(server, events.append, head, Slot("A"), engine_settings=settings)
    async with running(link):
        link.feed("A", "text")
        link.close_slot("A")
        await settle()
        assert link.claim() is None and link.unused_reason != LATE
    assert server.prompts == [] and link.used_id is None
    (closed,) = events
    assert isinstance(closed, LinkClosed) and closed.reason == "plain engine"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_request_or_an_end_cancels_the_step(is_cancelled: bool) -> None:
    server, events = FakeServer(), list[Event]()
    server.hangs = True
    link = make_link(server, events.append)
    async with anyio.create_task_group() as group:
        group.start_soon(link.run)
        await server.wait_for(1)
        # While it is under way, nothing else is sent.
        link.feed("A", HEAD)
        await settle()
        if is_cancelled:
            group.cancel_scope.cancel()
        else:
            assert link.claim() is None
    assert server.cancelled == len(server.prompts) == 1
    assert [type(event) for event in events] == [LinkOpened, LinkClosed]


async def test_a_complete_unused_prompt_is_sent() -> None:
    server = FakeServer()
    async with running(make_link(server, ignore, HEAD, Slot("A"), " end")) as link:
        await server.wait_for(1)
        link.feed("A", HEAD)
        await server.wait_for(2)
        link.feed("A", HEAD)
        link.close_slot("A")
        await server.wait_for(3)
        assert server.prompts[-1].endswith(" end")
        assert link.claim() is None


async def test_a_cache_that_forgets_gets_no_more_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, events = FakeServer(forgets=True), list[Event]()
    async with running(make_link(server, events.append)) as link:
        await settle()
        for _ in range(50):
            link.feed("A", HEAD)
            await settle()
        assert link.claim() is None
    assert len(server.prompts) == 2
    assert "has not kept the prompt" in caplog.text
    (closed,) = of_kind(events, LinkClosed)
    assert (closed.reason, closed.stream_id) == ("used", link.stream_id)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineUnreachable("the server is gone"), "EngineUnreachable: the server is gone"),
        (PluginMissing("no route"), "plain engine"),
    ],
)
async def test_an_error_of_the_server_ends_only_the_link(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, events = FakeServer(), list[Event]()
    server.error = error
    # It is a warning the first time only, which may have been in another test.
    caplog.set_level(logging.DEBUG)
    async with running(make_link(server, events.append)) as link:
        await settle()
        link.feed("A", HEAD)
        assert link.claim() is None
    assert [event.reason for event in of_kind(events, LinkClosed)] == [reason]
    is_known = reason == "plain engine"
    assert ("Its request is sent all the same" in caplog.text) is not is_known


async def test_a_prompt_that_becomes_another_is_sent() -> None:
    server = FakeServer()
    async with running(make_link(server)) as link:
        await server.wait_for(1)
        assert link.become(Prompt([HEAD, HEAD, Slot("C")]))
        await server.wait_for(2)
    assert server.prompts == [HEAD, HEAD * 2]


async def test_replaced_text_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    async with running(make_link(server)) as link:
        await server.wait_for(1)
        link.feed("A", "draft " * 200)
        await server.wait_for(2)
        link.replace("A", "")
        await settle()
        assert len(server.prompts) == 2
        link.feed("A", "final " * 200)
        await server.wait_for(3)
        link.replace("A", "final " * 190 + "other " * 200)
        await server.wait_for(4)
        assert link.claim() is None
    texts = ["", "draft " * 200, "final " * 200, "final " * 190 + "other " * 200]
    assert server.prompts == [HEAD + text for text in texts]
    # The unchanged part of the prompt was in the cache.
    assert "has not kept" not in caplog.text


async def test_text_replaced_in_a_step_is_sent_again() -> None:
    server = FakeServer()
    server.may_answer = anyio.Event()
    async with running(make_link(server)) as link:
        link.feed("A", "draft " * 200)
        await server.wait_for(1)
        link.replace("A", "final " * 200)
        server.may_answer.set()
        await server.wait_for(2)
    assert server.prompts == [f"{HEAD}{'draft ' * 200}", f"{HEAD}{'final ' * 200}"]


@pytest.mark.parametrize("given", [None, {"cache_salt": "of the request"}])
async def test_steps_have_the_namespace_of_the_request(given: dict[str, str] | None) -> None:
    server = FakeServer()
    engine = PlainEngine(server)
    engine.namespace = {"cache_salt": "of the client"}
    async with running(Link(engine, Prompt([HEAD, Slot("A")]), agent="B", namespace=given)):
        await server.wait_for(1)
    assert server.namespaces == [given or engine.namespace]
