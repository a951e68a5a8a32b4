"""Linking calls without an agent framework: texts that are still being written, in prompts.

Write a text's name where its text will be, ``f"Review this: {draft}"``; the engine that will
read it prefills everything up to there at once, and the rest as it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio

from flashmoa._concurrency import in_haste
from flashmoa.engine import EngineClient, PromptUsage, kv_namespace
from flashmoa.engine.client import checked_ttl
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure, UpstreamCancelled
from flashmoa.linking.link import Ahead
from flashmoa.linking.pending_request import Reading
from flashmoa.linking.streamed_text import Text, mentioned, replaced
from flashmoa.observe import Listener, contained, ignore
from flashmoa.observe.calls import CallReporter

Messages = Sequence[Mapping[str, Any]]


class Answer(Text):
    """The answer to a request of :meth:`Workflow.ask`.

    Attributes:
        usage: once it is complete.
        finish_reason: as OpenAI has it, once it is complete.
        logprobs: natural, of its tokens so far, where ``logprobs=True`` was asked for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.usage: PromptUsage | None = None
        self.finish_reason: str | None = None
        self.logprobs: list[float] = []
        self._asking = anyio.CancelScope()

    def cancel(self) -> None:
        """Its engine stops writing it; links that wait for it act by their policy.

        Awaiting it raises :class:`UpstreamCancelled`.
        """
        self.fail(UpstreamCancelled(f"{self.name} was cancelled"))
        self._asking.cancel()


class Expected:
    """A request that will be sent, whose prompt is prefilled as its texts are written."""

    def __init__(self, messages: Messages, reading: Reading) -> None:
        self._messages = messages
        self._reading = reading

    async def messages(self) -> list[dict[str, Any]]:
        """What to send, once every text in it is there. Raises: what a text failed with."""
        texts = await self._reading.whole()
        return [_with_texts(message, texts) for message in self._messages]

    def take_over(self) -> dict[str, Any]:
        """What to add to the request's body (``extra_body`` of OpenAI's client), at last: the
        link sends nothing more then."""
        stream = self._reading.take_over()
        return {"prompt_stream_id": stream} if stream is not None else {}

    @property
    def is_late(self) -> bool:
        """Whether it was taken over before its stream was open."""
        return self._reading.is_late

    async def give_back(self) -> None:
        """The request failed or will not be sent: its stream is not to wait for it."""
        await in_haste(self._reading.give_back)


