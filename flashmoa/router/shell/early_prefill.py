"""Prefill prompts while agents write answers in them (`EarlyPrefill`; Faster-MoA §4.3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio

from flashmoa.engine import EngineClient, EngineError, Prefilled, prompt_fields
from flashmoa.linking.link import Link, kind_of
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.prompt_feed import warn_once
from flashmoa.router.shell.agent_answers import ReadableAnswer
from flashmoa.router.shell.agent_requests import AgentRequest

logger = logging.getLogger(__name__)


class EarlyPrefill:
    """Links the prompt of one request to the answers that it reads.

    Its failures are logged and not raised, because the request still contains the whole prompt.

    Args:
        engine: the prefill engine.
        answers: the answers that the request reads, by agent.
    """

    def __init__(
        self, engine: EngineClient, request: AgentRequest, answers: Mapping[str, ReadableAnswer]
    ) -> None:
        self._engine = engine
        self._request = request
        self._answers = answers
        self._link: Link | None = None
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """Prefill what is certain of the prompt until :meth:`finish` has returned."""
        with self._scope:
            try:
                prompt = await self.build_prompt()
            except (EngineError, UnicodeError) as error:  # JSON may have half a surrogate pair.
                self._log_failure(error)
                return
            self._link = Link(
                self._engine,
                prompt,
                agent=self._request.agent or "a reader",
                add_special_tokens=not self._request.is_chat,
            )
            for answer in self._answers.values():
                answer.follow(self._link)
            await self._link.run()

    async def finish(self) -> Prefilled | None:
        """Prefill the rest of the prompt after all answers are complete, and release the stream.

        Its KV stays in the engine's cache like that of any request. Return how many tokens were
        cached and how many were computed; ``None`` if unknown.
        """
        if self._link is None:
            self._scope.cancel()
            return None
        try:
            if not (whole := self._link.prompt.stable()):
                return None
            # The chat template has added special tokens to the text of a chat.
            return await self._engine.prefill_only(
                text=whole, add_special_tokens=not self._request.is_chat
            )
        except (EngineError, UnicodeError) as error:
            self._log_failure(error)
            return None
        finally:
            self._link.end("unused")

    async def build_prompt(self) -> Prompt:
        """Return the prompt with slots for the answers, which have agents' names."""
        placeholders = Placeholders(self._answers)
        body = self._request.filled({name: placeholders.padded(name) for name in self._answers})
        if self._request.is_chat:
            text = await self._engine.render(body["messages"], **prompt_fields(body))
        else:
            text = body["text"]
        return placeholders.build_prompt(text)

    def _log_failure(self, error: Exception) -> None:
        text = "%s cannot prefill a prompt before its request: %s. It is computed with its request."
        url = self._engine.url
        logger.log(warn_once(url, kind_of(error)), text, url, str(error).removesuffix("."))
