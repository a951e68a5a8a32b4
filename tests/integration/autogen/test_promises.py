"""A mixture of agents written by hand on autogen-core: linked by ``promise``, same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from autogen_core import (
    AgentId,
    CancellationToken,
    FunctionCall,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    SystemMessage,
    UserMessage,
)

from flashmoa import UpstreamCancelled
from flashmoa.autogen import EngineUsage, FlashMoAChatCompletionClient
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient
WORKERS, LAYERS = 3, 3


@dataclass
class Task:
    task: str
    earlier: list[str]


@dataclass
class Done:
    result: str


@dataclass
class Whole:
    task: str


def prompt(task: str, earlier: list[str]) -> list[Any]:
    """Return a prompt that begins with what is known long before the earlier texts."""
    if not earlier:
        return [UserMessage(content=task, source="user")]
    numbered = "\n\n".join(f"{number}. {text}" for number, text in enumerate(earlier, 1))
    asked = UserMessage(content=f"Make one answer of these.\n{numbered}", source="user")
    return [SystemMessage(content=task), asked]


class Worker(RoutedAgent):
    def __init__(self, client: Client, promises: bool) -> None:
        super().__init__("worker")
        self._client = client
        self._promises = promises

    @message_handler
    async def work(self, message: Task, ctx: MessageContext) -> Done:
        # This line is all that linking takes.
        ask = self._client.promise if self._promises else self._client.create
        result = await ask(prompt(message.task, message.earlier))
        assert isinstance(result.content, str)
        return Done(result.content)


class Orchestrator(RoutedAgent):
    def __init__(self, client: Client, last: list[Any]) -> None:
        super().__init__("orchestrator")
        self._client = client
        self._last = last

    @message_handler
    async def run(self, message: Whole, ctx: MessageContext) -> Done:
        earlier: list[str] = []
        for layer in range(LAYERS - 1):
            workers = [AgentId("worker", f"{layer}/{number}") for number in range(WORKERS)]
            task = Task(message.task, earlier)
            results = await asyncio.gather(*(self.send_message(task, worker) for worker in workers))
            earlier = [result.result for result in results]
        result = await self._client.create(prompt(message.task, earlier))
        self._last.append(result)
        return Done(str(result.content))


@pytest.fixture
async def clients(engine: LocalEngine) -> AsyncGenerator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**more: Any) -> Client:
        settings = {"temperature": 0, "max_tokens": 16, "base_url": engine.url, **more}
        client = Client(model="tiny", extra_body={"ignore_eos": True}, **settings)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


async def mixture(client: Client, task: str, promises: bool, reader: Client | None = None) -> Any:
    last: list[Any] = []
    runtime = SingleThreadedAgentRuntime()
    await Worker.register(runtime, "worker", lambda: Worker(client, promises))
    await Orchestrator.register(
        runtime, "orchestrator", lambda: Orchestrator(reader or client, last)
    )
    runtime.start()
    await runtime.send_message(Whole(task), AgentId("orchestrator", "default"))
    await runtime.stop_when_idle()
    return last[0]


async def test_a_program_with_promises_answers_as_without(
    clients: Callable[..., Client], downstream: LocalEngine, guide: str
) -> None:
    """The reader has an engine of its own, in which streams need not wait for decodes.

    The task and each earlier text are longer than the fewest tokens that any engine holds worth a
    forward of their own.
    """
    client, reader = clients(max_tokens=192), clients(base_url=downstream.url)
    answers: list[Any] = []
    for promises in (False, True):
        await client.engine.flush_cache()
        await reader.engine.flush_cache()
        answers.append(await mixture(client, guide[:2000], promises=promises, reader=reader))
    plain, linked = answers
    assert linked.content == plain.content
    assert isinstance(linked.usage, EngineUsage)
    assert linked.usage.prompt_tokens == plain.usage.prompt_tokens
    # More than was known beforehand: text streamed, too.
    assert linked.usage.streamed_tokens > reader.count_tokens(prompt(guide[:2000], [""]))
    await wait_until_idle(client.engine)
    await wait_until_idle(reader.engine)


async def test_a_promise_is_replaced_by_its_text(clients: Callable[..., Client]) -> None:
    client = clients()
    asked = [UserMessage(content="Go.", source="user")]
    promised = await client.promise(asked)
    text = (await client.create(asked)).content
    assert promised.content != text
    assert await client.result(f"<{promised.content}>") == f"<{text}>"
    assert await client.result("no promise in it") == "no promise in it"


async def test_a_failed_promise_fails_its_readers(
    clients: Callable[..., Client], guide: str
) -> None:
    client, broken = clients(), clients(max_tokens=-3)
    promised = await broken.promise([UserMessage(content="Go.", source="user")])
    with pytest.raises(Exception, match="must be at least 0"):
        await client.create([UserMessage(content=f"{guide[:500]} {promised.content}", source="u")])
    await wait_until_idle(client.engine)


async def test_a_refused_reader_releases_its_stream(
    clients: Callable[..., Client], guide: str
) -> None:
    client, broken = clients(max_tokens=200), clients(max_tokens=-3)
    promised = await client.promise([UserMessage(content="Go.", source="user")])
    with pytest.raises(Exception, match="must be at least 0"):
        await broken.create([UserMessage(content=f"{guide[:500]} {promised.content}", source="u")])
    await wait_until_idle(client.engine)


async def test_closing_a_client_ends_its_promises(
    clients: Callable[..., Client], guide: str
) -> None:
    client, other = clients(max_tokens=20000), clients()
    promised = await client.promise([UserMessage(content="Go.", source="user")])
    reading = await other.promise(
        [UserMessage(content=f"{guide[:500]} {promised.content}", source="user")]
    )
    with anyio.fail_after(30):
        while (await other.engine.info()).prompt_streams == 0:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    await client.close()
    with pytest.raises(UpstreamCancelled):
        await other.result(str(reading.content))
    await wait_until_idle(other.engine)


async def test_a_cancelled_reader_stops_waiting(clients: Callable[..., Client], guide: str) -> None:
    client, other, token = clients(max_tokens=20000), clients(), CancellationToken()
    promised = await client.promise([UserMessage(content="Go.", source="user")])
    asked = [UserMessage(content=f"{guide[:500]} {promised.content}", source="user")]
    async with anyio.create_task_group() as group:

        async def cancel() -> None:
            while (await other.engine.info()).prompt_streams == 0:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            token.cancel()

        group.start_soon(cancel)
        with anyio.fail_after(30), pytest.raises(asyncio.CancelledError):
            await other.create(asked, cancellation_token=token)
    await client.close()
    await wait_until_idle(other.engine)
    with pytest.raises(RuntimeError, match="closed"):
        await client.promise(asked)


async def test_cancelling_one_promise_leaves_the_others(clients: Callable[..., Client]) -> None:
    client, token = clients(max_tokens=300), CancellationToken()
    asked = [UserMessage(content="Go.", source="user")]
    cancelled = await client.promise(asked, cancellation_token=token)
    other = await client.promise(asked)
    with anyio.fail_after(30):
        while (await client.engine.info()).kv[0].protected == 0:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    token.cancel()
    with pytest.raises(UpstreamCancelled):
        await client.result(str(cancelled.content))
    assert await client.result(str(other.content)) == (await client.create(asked)).content
    await wait_until_idle(client.engine)


async def test_promises_made_at_once_end_with_their_client(clients: Callable[..., Client]) -> None:
    client = clients(max_tokens=20000)
    asked = [UserMessage(content="Go.", source="user")]
    promised = [await client.promise(asked) for _ in range(3)]
    await client.close()
    for promise in promised:
        with pytest.raises(UpstreamCancelled):
            await client.result(str(promise.content))
    async with EngineClient(client.engine.url) as engine:
        await wait_until_idle(engine)


async def test_marks_are_replaced_in_all_kinds_of_messages(
    clients: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = clients()
    promised = str((await client.promise([UserMessage(content="Go.", source="user")])).content)
    text = await client.result(promised)

    def reading(content: str) -> list[Any]:
        call = FunctionCall(id="1", name="look", arguments="{}")
        result = FunctionExecutionResult(content=content, name="look", call_id="1")
        return [
            UserMessage(content=[f"Read <{content}>"], source="user"),
            AssistantMessage(content=[call], source="one"),
            FunctionExecutionResultMessage(content=[result]),
        ]

    result = await client.create(reading(promised))
    assert result.content == (await client.create(reading(text))).content
    assert result.usage.prompt_tokens == client.count_tokens(reading(text))
    lost = "\u27e6promise-1:0123456789abcdef\u27e7"
    await client.create([UserMessage(content=lost, source="user")])
    assert f"{lost} stays as it is" in caplog.text
    await wait_until_idle(client.engine)
