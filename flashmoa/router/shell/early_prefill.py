"""Prefilling a prompt while agents write what is in it (Faster-MoA §4.3, steps 2 and 3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import anyio

from flashmoa.engine import EngineClient, EngineError, Prefilled
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.prompt import Prompt, Slot
from flashmoa.linking.prompt_feed import PromptFeed
from flashmoa.linking.streamed_text import replace_marks
from flashmoa.router.shell.agent_answers import GrowingAnswer
from flashmoa.router.shell.agent_requests import AgentRequest

logger = logging.getLogger(__name__)

# Failures that were logged already, by engine. Once is enough as a warning.
_logged: set[tuple[str, type[BaseException]]] = set()


class TextPrompt(Prompt):
    """A prompt in text form; its slots bear agents' names."""

    async def follow(self, answer: GrowingAnswer, changed: Callable[[], None]) -> None:
        """Take an answer in, from its first piece to its last. Raises: the error it failed with."""
        slots = [slot for slot in self.slots if slot.name == answer.name]
        async for piece in answer:
            for slot in slots:
                slot.append(piece)
            changed()
        for slot in slots:
            slot.close()
        changed()


class TokenPrompt:
    """A prompt in token form, in which nothing is tokenised twice (Faster-MoA §4.3).

    Args:
        parts: token ids, and agents by name; an agent may stand in several places.
    """

    def __init__(self, parts: Sequence[str | tuple[int, ...]]) -> None:
        self._parts = parts
        self._answers: dict[str, list[int]] = {part: [] for part in parts if isinstance(part, str)}
        self._open = set(self._answers)
        self._taken = 0

    @property
    def is_complete(self) -> bool:
        return not self._open

    def stable(self) -> list[int]:
        """Return all tokens that are certain."""
        ids: list[int] = []
        for part in self._parts:
            ids += self._answers[part] if isinstance(part, str) else part
            if part in self._open:
                break
        return ids

    def take(self) -> list[int]:
        """Return what has become certain since the last call."""
        new = self.stable()[self._taken :]
        self._taken += len(new)
        return new

    async def follow(self, answer: GrowingAnswer, changed: Callable[[], None]) -> None:
        """Take an answer in, from its first token to its last. Raises: the error it failed with."""
        async for piece in answer.token_pieces():
            self._answers[answer.name] += piece
            changed()
        self._open.discard(answer.name)
        changed()


class EarlyPrefill:
    """The increments of one request's prompt.

    Nothing that goes wrong here is raised: the request then has its whole prompt computed.

    Args:
        engine: the prefill engine.
        answers: of the agents that the request reads, by name.
    """

    def __init__(
        self, engine: EngineClient, request: AgentRequest, answers: Mapping[str, GrowingAnswer]
    ) -> None:
        self._engine = engine
        self._request = request
        self._answers = answers
        # Text that a chat template has rendered carries its own special tokens.
        self._add_special_tokens = request.form == "text"
        self._feed: PromptFeed | None = None
        self._prompt: TextPrompt | TokenPrompt | None = None
        # Is set once there is something to prefill, or nothing will come.
        self._begun = anyio.Event()

    async def run(self) -> None:
        """Prefill what is certain of the prompt until every agent has written its answer."""
        try:
            self._prompt = prompt = await self._growing_prompt()
            self._feed = feed = PromptFeed(
                self._engine, prompt, add_special_tokens=self._add_special_tokens
            )
            async with anyio.create_task_group() as group:
                for answer in self._answers.values():
                    group.start_soon(self._follow, prompt, feed, answer)
                # The prompt may begin with an answer.
                if not prompt.stable():
                    await self._begun.wait()
                await feed.run()
        except* Exception as errors:
            self._log_failure(errors.exceptions[0])

    async def finish(self) -> Prefilled | None:
        """Compute what is left once all answers are complete.

        Returns how much was cached before that and how much was computed; ``None`` if unknown.
        """
        if self._prompt is None or not self._prompt.is_complete:
            return None
        whole = self._prompt.stable()
        if not whole:
            return None
        try:
            if isinstance(whole, str):
                return await self._engine.prefill_only(
                    text=whole, add_special_tokens=self._add_special_tokens
                )
            return await self._engine.prefill_only(input_ids=whole)
        except EngineError as error:
            self._log_failure(error)
            return None

    async def release(self) -> None:
        """Delete the prompt stream, whose KV then is ordinary cache."""
        if self._feed is not None:
            self._feed.stop()
            try:
                await self._feed.delete()
            except EngineError as error:
                logger.debug("The engine will expire the stream: %s", error)

    async def _growing_prompt(self) -> TextPrompt | TokenPrompt:
        request = self._request
        if request.form == "tokens":
            return TokenPrompt(request.parts)
        if request.form == "chat":
            return TextPrompt(await self._rendered())
        agents = {mark: name for name, mark in request.marks.items()}
        return TextPrompt(
            Slot(agents[part]) if part in agents else part for part in request.pieces()
        )

    async def _rendered(self) -> Sequence[str | Slot]:
        placeholders = Placeholders(self._answers)
        shown = {mark: placeholders.padded(name) for name, mark in self._request.marks.items()}
        body = replace_marks(self._request.body, shown)
        text = await self._engine.render(
            body["messages"],
            tools=body.get("tools"),
            template_args=body.get("chat_template_kwargs"),
        )
        return placeholders.build_prompt(text).segments

    async def _follow(
        self, prompt: TextPrompt | TokenPrompt, feed: PromptFeed, answer: GrowingAnswer
    ) -> None:
        def changed() -> None:
            feed.changed()
            if not self._begun.is_set() and prompt.stable():
                self._begun.set()

        try:
            await prompt.follow(answer, changed)
        except Exception:
            # The request itself waits for the answer too, and raises the error.
            feed.stop()
            self._begun.set()
        if prompt.is_complete:
            feed.stop()
            self._begun.set()

    def _log_failure(self, error: BaseException) -> None:
        key = (self._engine.url, type(error))
        level = logging.DEBUG if key in _logged else logging.WARNING
        _logged.add(key)
        reason = repr(error)
        if self._feed is not None and self._feed.stream_id is not None:
            # Anyone who knows the id of a stream can use the stream.
            reason = reason.replace(self._feed.stream_id, "...")
        logger.log(level, "%s prefills nothing early: %s", self._engine.url, reason)
