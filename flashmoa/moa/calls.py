"""Ask a model for an agent's answer (``AgentCall``): time limits, retries, thought and cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from flashmoa import Answer, UpstreamCancelled
from flashmoa.engine import EngineClient, PromptUsage, kv_namespace, prompt_fields
from flashmoa.errors import EngineTimeout, EngineUnreachable, RequestRefused
from flashmoa.linking.streamed_text import find_marks
from flashmoa.moa.agents import Model, note_answer, note_attempt, note_silence
from flashmoa.moa.early_exit import confidence
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.prompts import Message, Messages
from flashmoa.moa.reading import CallReader
from flashmoa.moa.results import AgentAnswer
from flashmoa.moa.sampling import has_grammar
from flashmoa.moa.settings import CHARACTERS_PER_TOKEN
from flashmoa.observe.calls import CallReporter
from flashmoa.workflow import Pending


@dataclass(slots=True)
class _CountedRequest:
    """One request of an agent, which has cost an estimated number of tokens until it ends."""

    prompt_tokens: int
    reader: CallReader

    def spent(self) -> PromptUsage:
        estimate = PromptUsage(
            prompt_tokens=self.prompt_tokens, completion_tokens=self.reader.pieces
        )
        return self.reader.usage or estimate


class AgentCall(Answer):
    """An agent's answer, without what was thought, and the requests that write it.

    Args:
        name: the agent's name, for events.
        is_last: whether it writes the question's answer; see :class:`Budget`.
        max_pieces: number of pieces after which the answer ends, without the thought before it;
            ``None``: the model's ``max_tokens``.

    Attributes:
        asked: is set when the first request is sent, or when it is certain that none will be.
        engine: the engine of the last request.
        thought: what the model thought before it answered, which its engine has separated.
        retries: the problems of the requests that were repeated.
        error: why the answer failed; ``None`` if it did not.
        started, first_token, finished: times in Unix seconds.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        inquiry: Inquiry,
        *,
        is_last: bool = False,
        max_pieces: int | None = None,
    ) -> None:
        super().__init__(name)
        self.model = model
        self.engine: EngineClient = model.engine
        self.asked = anyio.Event()
        self.thought = ""
        self.retries: list[str] = []
        self.error: Exception | None = None
        self.started: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self._inquiry = inquiry
        self._limits = model.limits or inquiry.limits
        self._is_last = is_last
        self._max_pieces = max_pieces
        self._requests: list[_CountedRequest] = []
        inquiry.calls.append(self)

    def spent(self) -> PromptUsage:
        """Return the usage of all requests so far, partly estimated."""
        return PromptUsage.total([request.spent() for request in self._requests])

    def describe(self, record: AgentAnswer) -> None:
        """Fill the record of the agent with the answer and its figures."""
        record.engine, record.text, record.thought = self.engine.url, self.written, self.thought
        record.usage, record.finish_reason = self.usage, self.finish_reason
        record.started, record.first_token = self.started, self.first_token
        record.finished, record.retries = self.finished, self.retries
        record.confidence = confidence(self.logprobs) if self.logprobs else None
        if self.error is not None and record.status == "used":
            record.status = "failed"
            record.problem = str(self.error) or type(self.error).__name__

    async def run(
        self,
        messages: Messages,
        *,
        pending: Pending | None = None,
        continues: str = "",
        has_begun: bool = False,
        **more: Any,
    ) -> None:
        """Write the answer. An error fails the answer and is not raised.

        Args:
            messages: its prompt, with marks of texts that are being written.
            pending: the announced request, if the prompt was prefilled for it. Then the messages
                have no marks.
            continues: text of the answer that another agent has written.
            has_begun: whether it continues an answer of this agent, which no budget stops.
            more: parameters of the request besides the model's sampling.
        """
        with self._request_scope:
            try:
                if not has_begun:
                    pending, messages = await self._start(messages, pending, more)
                parameters = {"model": self.model.model, **self.model.sampling, **more}
                await self._try_engines(messages, pending, continues, parameters)
                self.close()
            except Exception as error:
                self.error = error
                self.fail(error)
            finally:
                self.asked.set()
                # This has no effect on an answer that is complete or has failed.
                self.fail(UpstreamCancelled(f"{self.name} was cancelled"))

    async def _start(
        self, messages: Messages, pending: Pending | None, more: Mapping[str, Any]
    ) -> tuple[Pending | None, Messages]:
        """Wait for the texts in the prompt, which is prefilled meanwhile, and check the budget.

        Returns: the announced request, if any, and its messages.

        Raises: BudgetSpent, and the exception with which a text in the prompt failed.
        """
        parameters: dict[str, Any] = {**self.model.sampling, **more, "model": self.model.model}
        try:
            if pending is None:
                self.model = self.model.with_silent_engines_last()
            if pending is None and find_marks(messages):
                pending = await self._inquiry.flow.expect(
                    messages,
                    engine=self.model.engine,
                    name=self.name,
                    namespace=kv_namespace(parameters) or None,
                    **prompt_fields(parameters),
                )
                messages = await pending.messages()
            self._inquiry.check_budget(is_last=self._is_last)
        except BaseException:
            if pending is not None:
                await pending.release()
            raise
        return pending, messages

    async def _try_engines(
        self,
        messages: Messages,
        pending: Pending | None,
        continues: str,
        parameters: Mapping[str, Any],
    ) -> None:
        """Send requests to the model's engines in turn until one has written the answer."""
        # Other agents may have found out, while this one waited, that its engine does not answer.
        model = self.model.with_silent_engines_last()
        if pending is not None and model.engine is not self.model.engine:
            await pending.release()
            pending = None
        engines = [model.engine, *model.backups]
        attempts = self._limits.attempts or len(engines)
        for attempt in range(attempts):
            self.engine = engines[attempt % len(engines)]
            note_attempt(self.engine)
            try:
                await self._send(messages, pending, continues, parameters)
                return
            except BaseException as error:
                if isinstance(error, EngineTimeout | EngineUnreachable):
                    note_silence(self.engine)
                if pending is not None:
                    await pending.release()
                    pending = None
                is_last = attempt + 1 == attempts
                if is_last or not self._can_repeat(error, parameters):
                    raise
                self.retries.append(f"{self.engine.url}: {error}")

    def _can_repeat(self, error: BaseException, parameters: Mapping[str, Any]) -> bool:
        """Return whether another request may succeed, and go on with what is written.

        An engine that separates thought would take a continued answer for thought, and one with a
        grammar begins it again.
        """
        is_refused = isinstance(error, RequestRefused) and error.blames_request
        begins_anew = bool(self.thought) or has_grammar(parameters)
        can_continue = not self.written or not begins_anew
        return isinstance(error, Exception) and not is_refused and can_continue

    async def _send(
        self,
        messages: Messages,
        pending: Pending | None,
        continues: str,
        parameters: Mapping[str, Any],
    ) -> None:
        """Send one request and write its answer, after what is written already."""
        body = {**parameters}
        if written := continues + self.written:
            messages, continuation = continue_answer(messages, written)
            body |= continuation | self._left_tokens(body, continues)
        claim = pending.claim() if pending is not None else {}
        stream_id = claim.get("prompt_stream_id") or (pending.used_id if pending else None)
        report = CallReporter(
            self._inquiry.listener,
            agent=self.name,
            engine=self.engine.url,
            model=self.model.model,
        )
        report.started(stream_id, late=pending is not None and pending.is_late)
        report.prompt_sent({**body, **claim, "messages": messages})
        reader = self._make_reader(messages, body)
        self.started = self.started or time.time()
        self.asked.set()

        def write(piece: str) -> None:
            self.first_token = self.first_token or time.time()
            note_answer(self.engine)
            report.text_arrived()
            self.write(piece)

        try:
            await reader.read(self.engine, messages, {**body, **claim}, write)
        except BaseException as error:
            report.failed(error)
            if isinstance(error, EngineUnreachable | RequestRefused) and not reader.pieces:
                self._requests.pop()  # No engine has computed anything for it.
            raise
        finally:
            self.thought += reader.thought
            self.logprobs += reader.logprobs
        self.finished = time.time()
        self.finish_reason = reader.finish_reason
        self.usage = self._requests[0].spent() if len(self._requests) == 1 else self.spent()
        report.finished(self.written, reader.usage, self.finish_reason)

    def _make_reader(self, messages: Messages, body: Mapping[str, Any]) -> CallReader:
        """Return the reader of a request's answer, and count the request."""
        _, limit = _token_limit(body)
        reader = CallReader(self._limits, limit, self._max_pieces)
        length = sum(len(str(message.get("content"))) for message in messages)
        self._requests.append(_CountedRequest(length // CHARACTERS_PER_TOKEN, reader))
        return reader

    def _left_tokens(self, body: Mapping[str, Any], continues: str) -> dict[str, int]:
        """Return the limit of tokens for the rest of an answer, if it has one."""
        name, limit = _token_limit(body)
        written = sum(request.reader.pieces for request in self._requests)
        written += len(continues) // CHARACTERS_PER_TOKEN
        return {} if limit is None else {name: max(1, limit - written)}


def continue_answer(messages: Sequence[Message], written: str) -> tuple[Messages, dict[str, Any]]:
    """Return messages that end with a beginning of their answer, and parameters to continue it.

    If the last message is an answer's beginning already, the text is added to it.
    """
    messages = [dict(message) for message in messages]
    if messages[-1]["role"] == "assistant":
        written = messages.pop()["content"] + written
    parameters = {"continue_final_message": True, "add_generation_prompt": False}
    return [*messages, {"role": "assistant", "content": written}], parameters


def _token_limit(body: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the name and the value of the parameter that limits an answer's tokens."""
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return name, body.get(name)
