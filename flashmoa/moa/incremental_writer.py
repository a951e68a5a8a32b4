"""An agent that writes its answer chunk by chunk while its sources still write theirs."""

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
    """An agent on a staircase: in each round it goes on with its answer from what has arrived.

    Each round is a request of its own, with a prompt that has one chunk more of every source. Its
    prompt is prefilled as the chunks are written.

    Attributes:
        answer: the text it writes. It fails with MixtureFailed if no source wrote anything, and
            with what a request fails with.
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
        # Its own chunks, as the prompts of later rounds have them.
        self._chunks: list[Text] = []
        self._filter = RepeatFilter("")
        self._scope = anyio.CancelScope()
        self._context: int | None = None

    @property
    def tokens(self) -> int:
        """Return how many tokens it has written, including dropped ones."""
        return sum(one.usage.completion_tokens for one in self.rounds if one.usage is not None)

    @property
    def first_token(self) -> float | None:
        """Return when its first token came, in Unix seconds."""
        return next((one.first_token for one in self.rounds if one.first_token), None)

    def record(self, layer: int, place: int) -> AgentAnswer:
        """Return what it has done so far."""
        model, rounds = self._model, self.rounds
        record = AgentAnswer(layer, place, model.model, model.engine.url, steps=rounds)
        record.text = self.answer.written
        record.first_token = self.first_token
        if rounds:
            record.started, record.finished = rounds[0].asked, rounds[-1].finished
            record.finish_reason = rounds[-1].finish_reason
            record.usage = PromptUsage.total([one.usage for one in rounds if one.usage is not None])
        return record

    async def run(self) -> None:
        """Write the answer; errors go into ``answer`` and are not raised."""
        with self._scope:
            try:
                await self._write_rounds()
                self.answer.close()
            except Exception as error:
                self.answer.fail(error)
            finally:
                # Has no effect on an answer that is complete or has failed.
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
            is_last = self.rounds[-1].out_of_room or self._prompt.is_complete_with(number)
            request = await self._write_chunk(request, messages, number, None if is_last else size)

    async def _expect(self, number: int) -> Pending:
        """Announce a round's request, from 0, so that its prompt is prefilled as it grows."""
        messages = self._prompt.messages(number, self._chunks[:number])
        name = f"{self._name}.{number + 1}"
        return await self._flow.expect(messages, engine=self._model.engine, name=name)

    async def _await_chunks(self, request: Pending, number: int) -> tuple[Pending, Messages]:
        """Wait for the chunks of a round and begin it.

        Returns: its request and messages. If they do not fit into the context, these are again
        those of the round before, and ``out_of_room`` is set.
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
        """Send a round's request and write its chunk into the answer.

        Args:
            size: of the chunk, in tokens; ``None``: this is the last one, up to the answer's end.

        Returns: the next round's request, ``None`` after the last round.
        """
        chunk = self._flow.text(f"{self._name}.{number + 1}")
        self._chunks.append(chunk)
        messages, continuation = self._continue_answer(messages, chunk)
        body = {**self._parameters(size), **continuation, **request.claim()}
        engine, model = self._model.engine, self._model.model
        report = CallReporter(self._listener, agent=chunk.name, engine=engine.url, model=model)
        report.started(body.get("prompt_stream_id"), late=request.is_late)
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
                    # The next prompt may be prefilled from here on; earlier, it would delay this
                    # round's own prefill.
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
        goes_on = round_.finish_reason == "length" and self.tokens != self._model.max_tokens
        if size is None or not goes_on:
            self._add_to_answer(self._filter.end())
        if size is not None and next_request is None:
            next_request = await self._expect(number + 1)
        return next_request

    def _continue_answer(self, messages: Messages, chunk: Text) -> tuple[Messages, dict[str, Any]]:
        """Return the messages with the answer so far at their end, and the parameters for that.

        If earlier turns of the conversation have the answer (``interleaved``), only its last words
        stand at the end; without any, the model would begin a new answer in its new turn.
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
        """Return the request's parameters, with ``max_tokens`` for a chunk of that size."""
        model = self._model
        body: dict[str, Any] = {"model": model.model, **model.sampling}
        if size is not None or model.max_tokens is not None:
            # The answer's limit counts all rounds; a round that is not the last has its chunk's.
            left = (model.max_tokens or size or 1) - self.tokens
            body["max_tokens"] = max(1, left if size is None else min(size, left))
        return body

    def _add_to_answer(self, piece: str) -> None:
        round_ = self.rounds[-1]
        round_.text += piece
        round_.dropped = self._filter.dropped
        if piece:
            self.answer.write(piece)
