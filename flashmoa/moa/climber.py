"""An agent on a staircase: it writes a chunk from what has arrived, and waits for more."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio

from flashmoa.engine import PromptUsage
from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.linking.streamed_text import Text
from flashmoa.moa.answers import AgentAnswer, Round
from flashmoa.moa.models import Model
from flashmoa.moa.seam import Seam
from flashmoa.moa.steps import Steps, last_words
from flashmoa.moa.view import Messages, View
from flashmoa.observe import Listener
from flashmoa.observe.calls import CallReporter
from flashmoa.workflow import Expected, Workflow


class Climber:
    """An agent that writes along with those it reads; ``async for`` gives the pieces, once."""

    def __init__(
        self,
        name: str,
        model: Model,
        view: View,
        *,
        steps: Steps,
        flow: Workflow,
        listener: Listener,
    ) -> None:
        self.name = name
        self.rounds: list[Round] = []
        self._model = model
        self._view = view
        self._steps = steps
        self._flow = flow
        self._listener = listener
        self._said: list[Text] = []
        self._seam = Seam("")
        self._scope = anyio.CancelScope()
        self._context: int | None = None
        self._pieces = self._climb()

    @property
    def text(self) -> str:
        """What there is of the answer."""
        return "".join(done.text for done in self.rounds)

    @property
    def tokens(self) -> int:
        """What it has written, dropped or not."""
        return sum(done.usage.completion_tokens for done in self.rounds if done.usage is not None)

    @property
    def first_token(self) -> float | None:
        return next((done.first_token for done in self.rounds if done.first_token), None)

    @property
    def finish_reason(self) -> str | None:
        return self.rounds[-1].finish_reason if self.rounds else None

    def record(self, layer: int, place: int) -> AgentAnswer:
        """What it did, without the text."""
        model, rounds = self._model, self.rounds
        answer = AgentAnswer(layer, place, model.model, model.engine.url, steps=rounds)
        answer.first_token = self.first_token
        if rounds:
            answer.started, answer.finished = rounds[0].asked, rounds[-1].finished
            answer.usage = PromptUsage.total([one.usage for one in rounds if one.usage is not None])
        return answer

    def __aiter__(self) -> AsyncGenerator[str]:
        """Raises: MixtureFailed where there is nothing to read; EngineError."""
        return self._pieces

    async def write_into(self, text: Text) -> None:
        """Be done, for others to read."""
        with self._scope:
            try:
                async with aclosing(self._pieces) as pieces:
                    async for piece in pieces:
                        text.write(piece)
                text.close()
            except Exception as error:
                text.fail(error)
            finally:
                text.fail(UpstreamCancelled(f"{self.name} was cancelled"))

    def cancel(self) -> None:
        """End what :meth:`write_into` does."""
        self._scope.cancel()

    async def aclose(self) -> None:
        """End its request, if one is under way."""
        await self._pieces.aclose()

    async def _climb(self) -> AsyncGenerator[str]:
        expected: Expected | None = await self._expect(0)
        self._context = await self._model.context_length()
        for number, size in enumerate(self._steps.schedule):
            if expected is None or self.tokens == self._model.max_tokens:
                break
            expected, messages = await self._read(expected, number)
            last = self.rounds[-1].out_of_room or self._view.ends_with(number)
            self._said.append(self._flow.text(f"{self.name}.{number + 1}"))
            following: Expected | None = None
            writing = self._write(expected, messages, None if last else size)
            async with aclosing(writing) as pieces:
                async for piece in pieces:
                    # Not before this round's request is on its way.
                    if not last and following is None:
                        following = await self._expect(number + 1)
                    if piece:
                        yield piece
            if not last and following is None:
                following = await self._expect(number + 1)
            expected = following

    async def _read(self, expected: Expected, number: int) -> tuple[Expected, Messages]:
        """Wait for what a round reads, and begin it: with that, or where it has no room with what
        the one before read."""
        messages = await expected.messages()
        self._view.check()
        self.rounds.append(Round(time.time()))
        if number and self._context and not await self._model.fits(messages, self._context):
            await expected.give_back()
            self.rounds[-1].out_of_room = True
            expected = await self._expect(number - 1)
            messages = await expected.messages()
        return expected, messages

    async def _expect(self, number: int) -> Expected:
        """Have the prompt of a round prefilled as far as it is there."""
        messages = self._view.messages(self._steps, number, self._said[:number])
        name = f"{self.name}.{number + 1}"
        return await self._flow.expect(messages, engine=self._model.engine, name=name)

    async def _write(
        self, expected: Expected, messages: Messages, size: int | None
    ) -> AsyncGenerator[str]:
        """A chunk of the answer; ``None`` is the last one, to its end. Gives what can be shown,
        which may be nothing."""
        said, engine = self._said[-1], self._model.engine
        messages, goes_on = self._go_on(messages)
        body = {**self._body(size), **goes_on, **expected.take_over()}
        report = CallReporter(
            self._listener, agent=said.name, engine=engine.url, model=self._model.model
        )
        report.started(body.get("prompt_stream_id"), late=expected.is_late)
        text, done = "", self.rounds[-1]
        done.asked = time.time()
        try:
            async with engine.chat(messages, **body) as deltas:
                async for delta in deltas:
                    done.usage = delta.usage or done.usage
                    done.finish_reason = delta.finish_reason or done.finish_reason
                    if delta.text:
                        done.first_token = done.first_token or time.time()
                        report.text()
                        text += delta.text
                        said.write(delta.text)
                        yield self._show(self._seam.add(delta.text))
        except BaseException as error:
            report.failed(error)
            await expected.give_back()
            raise
        said.close()
        done.finished = time.time()
        report.finished(text, done.usage, done.finish_reason)
        is_cut = done.finish_reason == "length" and self.tokens != self._model.max_tokens
        if size is None or not is_cut:
            yield self._show(self._seam.end())

    def _go_on(self, messages: Messages) -> tuple[Messages, dict[str, Any]]:
        """A prompt with the answer so far at its end, and what to ask for. Where the answer
        stands in turns before, its last words do, or a new turn would begin it anew."""
        begun = self.text + self._seam.held
        if not self._seam.held:
            self._seam = Seam(begun if self._steps.drop_repeats else "")
        if self._steps.order == "interleaved":
            begun = last_words(begun)
            self._said[-1].write(begun)
        if not begun:
            return messages, {}
        answer = {"role": "assistant", "content": begun}
        return [*messages, answer], {"continue_final_message": True, "add_generation_prompt": False}

    def _body(self, size: int | None) -> dict[str, Any]:
        model = self._model
        body: dict[str, Any] = {"model": model.model, **model.sampling}
        if size is not None or model.max_tokens is not None:
            # As many more as it may, but in a round only its chunk.
            left = (model.max_tokens or size or 1) - self.tokens
            body["max_tokens"] = max(1, left if size is None else min(size, left))
        return body

    def _show(self, piece: str) -> str:
        """Count what can be shown to the answer."""
        done = self.rounds[-1]
        done.text += piece
        done.dropped = self._seam.dropped
        return piece
