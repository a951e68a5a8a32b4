"""Prefill prompts while agents write answers in them (`EarlyPrefill`; Faster-MoA §4.3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import anyio

from flashmoa.engine import EngineClient, EngineError, Prefilled, prompt_fields
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.prompt import Prompt, Slot
from flashmoa.linking.prompt_feed import PromptFeed
from flashmoa.linking.streamed_text import replace_marks
from flashmoa.router.shell.agent_answers import GrowingAnswer
from flashmoa.router.shell.agent_requests import AgentRequest

logger = logging.getLogger(__name__)

# Failures, by engine, that were logged as a warning already.
_logged: set[tuple[str, type[BaseException]]] = set()


class TokenPrompt:
    """A prompt in token form, in which answers are not tokenised again (Faster-MoA §4.3).

    Args:
        parts: token ids, and names of agents; the same agent may occur several times.
    """

    def __init__(self, parts: Sequence[str | tuple[int, ...]]) -> None:
        self._parts = parts
        self._answers: dict[str, list[int]] = {part: [] for part in parts if isinstance(part, str)}
        self._open = set(self._answers)
        self._taken = 0

    @property
    def is_complete(self) -> bool:
        return not self._open

    def append(self, agent: str, tokens: Sequence[int]) -> None:
        self._answers[agent] += tokens

    def close(self, agent: str) -> None:
        """Declare an agent's answer complete."""
        self._open.discard(agent)

    def stable(self) -> list[int]:
        """Return all tokens up to the first answer that is not complete, and what it has so far."""
        ids: list[int] = []
        for part in self._parts:
            ids += self._answers[part] if isinstance(part, str) else part
            if part in self._open:
                break
        return ids

    def take(self) -> list[int]:
        """Return what :meth:`stable` has gained since the last call."""
        new = self.stable()[self._taken :]
        self._taken += len(new)
        return new


class EarlyPrefill:
    """Prefills the prompt of one request through a prompt stream.

    Its failures are logged and not raised, because the request still contains the whole prompt.

    Args:
        engine: the prefill engine.
        answers: the answers that the request reads, by agent.
    """

    def __init__(
        self, engine: EngineClient, request: AgentRequest, answers: Mapping[str, GrowingAnswer]
    ) -> None:
        self._engine = engine
        self._request = request
        self._answers = answers
        # The chat template has added special tokens to the text of a chat.
        self._add_special_tokens = request.form == "text"
        self._feed: PromptFeed | None = None
        self._prompt: Prompt | TokenPrompt | None = None
        # Set once there is something to prefill, or there never will be.
        self._may_feed = anyio.Event()

    async def run(self) -> None:
        """Prefill the certain part of the prompt until every agent has written its answer."""
        try:
            self._prompt = prompt = await self.build_prompt()
            self._feed = feed = PromptFeed(
                self._engine, prompt, add_special_tokens=self._add_special_tokens
            )
            async with anyio.create_task_group() as group:
                for answer in self._answers.values():
                    group.start_soon(self.follow, prompt, feed, answer)
                # A prompt that begins with an answer is empty at first.
                if not prompt.stable():
                    await self._may_feed.wait()
                await feed.run()
        except* Exception as errors:
            self._log_failure(errors.exceptions[0])

    async def finish(self) -> Prefilled | None:
        """Prefill the rest of the prompt after all answers are complete.

        Return how many tokens were cached and how many were computed; ``None`` if unknown.
        """
        if self._prompt is None or not self._prompt.is_complete:
            return None
        if not (whole := self._prompt.stable()):
            return None
        try:
            if isinstance(whole, str):
                return await self._engine.prefill_only(
                    text=whole, add_special_tokens=self._add_special_tokens
                )
            return await self._engine.prefill_only(input_ids=whole)
        except (EngineError, UnicodeError) as error:  # JSON may have half a surrogate pair.
            self._log_failure(error)
            return None

    async def release(self) -> None:
        """Delete the prompt stream; its KV stays in the engine's cache like that of any request."""
        if self._feed is not None:
            self._feed.stop()
            try:
                await self._feed.delete()
            except EngineError as error:
                text = "A prompt stream could not be deleted, so the engine lets it expire: %s"
                logger.debug(text, error)

    async def build_prompt(self) -> Prompt | TokenPrompt:
        """Return the prompt with slots for the answers, which have agents' names."""
        request = self._request
        if request.form == "tokens":
            return TokenPrompt(request.parts)
        if request.form == "text":
            agents = {mark: agent for agent, mark in request.marks.items()}
            return Prompt(
                Slot(agents[piece]) if piece in agents else piece for piece in request.pieces()
            )
        placeholders = Placeholders(self._answers)
        replacements = {mark: placeholders.padded(agent) for agent, mark in request.marks.items()}
        body = replace_marks(request.body, replacements)
        text = await self._engine.render(body["messages"], **prompt_fields(body))
        return placeholders.build_prompt(text)

    async def follow(
        self, prompt: Prompt | TokenPrompt, feed: PromptFeed, answer: GrowingAnswer
    ) -> None:
        """Insert an answer while it is written, and stop the feed when nothing more will come."""
        try:
            if isinstance(prompt, TokenPrompt):
                async for tokens in answer.token_pieces():
                    prompt.append(answer.name, tokens)
                    self._changed(prompt, feed)
                prompt.close(answer.name)
            else:
                slots = [slot for slot in prompt.slots if slot.name == answer.name]
                async for piece in answer:
                    for slot in slots:
                        slot.append(piece)
                    self._changed(prompt, feed)
                for slot in slots:
                    slot.close()
            self._changed(prompt, feed)
            if not prompt.is_complete:
                return
        except Exception:
            # The request itself also waits for the answer, and raises the error.
            logger.debug("%s's answer failed, so nothing more of the prompt comes", answer.name)
        feed.stop()
        self._may_feed.set()

    def _changed(self, prompt: Prompt | TokenPrompt, feed: PromptFeed) -> None:
        feed.changed()
        if not self._may_feed.is_set() and prompt.stable():
            self._may_feed.set()

    def _log_failure(self, error: BaseException) -> None:
        key = (self._engine.url, type(error))
        level = logging.DEBUG if key in _logged else logging.WARNING
        _logged.add(key)
        reason = repr(error)
        if self._feed is not None and self._feed.stream_id is not None:
            # Anyone who knows the id of a stream can use the stream.
            reason = reason.replace(self._feed.stream_id, "...")
        text = (
            "%s cannot prefill prompts while the answers in them are written: %s. These prompts "
            "are computed when their requests are sent."
        )
        logger.log(level, text, self._engine.url, reason)
