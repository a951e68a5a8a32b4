"""A prompt that is prefilled while agents write what is in it (Faster-MoA §4.3, steps 2 and 3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio

from flashmoa.engine import EngineClient, EngineError, Prefilled
from flashmoa.linking.placeholders import StandIns
from flashmoa.linking.prompt import Slot
from flashmoa.linking.prompt_feed import PromptFeed
from flashmoa.linking.streamed_text import replaced
from flashmoa.router.shell.agents import AgentAnswer
from flashmoa.router.shell.asks import Ask
from flashmoa.router.shell.written import TextPrompt, TokenPrompt, Written

logger = logging.getLogger(__name__)

# What went wrong, by engine: once is enough to say so.
_said: set[tuple[str, type[BaseException]]] = set()


class Ahead:
    """The increments of one request.

    Args:
        engine: the prefill engine.
        answers: of the agents it reads, by name.

    Nothing that goes wrong here is raised: the request then has its whole prompt computed.
    """

    def __init__(self, engine: EngineClient, ask: Ask, answers: Mapping[str, AgentAnswer]) -> None:
        self._engine = engine
        self._ask = ask
        self._answers = answers
        self._feed: PromptFeed | None = None
        self._prompt: Written | None = None
        self._begun = anyio.Event()

    async def run(self) -> None:
        """Until every agent has written all of its answer."""
        try:
            self._prompt = prompt = await self._written()
            # Text that a chat template has rendered carries its own special tokens.
            special = self._ask.form == "text"
            self._feed = feed = PromptFeed(self._engine, prompt, add_special_tokens=special)
            async with anyio.create_task_group() as group:
                for answer in self._answers.values():
                    group.start_soon(self._follow, prompt, feed, answer)
                # It may begin with an answer.
                if not prompt.whole():
                    await self._begun.wait()
                await feed.run()
        except* Exception as errors:
            self._give_up(errors.exceptions[0])

    async def settle(self) -> Prefilled | None:
        """Compute what is left once all answers are there; tells what was computed before.

        ``None`` where that is not known.
        """
        if self._prompt is None or not self._prompt.is_complete:
            return None
        whole, special = self._prompt.whole(), self._ask.form == "text"
        if not whole:
            return None
        try:
            if isinstance(whole, str):
                return await self._engine.prefill_only(text=whole, add_special_tokens=special)
            return await self._engine.prefill_only(input_ids=whole)
        except EngineError as error:
            self._give_up(error)
            return None

    async def give_back(self) -> None:
        """The stream is not needed any longer; its KV is ordinary cache then."""
        if self._feed is not None:
            self._feed.stop()
            try:
                await self._feed.delete()
            except EngineError as error:
                logger.debug("The engine will expire the stream: %s", error)

    async def _written(self) -> Written:
        if self._ask.form == "tokens":
            return TokenPrompt(self._ask.parts)
        if self._ask.form == "chat":
            return TextPrompt(await self._rendered())
        agents = {mark: name for name, mark in self._ask.marks.items()}
        return TextPrompt(
            Slot(agents[part]) if part in agents else part for part in self._ask.pieces()
        )

    async def _rendered(self) -> list[str | Slot]:
        stand_ins = StandIns(self._answers)
        shown = {mark: stand_ins.padded(name) for name, mark in self._ask.marks.items()}
        body = replaced(self._ask.body, shown)
        text = await self._engine.render(
            body["messages"],
            tools=body.get("tools"),
            template_args=body.get("chat_template_kwargs"),
        )
        return stand_ins.segments(text)

    async def _follow(self, prompt: Written, feed: PromptFeed, answer: AgentAnswer) -> None:
        def changed() -> None:
            feed.changed()
            if not self._begun.is_set() and prompt.whole():
                self._begun.set()

        try:
            await prompt.follow(answer, changed)
        except Exception:
            feed.stop()  # Whoever waits for the answer hears what is wrong with it.
            self._begun.set()
        if prompt.is_complete:
            feed.stop()
            self._begun.set()

    def _give_up(self, error: BaseException) -> None:
        """Linking must not cost the request."""
        what = (self._engine.url, type(error))
        level = logging.DEBUG if what in _said else logging.WARNING
        _said.add(what)
        reason = repr(error)
        if self._feed is not None and self._feed.stream_id is not None:
            reason = reason.replace(self._feed.stream_id, "...")  # It is for its owner.
        logger.log(level, "%s prefills nothing ahead: %s", self._engine.url, reason)
