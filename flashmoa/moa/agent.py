"""Write an agent's answer (``Agent``): its requests, their time limits and repetitions.

An agent that reads whole answers writes its own in one request. On a staircase it writes a part in
each round, while other agents still write the answers that it reads (Staircase Streaming). If a
request fails, another engine of the model continues the answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from flashmoa import Answer, UpstreamCancelled, Workflow
from flashmoa.engine import EngineClient, PromptUsage, kv_namespace, prompt_fields
from flashmoa.engine.generation import add_tool_calls
from flashmoa.engine.wire import Delta
from flashmoa.errors import BadAnswer, EngineError, EngineTimeout, EngineUnreachable, RequestRefused
from flashmoa.link.prompt_feed import CHARACTERS_PER_TOKEN
from flashmoa.link.streamed_text import find_marks
from flashmoa.moa.early_exit import confidence
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import GrowingPrompt, Message, Messages, add_role
from flashmoa.moa.results import AgentAnswer, StaircaseRound, describe
from flashmoa.moa.settings import Limits, has_grammar, token_limit
from flashmoa.workflow import Pending


@dataclass(slots=True)
class _Request:
    """One request of an agent. Its cost is estimated until the engine counts it.

    Attributes:
        tokens: number of tokens that have come; ``visible`` of them are not thought. If the engine
            does not count while it writes, each piece counts as one token.
        max_tokens, max_visible: the agent leaves the request after that many tokens.
    """

    prompt_tokens: int
    max_tokens: float
    max_visible: float
    tokens: int = 0
    visible: int = 0
    thinks: bool = False
    usage: PromptUsage | None = None

    def spent(self) -> PromptUsage:
        estimate = PromptUsage(prompt_tokens=self.prompt_tokens, completion_tokens=self.tokens)
        return self.usage or estimate

    def count(self, delta: Delta) -> int:
        """Return how many tokens a step's text has; also count tokens before it without text."""
        if not (delta.text or delta.reasoning or delta.tool_calls):
            return 0
        counted = delta.usage.completion_tokens if delta.usage is not None else 0
        new = max(1, counted - self.tokens)
        self.tokens += new
        return new


class StopFilter:
    """Ends a text before the first stop text, which may come in several pieces.

    Attributes:
        found: whether the text has ended.
        held: the end of the text so far, if it may be the beginning of a stop text.
    """

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        self.found = False
        self.held = ""
        given = [stops] if isinstance(stops, str) else stops or ()
        self._stops = [stop for stop in given if stop]

    def add(self, piece: str) -> str:
        """Add the next piece. Return the text that is certain to be kept."""
        if self.found:
            return ""
        text = self.held + piece
        ends = [text.index(stop) for stop in self._stops if stop in text]
        self.found = bool(ends)
        possible_ends = (
            place
            for place in range(len(text))
            if any(stop.startswith(text[place:]) for stop in self._stops)
        )
        end = min(ends) if ends else next(possible_ends, len(text))
        self.held = "" if ends else text[end:]
        return text[:end]

    def end(self) -> str:
        """End the text. Return the end that was held."""
        text, self.held = self.held, ""
        return text


