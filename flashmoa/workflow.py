"""Link calls without an agent framework: put texts that are still being written into prompts.

Write ``f"Review this: {draft}"`` where the draft's text will be. The reader's engine prefills
everything before that place at once, and the draft as it is written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup

from flashmoa._concurrency import setting
from flashmoa._limits import MAX_CALLS_AT_ONCE, MAX_REMEMBERED, Recent
from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.client import request_headers
from flashmoa.engine.generation import add_tool_calls, check_ending
from flashmoa.engine.wire import Delta
from flashmoa.link.failure_policy import FailurePolicy, OnFailure, UpstreamCancelled
from flashmoa.link.options import LinkOptions, LinkSettings, Session
from flashmoa.link.pending_request import PendingRequest
from flashmoa.link.reasons import NO_LINKS
from flashmoa.link.streamed_text import StreamedText, Text, find_texts
from flashmoa.observe.calls import CallReporter
from flashmoa.observe.events import WHOLE
from flashmoa.observe.report import Report, Reported
from flashmoa.observe.trace import end_trace

logger = logging.getLogger(__name__)

# Fields that `ask` sends itself. The others would change the form of an answer, or are parameters
# of OpenAI's client outside of a request's body.
_OWN = frozenset({"messages", "stream", "stream_options"})
_OTHERS = _OWN | {"functions", "function_call", "extra_headers", "extra_query", "timeout"}

Messages = Sequence[Mapping[str, Any]]
Pending = PendingRequest
AnyText = TypeVar("AnyText", bound=StreamedText)


class Answer(StreamedText):
    """The answer to a request of :meth:`Workflow.ask`.

    Attributes:
        usage: the token usage, once the answer is complete.
        finish_reason: OpenAI's ``finish_reason``, once the answer is complete.
        logprobs: the natural log-probabilities of its tokens so far, if requested with
            ``logprobs=True``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._session = name
        self.usage: PromptUsage | None = None
        self.finish_reason: str | None = None
        self.logprobs: list[float] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._request_scope = anyio.CancelScope()

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The answer's tool calls so far, as in OpenAI's messages.

        They are no part of its text, which is often empty. ``finish_reason`` is then
        ``tool_calls``.
        """
        return [self._tool_calls[place] for place in sorted(self._tool_calls)]

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context for the reader of the engine's answer; for subclasses."""
        return nullcontext()

    def _take(self, delta: Delta) -> bool:
        """Add a step of the engine's answer. Return whether to read on."""
        self.usage = delta.usage or self.usage
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.logprobs += delta.logprobs
        add_tool_calls(self._tool_calls, delta.tool_calls)
        if delta.text:
            self._write(delta.text)
        return True

    def report_unread_error(self) -> None:
        """Log the exception that it failed with, unless that was raised in a reader."""
        if (error := self.unread_error) is not None:
            self._was_raised = True
            logger.warning("%s failed, and nobody awaited it: %s", self.name, error)

    __del__ = report_unread_error

    def cancel(self) -> None:
        """Stop its engine from writing it; each link that waits for it acts by its policy.

        Awaiting the answer then raises :class:`UpstreamCancelled`.
        """
        self._fail(UpstreamCancelled(f"{self.name} was cancelled"))
        self._request_scope.cancel()


