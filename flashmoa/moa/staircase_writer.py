"""Write an answer part by part while its sources are still written (``StaircaseWriter``)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from flashmoa import UpstreamCancelled
from flashmoa.engine import PromptUsage, kv_namespace, prompt_fields
from flashmoa.moa.agents import Model
from flashmoa.moa.answer_filters import StopFilter
from flashmoa.moa.calls import AgentCall, continue_answer
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.prompts import Messages, add_role
from flashmoa.moa.results import AgentAnswer, StaircaseRound
from flashmoa.workflow import Pending

if TYPE_CHECKING:
    from flashmoa.moa.staircase_layers import GrowingPrompt


class StaircaseWriter:
    """Writes the answer of an agent on a staircase, one part in each round.

    Each round has a separate request, whose prompt has one chunk more of every source. The prompt
    is prefilled while the chunks are written.

    Args:
        is_last: whether its answer is that of the question; see :class:`Budget`.

    Attributes:
        answer: the text that is written. It fails with MixtureFailed if no source wrote anything,
            and with the error of a request that failed.
        asked: is set when the first request is sent, or when it is certain that none will be.
        problem: why the answer failed; empty if it did not.
        rounds: the rounds so far.
    """

    def __init__(
        self, name: str, model: Model, prompt: GrowingPrompt, inquiry: Inquiry, *, is_last: bool
    ) -> None:
        self.answer = inquiry.flow.text(name)
        self.asked = anyio.Event()
        self.problem = ""
        self.rounds: list[StaircaseRound] = []
        self._name = name
        # The answer may end at a stop text of which each request writes a part.
        sampling = {**model.sampling}
        stops: str | list[str] = sampling.pop("stop", None) or []
        self._stops = StopFilter([stops] if isinstance(stops, str) else stops)
        self._model = replace(model, sampling=sampling)
        self._prompt = prompt
        self._inquiry = inquiry
        self._is_last = is_last
        self._calls: list[AgentCall] = []
        self._scope = anyio.CancelScope()
        self._context: int | None = None
        # The next round's request, until it is sent.
        self._announced: Pending | None = None

    @property
    def tokens(self) -> int:
        """Return how many tokens the agent has written, thought included."""
        return sum(call.spent().completion_tokens for call in self._calls)

    @property
    def _is_out_of_tokens(self) -> bool:
        return self._model.max_tokens is not None and self.tokens >= self._model.max_tokens

    @property
    def first_token(self) -> float | None:
        """Return when the agent's first token came, in Unix seconds."""
        return next((round_.first_token for round_ in self.rounds if round_.first_token), None)

    def finish_reason(self) -> str | None:
        """Return the last round's finish reason."""
        return self.rounds[-1].finish_reason if self.rounds else None

    def record(self, layer: int, place: int) -> AgentAnswer:
        """Return the agent's record so far, for its layer and place from 0."""
        model, rounds = self._model, self.rounds
        record = AgentAnswer(layer, place, model.model, model.engine.url, steps=rounds)
        record.text, record.first_token = self.answer.written, self.first_token
        if rounds:
            record.started, record.finished = rounds[0].asked, rounds[-1].finished
            record.finish_reason = rounds[-1].finish_reason
        if self._calls:
            record.engine = self._calls[-1].engine.url
            record.usage = PromptUsage.total([call.spent() for call in self._calls])
        record.thought = "".join(call.thought for call in self._calls)
        record.retries = [problem for call in self._calls for problem in call.retries]
        if self.problem:
            record.status, record.problem = "failed", self.problem
        return record

    async def run(self) -> None:
        """Write the answer. An error fails the answer and is not raised."""
        with self._scope:
            try:
                await self._write_rounds()
                self.answer.close()
            except Exception as error:
                self.problem = str(error) or type(error).__name__
                self.answer.fail(error)
            finally:
                self.asked.set()
                # This has no effect on an answer that is complete or has failed.
                self.answer.fail(UpstreamCancelled(f"{self._name} was cancelled"))

    def cancel(self) -> None:
        """Stop :meth:`run`; the answer fails with UpstreamCancelled unless it is complete."""
        self._scope.cancel()

    async def _write_rounds(self) -> None:
        try:
            request: Pending | None = await self._expect(0)
            self._context = await self._model.context_length()
            for number, size in enumerate(self._prompt.steps.sizes()):
                if request is None or self._is_out_of_tokens:
                    break
                request, messages = await self._await_chunks(request, number)
                is_last = self.rounds[-1].out_of_room or self._prompt.is_last_round(number)
                part = None if is_last else size
                request = await self._write_chunk(request, messages, number, part)
        finally:
            await self._release()
        self._write(self._stops.end())

    async def _expect(self, number: int) -> Pending:
        """Announce the request of a round, from 0, so that its prompt is prefilled as it grows."""
        self._model = model = self._model.with_silent_engines_last()
        messages = add_role(self._prompt.messages(number), model.role)
        self._announced = await self._inquiry.flow.expect(
            messages,
            engine=model.engine,
            name=f"{self._name}.{number + 1}",
            namespace=kv_namespace({"model": model.model, **model.sampling}) or None,
            **prompt_fields(model.sampling),
        )
        return self._announced

    async def _release(self) -> None:
        """Release the announced request, if it will not be sent."""
        announced, self._announced = self._announced, None
        if announced is not None:
            await announced.release()

    async def _await_chunks(self, request: Pending, number: int) -> tuple[Pending, Messages]:
        """Wait for the chunks of a round and begin it.

        Returns: the round's request and messages. If they do not fit into the context,
            ``out_of_room`` is set, and those of the round before are returned again.
        """
        messages = await request.messages()
        self._prompt.raise_if_all_failed()
        self.rounds.append(StaircaseRound(time.time()))
        if number and self._context and not await self._model.fits(messages, self._context):
            await self._release()
            self.rounds[-1].out_of_room = True
            request = await self._expect(number - 1)
            messages = await request.messages()
        return request, messages

    async def _write_chunk(
        self, request: Pending, messages: Messages, number: int, size: int | None
    ) -> Pending | None:
        """Send a round's request and write its part of the answer.

        Args:
            size: number of tokens in the part; ``None``: it is the last part, to the answer's end.

        Returns: the next round's request, ``None`` after the last round.
        """
        messages, continuation = self._continue_answer(messages)
        next_request: Pending | None = None
        round_ = self.rounds[-1]

        async def write(piece: str, first_token: float | None) -> None:
            nonlocal next_request
            # The next prompt is prefilled from the first token on. If it began earlier, it would
            # delay the prefill of this round.
            if size is not None and next_request is None:
                next_request = await self._expect(number + 1)
            round_.first_token = first_token
            self._write(self._stops.add(piece))

        call = await self._write_part(request, messages, continuation, size, write)
        round_.finished, round_.finish_reason = call.finished, call.finish_reason
        round_.asked, round_.usage = call.started or round_.asked, call.usage
        if self._stops.found:
            round_.finished, round_.finish_reason = round_.finished or time.time(), "stop"
            return None
        if size is not None and next_request is None:
            next_request = await self._expect(number + 1)
        return next_request

    async def _write_part(
        self,
        request: Pending | None,
        messages: Messages,
        continuation: dict[str, Any],
        size: int | None,
        write: Callable[[str, float | None], Awaitable[None]],
    ) -> AgentCall:
        """Send a request for a part of the answer, and call ``write`` with each of its pieces.

        A model that thinks first spends the part's tokens on that. Then it is asked again, gets as
        many as it likes, and is left after that number of pieces of its answer.
        """
        call = await self._ask(request, messages, continuation, size, False, write)
        if size is not None and call.thought and not call.written.strip():
            call = await self._ask(None, messages, continuation, size, True, write)
        return call

    async def _ask(
        self,
        request: Pending | None,
        messages: Messages,
        continuation: dict[str, Any],
        size: int | None,
        thinks: bool,
        write: Callable[[str, float | None], Awaitable[None]],
    ) -> AgentCall:
        call = AgentCall(
            f"{self._name}.{len(self.rounds)}",
            self._model,
            self._inquiry,
            is_last=self._is_last,
            max_pieces=size if thinks else None,
        )
        more = {**self._token_limit(None if thinks else size), **continuation}
        has_begun = bool(self._calls)
        self._calls.append(call)
        if request is not None:
            self._announced = None  # The call releases it.
        run = partial(call.run, messages, pending=request, has_begun=has_begun, **more)
        self._inquiry.flow.start_soon(run)
        self.asked.set()
        try:
            async for piece in call:
                await write(piece, call.first_token)
                if self._stops.found:
                    break
        finally:
            call.cancel()  # This has no effect on a call that is complete.
        return call

    def _continue_answer(self, messages: Messages) -> tuple[Messages, dict[str, Any]]:
        """Return the messages, ending with the answer so far, and parameters to continue it."""
        written = self.answer.written + self._stops.held
        return continue_answer(messages, written) if written else (messages, {})

    def _token_limit(self, size: int | None) -> dict[str, int]:
        """Return the request's limit of tokens for a part of that size; nothing for no limit."""
        limits = [] if size is None else [size]
        if self._model.max_tokens is not None:  # It limits all rounds together.
            limits.append(self._model.max_tokens - self.tokens)
        name = "max_tokens"
        if "max_completion_tokens" in self._model.sampling:
            name = "max_completion_tokens"
        return {name: max(1, min(limits))} if limits else {}

    def _write(self, piece: str) -> None:
        if piece:
            self.rounds[-1].text += piece
            self.answer.write(piece)