class Workflow:
    """Calls of one engine, or several, that read what others of them write.

    Args:
        engine: where requests go unless they say otherwise.
        on_failure: what becomes of a request when a text in it fails, unless it says otherwise.
        ahead: of a request, what is prefilled before it can be sent: its ``text`` as it is
            written, what is ``known`` of it beforehand, or ``nothing``; to compare with.
        stream_ttl_seconds: after what time engines give back what is prefilled for requests to
            come should this process vanish; by default as their clients say.
        listener: is told what happens.

    A context manager: leaving it ends its links, gives back the streams of requests that were
    never sent (an engine that does not answer within 0.3 s lets them expire), and waits for the
    requests it sends itself, or cancels them where it is left by an exception. Its clients stay
    open.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        on_failure: OnFailure = "abort",
        ahead: Ahead = "text",
        stream_ttl_seconds: float | None = None,
        listener: Listener = ignore,
    ) -> None:
        self._engine = engine
        self._ahead: Ahead = ahead
        self._ttl = None if stream_ttl_seconds is None else checked_ttl(stream_ttl_seconds)
        self._policy = FailurePolicy.of(on_failure)
        self._listener = contained(listener)
        self._texts: dict[str, Text] = {}
        self._expected: list[Expected] = []
        self._asking = anyio.create_task_group()
        self._linking = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._linking.__aenter__()
        await self._asking.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return await self._asking.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # Requests keep their errors for whoever awaits them, so that this is only what was
            # raised inside: it goes on as it was.
            if group.exceptions != (error,):
                raise
            return False
        finally:
            # All that is given back is given back at once, and in haste.
            for expected in self._expected:
                self._linking.start_soon(expected._reading.release)
            self._linking.cancel_scope.cancel()
            await self._linking.__aexit__(None, None, None)

    def text(self, name: str = "text") -> Text:
        """A text that you write, from whatever source."""
        text = Text(self._unused(name))
        self._texts[text.mark] = text
        return text

    def version(self, answer: Answer) -> Text:
        """A text for an answer as its readers are to have it: cut, say, or behind a heading.

        You write it. It bears the answer's name, so that events tell who is read; a prompt can
        have only one text of a name.
        """
        text = Text(answer.name)
        self._texts[text.mark] = text
        return text

    def ask(
        self,
        messages: Messages,
        *,
        engine: EngineClient | None = None,
        name: str = "answer",
        on_failure: OnFailure | None = None,
        **parameters: Any,
    ) -> Answer:
        """Send a chat completion as soon as every text in its messages is there.

        Args:
            on_failure: what becomes of it when a text in its messages fails.
            parameters: of OpenAI's chat completions, and SGLang's own.

        What goes wrong is raised where the answer is awaited.
        """
        answer = Answer(self._unused(name))
        self._texts[answer.mark] = answer
        reading = self._reading(messages, answer.name, on_failure)
        self._asking.start_soon(
            self._answer, answer, messages, reading, engine or self._engine, parameters
        )
        return answer

    async def expect(  # noqa: PLR0913 - all but the messages have a default
        self,
        messages: Messages,
        *,
        engine: EngineClient | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        name: str = "request",
        on_failure: OnFailure | None = None,
        namespace: Mapping[str, str] | None = None,
    ) -> Expected:
        """Say what will be asked, by whatever client, and have its prompt prefilled meanwhile.

        Args:
            namespace: of its KV: the ``cache_salt``, ``extra_key`` or ``lora_path`` that the
                request will have, if any.
        """
        reading = self._reading(messages, name, on_failure)
        self._link(messages, reading, engine or self._engine, tools, template_args, namespace)
        expected = Expected(messages, reading)
        self._expected.append(expected)
        return expected

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something beside the requests; leaving the workflow waits for it, or cancels it."""
        self._asking.start_soon(function)

    def _reading(self, messages: Messages, name: str, on_failure: OnFailure | None) -> Reading:
        policy = self._policy if on_failure is None else FailurePolicy.of(on_failure)
        texts = mentioned(messages, self._texts)
        names = [text.name for text in texts]
        if len(set(names)) < len(names):
            raise ValueError(f"{name} reads two versions of one answer: {', '.join(names)}")
        streams = self._ahead == "text"
        return Reading(
            texts, policy, name, self._listener, streams=streams, stream_ttl_seconds=self._ttl
        )

    def _link(
        self,
        messages: Messages,
        reading: Reading,
        engine: EngineClient,
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
        namespace: Mapping[str, str] | None,
    ) -> None:
        async def render(texts: Mapping[str, str]) -> str:
            shown = [_with_texts(message, texts) for message in messages]
            return await engine.render(shown, tools=tools, template_args=template_args)

        if self._ahead != "nothing":
            self._linking.start_soon(reading.link(engine, render, namespace))

    async def _answer(
        self,
        answer: Answer,
        messages: Messages,
        reading: Reading,
        engine: EngineClient,
        parameters: dict[str, Any],
    ) -> None:
        report = CallReporter(
            self._listener,
            agent=answer.name,
            engine=engine.url,
            model=parameters.get("model", ""),
        )
        with answer._asking:
            try:
                if reading.is_waiting:
                    template_args = parameters.get("chat_template_kwargs")
                    tools = parameters.get("tools")
                    # As the request has it, or else as its client.
                    namespace = kv_namespace(parameters) or None
                    self._link(messages, reading, engine, tools, template_args, namespace)
                expected = Expected(messages, reading)
                await self._send(answer, expected, engine, parameters, report)
            except BaseException as error:
                report.failed(error)
                if isinstance(error, Exception):
                    answer.fail(error)
                else:
                    answer.fail(UpstreamCancelled(f"{answer.name} was cancelled"))
                self._linking.start_soon(reading.give_back)
                if not isinstance(error, Exception):
                    raise

    async def _send(
        self,
        answer: Answer,
        expected: Expected,
        engine: EngineClient,
        parameters: dict[str, Any],
        report: CallReporter,
    ) -> None:
        sent = await expected.messages()
        body = {**parameters, **expected.take_over()}
        report.started(body.get("prompt_stream_id"), late=expected.is_late)
        async with engine.chat(sent, **body) as deltas:
            async for delta in deltas:
                answer.usage = delta.usage or answer.usage
                answer.finish_reason = delta.finish_reason or answer.finish_reason
                answer.logprobs += delta.logprobs
                if delta.text:
                    report.text()
                    answer.write(delta.text)
        answer.close()
        report.finished(answer.written, answer.usage, answer.finish_reason)

    def _unused(self, name: str) -> str:
        """The name, or that with a number, so that every text has its own."""
        taken = {text.name for text in self._texts.values()}
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in taken)


def _with_texts(message: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    return {key: replaced(value, texts) for key, value in message.items()}
