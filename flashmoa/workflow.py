"""Link calls without an agent framework: put texts that are still being written into prompts.

Write ``f"Review this: {draft}"`` where the draft's text will be; the engine of the reader
prefills everything up to there at once, and the rest as it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import anyio

from flashmoa.engine import EngineClient, PromptUsage, kv_namespace
from flashmoa.engine.client import checked_ttl
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure, UpstreamCancelled
from flashmoa.linking.link import Ahead
from flashmoa.linking.pending_request import PendingRequest
from flashmoa.linking.streamed_text import Text, mentioned, replaced
from flashmoa.observe import Listener, contained, ignore
from flashmoa.observe.calls import CallReporter

Messages = Sequence[Mapping[str, Any]]
Pending = PendingRequest[list[dict[str, Any]]]


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
        """Have its engine stop writing it; links that wait for it act by their policy.

        Awaiting it raises :class:`UpstreamCancelled`.
        """
        self.fail(UpstreamCancelled(f"{self.name} was cancelled"))
        self._asking.cancel()


class Workflow:
    """Calls of one or several engines that read what other calls write.

    Args:
        engine: where requests go by default.
        on_failure: by default, what happens to a request when a text in it fails.
        ahead: what is prefilled before a request can be sent: its ``text`` as it is written, only
            what is ``known`` beforehand, or ``nothing``; the latter two to compare with.
        stream_ttl_seconds: after what time engines release what is prefilled for future requests
            if this process vanishes; by default as their clients say.
        listener: receives the workflow's events.

    A context manager: leaving it ends its links, releases the streams of requests that were
    never sent (an engine that does not answer within 0.3 s lets them expire), and waits for the
    requests it sends itself, or cancels them if it is left by an exception. Its clients stay
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
        self._expected: list[Pending] = []
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
            # Requests keep their errors for those who await them, so this is only what was raised
            # inside the block: it is raised as it was.
            if group.exceptions != (error,):
                raise
            return False
        finally:
            # All streams are released at once, each within the time that a cancelled task has.
            for pending in self._expected:
                self._linking.start_soon(pending.delete_claimed_stream)
            self._linking.cancel_scope.cancel()
            await self._linking.__aexit__(None, None, None)

    def text(self, name: str = "text") -> Text:
        """Make a text that you write, from any source."""
        text = Text(self._unused(name))
        self._texts[text.mark] = text
        return text

    def version(self, answer: Answer) -> Text:
        """Make a text for an answer as its readers are to get it: cut, or behind a heading.

        You write it. It has the answer's name, so that events say who is read; a prompt can have
        only one text of a name.
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
            on_failure: what happens to it when a text in its messages fails.
            parameters: of OpenAI's chat completions, and SGLang's own.

        Errors are raised where the answer is awaited.
        """
        answer = Answer(self._unused(name))
        self._texts[answer.mark] = answer
        pending = self._pending(messages, answer.name, on_failure)
        self._asking.start_soon(self._answer, answer, pending, engine or self._engine, parameters)
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
    ) -> Pending:
        """Announce a request of any client, and have its prompt prefilled meanwhile.

        Args:
            namespace: the namespace of its KV: the ``cache_salt``, ``extra_key`` or ``lora_path``
                that the request will have, if any.
        """
        pending = self._pending(messages, name, on_failure)
        self._link(pending, engine or self._engine, tools, template_args, namespace)
        self._expected.append(pending)
        return pending

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function beside the requests; leaving the workflow waits for it, or cancels it."""
        self._asking.start_soon(function)

    def _pending(self, messages: Messages, name: str, on_failure: OnFailure | None) -> Pending:
        policy = self._policy if on_failure is None else FailurePolicy.of(on_failure)
        texts = mentioned(messages, self._texts)
        names = [text.name for text in texts]
        if len(set(names)) < len(names):
            raise ValueError(f"{name} reads two versions of one answer: {', '.join(names)}")
        return PendingRequest(
            cast("list[dict[str, Any]]", messages),
            texts,
            _with_texts,
            policy,
            name,
            self._listener,
            streams=self._ahead == "text",
            stream_ttl_seconds=self._ttl,
        )

    def _link(
        self,
        pending: Pending,
        engine: EngineClient,
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
        namespace: Mapping[str, str] | None,
    ) -> None:
        async def render(shown: Messages) -> str:
            return await engine.render(shown, tools=tools, template_args=template_args)

        if self._ahead != "nothing":
            self._linking.start_soon(pending.link(engine, render, namespace))

    async def _answer(
        self,
        answer: Answer,
        pending: Pending,
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
                if pending.is_waiting:
                    template_args = parameters.get("chat_template_kwargs")
                    # As the request has it, or else as its client.
                    namespace = kv_namespace(parameters) or None
                    self._link(pending, engine, parameters.get("tools"), template_args, namespace)
                await self._send(answer, pending, engine, parameters, report)
            except BaseException as error:
                report.failed(error)
                if isinstance(error, Exception):
                    answer.fail(error)
                else:
                    answer.fail(UpstreamCancelled(f"{answer.name} was cancelled"))
                self._linking.start_soon(pending.abandon)
                if not isinstance(error, Exception):
                    raise

    async def _send(
        self,
        answer: Answer,
        pending: Pending,
        engine: EngineClient,
        parameters: dict[str, Any],
        report: CallReporter,
    ) -> None:
        sent = await pending.messages()
        body = {**parameters, **pending.claim()}
        report.started(body.get("prompt_stream_id"), late=pending.is_late)
        async with engine.chat(sent, **body) as deltas:
            async for delta in deltas:
                answer.usage = delta.usage or answer.usage
                answer.finish_reason = delta.finish_reason or answer.finish_reason
                answer.logprobs += delta.logprobs
                if delta.text:
                    report.text_arrived()
                    answer.write(delta.text)
        answer.close()
        report.finished(answer.written, answer.usage, answer.finish_reason)

    def _unused(self, name: str) -> str:
        """Return the name, with a number where a text has it already."""
        taken = {text.name for text in self._texts.values()}
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in taken)


def _with_texts(messages: list[dict[str, Any]], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    return [replaced(message, texts) for message in messages]