class Agent(Answer):
    """An agent's answer, without its thought, and the requests that write it.

    Args:
        layer, place: its position, from 0. In events its name is ``LAYER.PLACE`` from 1; a request
            on a staircase is ``LAYER.PLACE.ROUND``.
        limits: the limits of a model that has none of its own.
        continues: text of the answer that another agent has written.

    Attributes:
        record: its record so far; :meth:`fill_record` adds the answer.
        asked: is set when the first request is sent, or when it is certain that none will be.
        waiting: number of clusters that wait for its answer.
        on_left_out: called when no cluster waits for its answer any more.
        part_tokens: number of tokens of each part of the answer so far.
        error: why the answer failed; ``None`` if it did not.
    """

    def __init__(
        self,
        flow: Workflow,
        limits: Limits,
        layer: int,
        place: int,
        model: Model,
        *,
        continues: str = "",
    ) -> None:
        super().__init__(f"{layer + 1}.{place + 1}")
        self.record = AgentAnswer(layer, place, model.model, model.engine.url)
        self.model = model
        self.asked = anyio.Event()
        self.waiting = 0
        self.on_left_out: Callable[[], None] = lambda: None
        self.part_tokens: list[int] = []
        self.error: Exception | None = None
        self._flow = flow
        self._sampling = {**model.sampling}
        self._limits = model.limits or limits
        self._continues = continues
        self._requests: list[_Request] = []
        # The first request that writes the present part of the answer.
        self._first_of_part = 0
        self._stops = StopFilter(None)
        # Number of tokens that no part of the answer has yet.
        self._uncounted = 0
        self._engine: EngineClient = model.engine
        self._patience = anyio.CancelScope()
        # For how long the requests were answered, from the first one that has written something.
        self._writing_seconds = 0.0
        # The next request, until it is sent, and a function that announces the request after it.
        self._announced: Pending | None = None
        self._announce_next: Callable[[], Pending] | None = None

    def spent(self, first: int = 0) -> PromptUsage:
        """Return the usage of the requests from the first one on, partly estimated."""
        usages = [request.spent() for request in self._requests[first:]]
        return usages[0] if len(usages) == 1 else PromptUsage.total(usages)

    @property
    def tokens(self) -> int:
        """Return the answer's length in tokens; see :attr:`AgentAnswer.tokens`."""
        return self.fill_record().tokens

    def fill_record(self) -> AgentAnswer:
        """Return the record with the answer and its figures so far."""
        record = self.record
        record.text, record.finish_reason = self.written, self.finish_reason
        if self._requests and (record.finished is not None or record.steps):
            record.usage = self.spent()
        record.confidence = confidence(self.logprobs) if self.logprobs else None
        if self.error is not None and record.status == "used":
            record.status, record.problem = "failed", describe(self.error)
        return record

    async def run(self, prompt: Messages | GrowingPrompt) -> None:
        """Write the answer. An error fails the answer and is not raised.

        Args:
            prompt: messages with marks of texts that are being written, or on a staircase the
                messages of every round.
        """
        with self._request_scope:
            try:
                if isinstance(prompt, GrowingPrompt):
                    await self._write_in_rounds(prompt)
                else:
                    await self._write_at_once(prompt)
                self._close()
            except Exception as error:
                self.error = error
                self._fail(error)
            finally:
                self.asked.set()
                # This has no effect on an answer that is complete or has failed.
                self._fail(UpstreamCancelled(f"{self.name} was cancelled"))
                if self._announced is not None:
                    await self._announced.release()

    def stop_waiting(self) -> None:
        """Stop it unless other clusters wait for its answer."""
        self.waiting -= 1
        if not self.waiting:
            self.record.status = "left out"
            self.cancel()
            self.on_left_out()

    async def _write_at_once(self, messages: Messages) -> None:
        messages = add_role(messages, self.model.role)
        if find_marks(messages):
            self._announced = self._announce(messages, self.name)
            messages = await self._announced.messages()
        await self._write_part(messages, None)

    async def _write_in_rounds(self, prompt: GrowingPrompt) -> None:
        """Write a part in each round. Its prompt has one chunk more of every source.

        The prompt is prefilled while the chunks are written. If a round's chunks do not fit into
        the context, the agent completes the answer from the chunks of the previous rounds.
        """
        # No engine finds a stop text that two requests write together.
        self._stops = StopFilter(self._sampling.pop("stop", None))
        self._announced = self._announce_round(prompt, 0)
        context = await self.model.context_length()
        for number, size in enumerate(prompt.steps.sizes()):
            messages = await self._announced.messages()
            prompt.raise_if_all_failed()
            step = StaircaseRound(time.time())
            self.record.steps.append(step)
            if number and context and not await self.model.fits(messages, context):
                await self._announced.release()
                step.out_of_room = True
                self._announced = self._announce_round(prompt, number - 1)
                messages = await self._announced.messages()
            is_last = step.out_of_room or prompt.is_last_round(number)
            # An earlier announcement would delay this round's prefill.
            announce_next = partial(self._announce_round, prompt, number + 1)
            self._announce_next = None if is_last else announce_next
            await self._write_step(step, messages, None if is_last else size)
            is_full = self._left_tokens() == 0 or not self._left_seconds()
            if is_last or is_full or self._stops.found:
                break
            self._announced = self._announced or announce_next()
        if rest := self._stops.end():
            self._write_counted(rest)
            self.record.steps[-1].text += rest

    async def _write_step(self, step: StaircaseRound, messages: Messages, size: int | None) -> None:
        """Write the part of a round.

        Args:
            size: number of tokens in the part; ``None``: the rest of the answer.
        """
        begin, first = len(self.written), len(self._requests)
        await self._write_part(messages, size)
        own = self._requests[first:]
        is_thought = any(one.thinks for one in own) and not self.written[begin:].strip()
        if size is not None and is_thought and self._left_seconds():
            # The agent spent the part's tokens on thought. Now it may write any number of tokens,
            # and is left after ``size`` tokens of its answer. If white space has come already, the
            # next round is announced; this request must not take that stream.
            announced, self._announced = self._announced, None
            try:
                await self._write_part(messages, None, max_visible=size)
            finally:
                self._announced = announced or self._announced
        step.usage = self.spent(first)
        step.text, step.finish_reason = self.written[begin:], self.finish_reason
        step.finished = self.record.finished

    def _announce_round(self, prompt: GrowingPrompt, number: int) -> Pending:
        messages = add_role(prompt.messages(number), self.model.role)
        return self._announce(messages, f"{self.name}.{number + 1}")

    def _announce(self, messages: Messages, name: str) -> Pending:
        """Announce a request: its prompt is prefilled while the texts in it are written."""
        self.model = self.model.with_silent_engines_last()
        parameters: dict[str, Any] = {**self._sampling, "model": self.model.model}
        return self._flow.expect(
            messages,
            engine=self.model.engine,
            name=name,
            namespace=kv_namespace(parameters) or None,
            **prompt_fields(parameters),
        )

    async def _write_part(
        self, messages: Messages, size: int | None, max_visible: float = math.inf
    ) -> None:
        """Send requests to the model's engines in turn until one has written the part.

        Args:
            size: number of tokens in the part; ``None``: the rest of the answer.
            max_visible: the part ends after that number of tokens, without thought.
        """
        pending, self._announced = self._announced, None
        # While this agent waited, another may have found that the engine does not answer.
        model = self.model.with_silent_engines_last()
        if pending is not None and model.engine is not self.model.engine:
            await pending.release()
            pending = None
        engines = [model.engine, *model.backups]
        attempts = self._limits.attempts or len(engines)
        self._first_of_part = len(self._requests)
        for attempt in range(attempts):
            self._engine = engines[attempt % len(engines)]
            if self._engine.avoided_until is not None:
                self._avoid_engine()  # No other agent tries it meanwhile.
            try:
                await self._send(messages, pending, size, max_visible)
                return
            except BaseException as error:
                if isinstance(error, EngineTimeout | EngineUnreachable):
                    self._avoid_engine()
                if pending is not None:
                    await pending.release()
                    pending = None
                is_last = attempt + 1 == attempts or not self._left_seconds()
                if is_last or not self._can_repeat(error):
                    raise
                self.record.retries.append(f"{self._engine.url}: {error}")
                self._tool_calls.clear()  # The next request begins them again.

    def _avoid_engine(self) -> None:
        """Let all agents ask the engine last for a minute."""
        self._engine.avoided_until = time.monotonic() + 60

    def _can_repeat(self, error: BaseException) -> bool:
        """Return whether another request may succeed, and continue the text so far.

        An engine that separates thought would take a continued answer for thought. An engine with a
        grammar would begin the answer again, and so would an engine that was calling a tool.
        """
        is_refused = isinstance(error, RequestRefused) and error.blames_request
        own = self._requests[self._first_of_part :]
        begins_again = any(one.thinks for one in own) or has_grammar(self._sampling)
        begins_again = begins_again or bool(self.tool_calls)
        # No reader has any part of a call, or of an answer without text.
        has_begun = self._text_so_far() and any(one.visible for one in own)
        can_continue = not (begins_again and has_begun)
        return isinstance(error, Exception) and not is_refused and can_continue

    async def _send(
        self, messages: Messages, pending: Pending | None, size: int | None, max_visible: float
    ) -> None:
        """Send one request. It continues the text so far."""
        body: dict[str, Any] = {"model": self.model.model, **self._sampling}
        written = self._text_so_far()
        if max_visible < math.inf:  # An engine would take a continued answer for thought.
            earlier = self._continues + "".join(step.text for step in self.record.steps)
            written = written if written[len(earlier) :].strip() else earlier
        if written:
            messages, continuation = continue_answer(messages, written)
            body |= continuation
        if written or self.record.steps:
            body |= self._token_limit(size)
        # Engines that do not count may hold text back and release it in more pieces than tokens.
        limit = token_limit(body)
        max_tokens = math.inf if limit is None else limit + 16
        length = sum(len(str(message.get("content"))) for message in messages)
        request = _Request(length // CHARACTERS_PER_TOKEN, max_tokens, max_visible)
        self._requests.append(request)
        self.usage = self.finish_reason = None
        self.record.engine = self._engine.url
        self.record.started = self.record.started or time.time()
        self.asked.set()
        rounds = len(self.record.steps)
        name = f"{self.name}.{rounds}" if rounds else self.name
        try:
            await self._flow.send(
                self, messages, body, engine=self._engine, pending=pending, agent=name
            )
        except (EngineUnreachable, RequestRefused):
            if not request.tokens:
                self._requests.remove(request)  # No engine has computed anything for it.
            raise
        self.record.finished = time.time()

    def _text_so_far(self) -> str:
        return self._continues + self.written + self._stops.held

    def _left_tokens(self) -> int | None:
        """Return how many tokens the rest of the answer may have; ``None``: any number."""
        if self.model.max_tokens is None:
            return None
        written = self.spent().completion_tokens + len(self._continues) // CHARACTERS_PER_TOKEN
        return max(0, self.model.max_tokens - written)

    def _left_seconds(self) -> float:
        """Return for how long the rest of the answer may be written."""
        seconds = self._limits.answer_seconds
        return math.inf if seconds is None else max(0.0, seconds - self._writing_seconds)

    def _token_limit(self, size: int | None) -> dict[str, int]:
        """Return the parameter that limits the tokens of a request for the rest of a part."""
        part = sum(request.tokens for request in self._requests[self._first_of_part :])
        limits = [self._left_tokens(), None if size is None else size - part]
        known = [limit for limit in limits if limit is not None]
        newer = self._sampling.get("max_completion_tokens")
        name = "max_completion_tokens" if newer else "max_tokens"
        return {name: max(1, min(known))} if known else {}

    @contextmanager
    def _reading(self) -> Generator[None]:
        """Keep the time limits of a request while its answer is read.

        An answer with a finish reason is complete, even if its usage does not arrive.

        Raises: EngineTimeout if the answer does not begin in time, or stalls; BadAnswer if earlier
            requests had spent its time.
        """
        limits, now, request = self._limits, anyio.current_time(), self._requests[-1]
        has_begun = self._writing_seconds > 0
        whole = anyio.CancelScope(deadline=now + self._left_seconds())
        self._patience = anyio.CancelScope(deadline=_later(now, limits.first_token_seconds))
        with self._patience, whole:
            try:
                yield
            except EngineError:
                if self.finish_reason is None:
                    raise
            finally:
                if request.tokens or has_begun:
                    self._writing_seconds += anyio.current_time() - now
        if self.finish_reason is not None:
            return
        if self._patience.cancelled_caught and request.tokens:
            raise EngineTimeout(f"it stalled: nothing came for {limits.stall_seconds:g} s")
        if whole.cancelled_caught and (request.tokens or self.written):
            self.finish_reason = "length"
        elif whole.cancelled_caught and has_begun:
            raise BadAnswer(f"its {limits.answer_seconds:g} s were over before it had a text")
        elif whole.cancelled_caught or self._patience.cancelled_caught:
            is_whole = whole.cancelled_caught
            seconds = limits.answer_seconds if is_whole else limits.first_token_seconds
            raise EngineTimeout(f"it did not begin: no token came within {seconds:g} s")

    def _take(self, delta: Delta) -> bool:
        """Add a step of the answer. Return whether the agent wants another step."""
        request, record = self._requests[-1], self.record
        self.usage = request.usage = delta.usage or request.usage
        self.finish_reason = delta.finish_reason or self.finish_reason
        tokens = request.count(delta)
        if request.tokens:
            self._patience.deadline = _later(anyio.current_time(), self._limits.stall_seconds)
        if delta.reasoning:
            request.thinks = True
            record.thought += delta.reasoning
        else:
            self.logprobs += delta.logprobs
            request.visible += tokens
            self._uncounted += tokens
        add_tool_calls(self._tool_calls, delta.tool_calls)
        if delta.text or delta.tool_calls:
            self._engine.avoided_until = None
            for begun in (record, *record.steps[-1:]):
                begun.first_token = begun.first_token or time.time()
        if delta.text:
            if self._announce_next is not None:
                self._announced, self._announce_next = self._announce_next(), None
            if piece := self._stops.add(delta.text):
                self._write_counted(piece)
        if self._stops.found:
            self.finish_reason = "stop"
            return False
        if self.finish_reason is not None:
            return True  # The usage follows.
        if request.tokens >= request.max_tokens or request.visible >= request.max_visible:
            self.finish_reason = "length"
        return self.finish_reason is None

    def _write_counted(self, part: str) -> None:
        """Write a part of the answer, after its number of tokens."""
        self.part_tokens.append(self._uncounted)
        self._uncounted = 0
        self._write(part)


def continue_answer(messages: Sequence[Message], written: str) -> tuple[Messages, dict[str, Any]]:
    """Return messages that end with the beginning of an answer, and parameters to continue it.

    If the messages already end with the beginning of an answer, the text is added to it.
    """
    messages = [dict(message) for message in messages]
    if messages[-1]["role"] == "assistant":
        written = messages.pop()["content"] + written
    parameters = {"continue_final_message": True, "add_generation_prompt": False}
    return [*messages, {"role": "assistant", "content": written}], parameters


def _later(now: float, seconds: float | None) -> float:
    return math.inf if seconds is None else now + seconds