class Workflow(Reported):
    """Sends calls to one or several engines, and links each call to the texts in its prompt.

    Args:
        engine: the engine that requests are sent to by default.
        options: see :class:`flashmoa.LinkOptions`, also for exceptions.

    Print it to see what the links have gained so far. Use it as a context manager, which the same
    task enters and leaves. Leaving it waits for the requests that it sends, or cancels them if an
    exception leaves it. Then it ends its links and releases the streams of requests that were never
    sent; if an engine does not answer within 0.3 s, the streams expire there. The engine clients
    stay open.

    It may run for ever: it only keeps the texts that you keep, and the last 4,096 texts that were
    put into strings before they were complete.
    """

    def __init__(self, engine: EngineClient, **options: Unpack[LinkOptions]) -> None:
        self._engine = engine
        self._settings = LinkSettings(**options)
        self._listener = self._settings.listen()
        self._session = Session(self._settings.session_headers)
        self.report = Report(self._listener)
        # The texts in use, by mark and by name. A request keeps its answer until it is complete.
        self._texts: WeakValueDictionary[str, StreamedText] = WeakValueDictionary()
        self._named: WeakValueDictionary[str, StreamedText] = WeakValueDictionary()
        self._marked: deque[StreamedText] = deque(maxlen=MAX_REMEMBERED)
        self._numbers = Recent[str, int]()  # The last number that each name got.
        # By name, the last answer whose request is in the name's session.
        self._in_session: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        self._expected: deque[Pending] = deque(maxlen=MAX_CALLS_AT_ONCE)
        # The groups, and the id of the task that has entered the workflow.
        self._groups: tuple[TaskGroup, TaskGroup, int] | None = None

    @property
    def _requests(self) -> TaskGroup:
        return self._entered()[0]

    @property
    def _links(self) -> TaskGroup:
        return self._entered()[1]

    def _entered(self) -> tuple[TaskGroup, TaskGroup, int]:
        if self._groups is None:
            raise RuntimeError(
                "the workflow is not running; use it inside `async with Workflow(engine) as flow:`"
            )
        return self._groups

    async def __aenter__(self) -> Self:
        if self._groups is not None:
            raise RuntimeError("the workflow is running already; make another Workflow")
        requests, links = anyio.create_task_group(), anyio.create_task_group()
        await links.__aenter__()
        await requests.__aenter__()
        self._groups = requests, links, anyio.get_current_task().id
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        requests, links, task = self._entered()
        if anyio.get_current_task().id != task:
            self._give_up()
            raise RuntimeError(
                "the workflow was entered in another task than it is left in, and its requests "
                "were cancelled; put the whole `async with` block into one task, or into one cell "
                "of a notebook"
            )
        try:
            return await requests.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # A request's error is raised where its answer is awaited. So the group usually has only
            # the exception that was raised inside the block.
            if group.exceptions != (error,):
                raise
            return False
        finally:
            # All streams are released at once; see flashmoa.link.prompt_feed.
            for pending in self._expected:
                links.start_soon(pending.delete_claimed_stream)
            links.cancel_scope.cancel()
            await links.__aexit__(None, None, None)
            self._groups = None
            end_trace(self._listener)
            self._expected.clear()
            self._marked.clear()
            for answer in self._answers():
                answer.report_unread_error()

    def text(self, name: str = "text") -> Text:
        """Make a text for you to write, from any source."""
        return self._add(Text(self._unused_name(name)))

    def version(self, answer: Answer) -> Text:
        """Make a text for you to write: an answer in another form, cut or after a heading.

        It has the answer's name, so that events name the answer's writer. A prompt can have only
        one text with a given name.
        """
        return self._add(Text(answer.name))

    def ask(
        self,
        messages: Messages,
        *,
        engine: EngineClient | None = None,
        name: str = "answer",
        on_failure: OnFailure | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> Answer:
        """Send a chat completion as soon as every text in its messages is complete.

        Args:
            messages: the messages, with ``f"{text}"`` where a text will be.
            engine: the engine to send it to; by default the workflow's.
            name: the answer's name, for events; it gets a number if another text has the name.
            on_failure: the action on the request when a text in it fails; by default the
                workflow's.
            extra_body: more fields of the request's body, as for OpenAI's client.
            parameters: other fields of the request's body, of OpenAI's chat completions or the
                server's own. Calls of ``tools`` are no text; see :attr:`Answer.tool_calls`.

        Errors are raised where the answer is awaited, also if it is cut off. If nobody has awaited
        a failed answer, a warning is logged when it is dropped or the workflow is left.

        Raises: TypeError if a parameter belongs to OpenAI's client or to ``ask()`` itself, or these
            are no messages; ValueError if two texts in the messages have the same name, a text is
            of another workflow, its mark was changed, or is in a parameter, or ``n`` is above 1;
            RuntimeError outside of the workflow.
        """
        requests, parameters = self._requests, _check(parameters, extra_body or {}, self._texts)
        answer = self._add(Answer(self._unused_name(name)))
        policy = on_failure or self._settings.policy(name)
        pending = self._make_pending(messages, answer.name, policy)
        before = self._in_session.get(name)
        # Routers keep a session on one engine, where calls at the same time would wait.
        if before is None or before.is_over or before in pending._texts:
            self._in_session[name], answer._session = answer, name
        requests.start_soon(self._run_request, answer, pending, engine or self._engine, parameters)
        return answer

    def expect(
        self,
        messages: Messages,
        *,
        engine: EngineClient | None = None,
        name: str = "request",
        on_failure: OnFailure | None = None,
        namespace: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Pending:
        """Announce a request that any client will send, and prefill its prompt until then.

        Args:
            messages, engine, on_failure: as for :meth:`ask`.
            name: the name of the agent that sends it, for events.
            fields: the request's other fields that shape its prompt, such as ``tools``; see
                ``flashmoa.engine.prompt_fields``.
            namespace: the namespace of its KV: the request's ``cache_salt``, ``extra_key`` or
                ``lora_path``, if any; by default the engine client's.

        Raises: TypeError if these are no messages; ValueError if two texts in the messages have the
            same name; RuntimeError outside of the workflow.
        """
        self._entered()
        pending = self._make_pending(messages, name, on_failure or self._settings.policy(name))
        with setting(request_headers, self._session.headers(name)):
            engine = engine or self._engine
            self._link(pending, engine, {**(namespace or engine.namespace), **deepcopy(fields)})
        self._expected.append(pending)
        return pending

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function concurrently; leaving the workflow waits for it, or cancels it."""
        self._requests.start_soon(function)

    def _make_pending(self, messages: Messages, name: str, on_failure: OnFailure) -> Pending:
        try:
            # The program may change them while they wait for texts.
            copies = deepcopy([*map(dict, messages)])
        except (TypeError, ValueError):
            expected = '[{"role": ..., "content": ...}, ...]'
            raise TypeError(f"messages are {expected}, not {messages!r:.100}") from None
        texts = find_texts(copies, self._texts)
        names = [text.name for text in texts]
        if len(set(names)) < len(names):
            raise ValueError(
                f"{name} reads two versions of one answer: {', '.join(names)}; put only one of "
                "them into its messages"
            )
        return PendingRequest(
            copies,
            texts,
            FailurePolicy.of(on_failure),
            name,
            self.report,
            streams=self._settings.ahead == "text",
        )

    def _link(self, pending: Pending, engine: EngineClient, body: Mapping[str, Any]) -> None:
        if self._settings.ahead != "nothing":
            self._links.start_soon(pending.prepare_link(engine, body))

    async def _run_request(
        self,
        answer: Answer,
        pending: Pending,
        engine: EngineClient,
        parameters: dict[str, Any],
    ) -> None:
        headers = self._session.headers(answer._session)
        with answer._request_scope, setting(request_headers, headers):
            try:
                if pending.is_waiting:
                    own = {"model": engine.model, **engine.namespace, **parameters}
                    self._link(pending, engine, own)
                await self.send(answer, None, parameters, engine=engine, pending=pending)
                answer._close()
            except BaseException as error:
                if isinstance(error, Exception):
                    # The frames of a traceback would keep the request.
                    answer._fail(error.with_traceback(None))
                else:
                    answer._fail(UpstreamCancelled(f"{answer.name} was cancelled"))
                self._links.start_soon(pending.release_and_wait)
                if not isinstance(error, Exception):
                    raise

    async def send(
        self,
        answer: Answer,
        messages: Messages | None,
        parameters: Mapping[str, Any],
        *,
        engine: EngineClient,
        pending: Pending | None,
        agent: str = "",
    ) -> None:
        """Send a request, and add the engine's answer to ``answer``, which stays open.

        Args:
            messages: the messages to send; ``None`` for the messages of ``pending``, once they are
                complete.
            pending: the announced request, if there is one.
            agent: the agent's name, for events; by default the answer's.

        Raises: EngineError if the request fails, or its answer is cut off; any exception of
            ``Answer._reading``.
        """
        report = CallReporter(
            self.report,
            agent=agent or answer.name,
            engine=engine.url,
            model=parameters.get("model", ""),
        )
        begin = len(answer.written)
        try:
            if messages is None:
                assert pending is not None
                messages = await pending.messages()
            body, stream_id, unlinked = {**parameters}, None, WHOLE
            if pending is not None:
                body |= pending.claim()
                stream_id = body.get("prompt_stream_id") or pending.used_id
                unlinked = pending.unlinked
            report.started(stream_id, NO_LINKS if self._settings.ahead == "nothing" else unlinked)
            report.prompt_sent({**body, "messages": messages})
            with answer._reading():
                async with engine.chat(messages, **body) as deltas:
                    async for delta in deltas:
                        if delta.text:
                            report.text_arrived()
                        if not answer._take(delta):
                            break
            check_ending(answer.finish_reason, engine.url)
        except BaseException as error:
            report.failed(error)
            raise
        report.finished(answer.written[begin:], answer.usage, answer.finish_reason)
        if pending is not None and pending.is_unnamed:
            self._links.start_soon(pending.delete_claimed_stream)

    def _give_up(self) -> None:
        """Cancel every request, and release the streams, from another task than the workflow's."""
        for answer in self._answers():
            answer.cancel()
        for pending in self._expected:
            self._links.start_soon(pending.release_and_wait)

    def _answers(self) -> list[Answer]:
        return [text for text in self._texts.values() if isinstance(text, Answer)]

    def _add(self, text: AnyText) -> AnyText:
        """Register a text, and return it."""
        self._texts[text._mark] = self._named[text.name] = text
        text._marked = self._marked
        return text

    def _unused_name(self, name: str) -> str:
        """Return the name, with a number if another text has or had it."""
        number = self._numbers.get(name, 0) + 1
        choice = name if number == 1 else f"{name}-{number}"
        while choice in self._named or choice in self._numbers:
            number += 1
            choice = f"{name}-{number}"
        self._numbers[name] = number
        return choice


def _check(
    parameters: dict[str, Any], extra_body: Mapping[str, Any], texts: Mapping[str, StreamedText]
) -> dict[str, Any]:
    """Return the parameters and the extra body in one. Raises: see `Workflow.ask`."""
    if unknown := sorted(parameters.keys() & _OTHERS):
        raise TypeError(
            f"ask() has no parameter {unknown[0]!r}; functions go into tools, and headers and "
            "timeouts to the EngineClient"
        )
    merged = deepcopy({**parameters, **extra_body})
    if taken := sorted(extra_body.keys() & _OWN):
        raise TypeError(f"extra_body cannot have {taken[0]!r}, which ask() itself sends")
    if (merged.get("n") or 1) != 1:
        raise ValueError(f"n is {merged['n']}; an answer is one text, so ask several times")
    if inside := find_texts(merged, texts):
        raise ValueError(
            f"{inside[0].name!r} is in a parameter, where its text would not be filled in; put it "
            "into the messages, or await it and use the string"
        )
    return merged
