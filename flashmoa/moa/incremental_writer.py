"""Write an answer part by part while its sources are still written (``IncrementalWriter``)."""

from __future__ import annotations

import time
from typing import Any

import anyio

from flashmoa import Text, UpstreamCancelled, Workflow
from flashmoa.engine import PromptUsage
from flashmoa.moa.agents import Model
from flashmoa.moa.chunks import GrowingPrompt
from flashmoa.moa.prompts import Messages, last_words
from flashmoa.moa.repeat_filter import RepeatFilter
from flashmoa.moa.results import AgentAnswer, StaircaseRound
from flashmoa.observe import Listener
from flashmoa.observe.calls import CallReporter
from flashmoa.workflow import Pending


class IncrementalWriter:
    """Writes the answer of an agent on a staircase, one part in each round.

    Each round has a separate request, whose prompt has one chunk more of every source. The prompt
    is prefilled while the chunks are written.

    Attributes:
        answer: the text that is written. It fails with MixtureFailed if no source wrote anything,
            and with the error of a request that failed.
        rounds: the rounds so far.
    """

    def __init__(
        self, name: str, model: Model, prompt: GrowingPrompt, flow: Workflow, listener: Listener
    ) -> None:
        self.answer = flow.text(name)
        self.rounds: list[StaircaseRound] = []
        self._name = name
        self._model = model
        self._prompt = prompt
        self._flow = flow
        self._listener = listener
        # The parts of the answer, for the prompts of later rounds.
        self._chunks: list[Text] = []
        self._filter = RepeatFilter("")
        self._scope = anyio.CancelScope()
        self._context: int | None = None

    @property
    def tokens(self) -> int:
        """Return how many tokens the agent has written, including dropped ones."""
        usages = (round_.usage for round_ in self.rounds)
        return sum(usage.completion_tokens for usage in usages if usage is not None)

    @property
    def first_token(self) -> float | None:
        """Return when the agent's first token came, in Unix seconds."""
        return next((round_.first_token for round_ in self.rounds if round_.first_token), None)

    def record(self, layer: int, place: int) -> AgentAnswer:
        """Return the agent's record so far, for its layer and place from 0."""
        model, rounds = self._model, self.rounds
        record = AgentAnswer(layer, place, model.model, model.engine.url, steps=rounds)
        record.text = self.answer.written
        record.first_token = self.first_token
        if rounds:
            record.started, record.finished = rounds[0].asked, rounds[-1].finished
            record.finish_reason = rounds[-1].finish_reason
            usages = [round_.usage for round_ in rounds]
            record.usage = PromptUsage.total([usage for usage in usages if usage is not None])
        return record

    async def run(self) -> None:
        """Write the answer. An error fails the answer and is not raised."""
        with self._scope:
            try:
                await self._write_rounds()
                self.answer.close()
            except Exception as error:
                self.answer.fail(error)
            finally:
                # This has no effect on an answer that is complete or has failed.
                self.answer.fail(UpstreamCancelled(f"{self._name} was cancelled"))

    def cancel(self) -> None:
        """Stop :meth:`run`; the answer fails with UpstreamCancelled unless it is complete."""
        self._scope.cancel()

    async def _write_rounds(self) -> None:
        request: Pending | None = await self._expect(0)
        self._context = await self._model.context_length()
        for number, size in enumerate(self._prompt.steps.schedule):
            if request is None or self.tokens == self._model.max_tokens:
                break
            request, messages = await self._await_chunks(request, number)
            is_last = self.rounds[-1].out_of_room or self._prompt.is_last_round(number)
            request = await self._write_chunk(request, messages, number, None if is_last else size)

    async def _expect(self, number: int) -> Pending:
        """Announce the request of a round, from 0, so that its prompt is prefilled as it grows."""
        messages = self._prompt.messages(number, self._chunks[:number])
        name = f"{self._name}.{number + 1}"
        return await self._flow.expect(messages, engine=self._model.engine, name=name)

    async def _await_chunks(self, request: Pending, number: int) -> tuple[Pending, Messages]:
        """Wait for the chunks of a round and begin it.

        Returns: the round's request and messages. If they do not fit into the context,
            ``out_of_room`` is set, and those of the round before are returned again.
        """
        messages = await request.messages()
        self._prompt.raise_if_all_failed()
        self.rounds.append(StaircaseRound(time.time()))
        if number and self._context and not await self._model.fits(messages, self._context):
            await request.release()
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
        chunk = self._flow.text(f"{self._name}.{number + 1}")
        self._chunks.append(chunk)
        messages, continuation = self._continue_answer(messages, chunk)
        body = {**self._parameters(size), **continuation, **request.claim()}
        engine, model = self._model.engine, self._model.model
        report = CallReporter(self._listener, agent=chunk.name, engine=engine.url, model=model)
        report.started(request.used_id, late=request.is_late)
        report.prompt_sent({**body, "messages": messages})
        next_request: Pending | None = None
        text, round_ = "", self.rounds[-1]
        round_.asked = time.time()
        try:
            async with engine.chat(messages, **body) as deltas:
                async for delta in deltas:
                    round_.usage = delta.usage or round_.usage
                    round_.finish_reason = delta.finish_reason or round_.finish_reason
                    if not delta.text:
                        continue
                    round_.first_token = round_.first_token or time.time()
                    report.text_arrived()
                    text += delta.text
                    chunk.write(delta.text)
                    # The next prompt is prefilled from the first token on. If it began earlier,
                    # it would delay the prefill of this round.
                    if size is not None and next_request is None:
                        next_request = await self._expect(number + 1)
                    self._add_to_answer(self._filter.add(delta.text))
        except BaseException as error:
            report.failed(error)
            await request.release()
            raise
        chunk.close()
        round_.finished = time.time()
        report.finished(text, round_.usage, round_.finish_reason)
        is_cut = round_.finish_reason == "length" and self.tokens != self._model.max_tokens
        if size is None or not is_cut:
            self._add_to_answer(self._filter.end())
        if size is not None and next_request is None:
            next_request = await self._expect(number + 1)
        return next_request

    def _continue_answer(self, messages: Messages, chunk: Text) -> tuple[Messages, dict[str, Any]]:
        """Return the messages with the answer so far at their end, and parameters to continue it.

        If earlier turns of the conversation have the answer (``interleaved``), only its last words
        are repeated at the end. Without them the model would begin a new answer.
        """
        written = self.answer.written + self._filter.held
        if not self._filter.held:
            self._filter = RepeatFilter(written if self._prompt.steps.drop_repeats else "")
        if self._prompt.steps.order == "interleaved":
            written = last_words(written)
            chunk.write(written)
        if not written:
            return messages, {}
        answer = {"role": "assistant", "content": written}
        return [*messages, answer], {"continue_final_message": True, "add_generation_prompt": False}

    def _parameters(self, size: int | None) -> dict[str, Any]:
        """Return the request's parameters, with ``max_tokens`` for a part of that size."""
        model = self._model
        body: dict[str, Any] = {"model": model.model, **model.sampling}
        if size is not None or model.max_tokens is not None:
            # The model's max_tokens limits all rounds together, and the size limits this one.
            left = (model.max_tokens or size or 1) - self.tokens
            body["max_tokens"] = max(1, left if size is None else min(size, left))
        return body

    def _add_to_answer(self, piece: str) -> None:
        round_ = self.rounds[-1]
        round_.text += piece
        round_.dropped = self._filter.dropped
        if piece:
            self.answer.write(piece)
