"""Conclude a question: the last aggregator's answer, or what takes its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from flashmoa import Text, UpstreamCancelled
from flashmoa.errors import BadAnswer, RequestRefused
from flashmoa.link.prompt_feed import CHARACTERS_PER_TOKEN
from flashmoa.moa.agent import Agent, StopFilter
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.results import AgentAnswer, MixtureFailed, Substitution, describe
from flashmoa.moa.settings import (
    can_be_refused,
    has_grammar,
    may_call_tools,
    token_limit,
)

logger = logging.getLogger(__name__)

# Waits for all layers but the last, and returns the answers to the question.
WaitForAnswers = Callable[[], Awaitable[Sequence[Sequence[AgentAnswer]]]]
# Asks another aggregator to read given answers, and to continue a text.
Ask = Callable[[Model, Sequence[AgentAnswer], str], Awaitable[Agent]]


@dataclass(slots=True)
class FinalAnswer:
    """Copies the last aggregator's answer, and finds a substitute if the aggregator fails.

    Args:
        sampling: the client's parameters, which every aggregator gets in place of its own.

    Attributes:
        text: the answer for readers of the run. It fails with the aggregator's error if there is no
            substitute.
        result: the answer, once ``text`` is complete. It differs from ``text`` only if a complete
            answer took the place of an answer that had begun.
        finish_reason: OpenAI's finish reason of that answer.
        tool_calls: its calls of tools.
        first_token, finished: times of its first and last token, in Unix seconds.
    """

    fallback: Fallback
    last: Agent
    wait_for_answers: WaitForAnswers
    ask: Ask
    sampling: Mapping[str, Any]
    text: Text = field(default_factory=lambda: Text("answer"))
    result: str | None = None
    finish_reason: str | None = None
    tool_calls: Sequence[dict[str, Any]] = ()
    first_token: float | None = None
    finished: float | None = None
    substitution: Substitution | None = None
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def run(self) -> None:
        """Write ``text``. An error fails it and is not raised."""
        with self._scope:
            try:
                try:
                    await self._copy(self.last)
                except UpstreamCancelled:
                    raise
                except Exception as error:
                    await self._substitute(error)
                if self.result is None:
                    self.result = self.text.written
                self.text.close()
            except Exception as error:
                self.text.fail(error)
            finally:
                # This has no effect on a text that is complete or has failed.
                self.text.fail(UpstreamCancelled("the run was cancelled"))

    def cancel(self) -> None:
        """Stop :meth:`run`; ``text`` fails with UpstreamCancelled unless it is complete."""
        self._scope.cancel()

    async def _copy(self, agent: Agent) -> None:
        async for piece in agent:
            self._write(piece)
        reason = self.finish_reason = agent.finish_reason
        self.tool_calls = agent.tool_calls
        if agent.tool_calls:  # They come after the text.
            self.first_token = self.first_token or agent.record.first_token
            self.finished = agent.record.finished
        # The client's stop text, or its limit of tokens, may leave an empty answer.
        ends = ("stop", "stop_regex", "stop_token_ids")
        is_ended = reason == "stop" and any(map(self.sampling.get, ends))
        is_cut = reason == "length" and token_limit(self.sampling) is not None
        if not (self.text.written.strip() or is_ended or is_cut or agent.tool_calls):
            agent.error = BadAnswer("it answered nothing")
            raise agent.error

    async def _substitute(self, error: Exception) -> None:
        """Let another aggregator answer, or take the best answer. Raises ``error`` without any.

        If an engine refuses the client's own parameters, only the client can mend them.
        """
        is_refused = isinstance(error, RequestRefused) and error.blames_request
        if is_refused and can_be_refused(self.sampling):
            raise error
        problem, answers, form = describe(error), list[AgentAnswer](), self.last.model.sampling
        for layer in await self.wait_for_answers():
            answers = [answer for answer in layer if answer.is_complete] or answers
        if not answers:
            raise error
        # An aggregator that only lacked answers reads the answers of an earlier layer.
        models = [self.last.model] if isinstance(error, MixtureFailed) else []
        for model in (*models, *self.fallback.models):
            asked = {**model.sampling, **self.sampling}
            if self.text.written and (has_grammar(form) or has_grammar(asked)):
                continue  # A grammar would begin the answer again.
            agent = await self.ask(model, answers, self.text.written)
            text = "The last aggregator failed; %s takes its place: %s"
            logger.warning(text, agent.name, problem)
            try:
                await self._copy(agent)
            except UpstreamCancelled:
                raise
            except Exception as other:
                logger.warning("%s failed, too: %s", agent.name, other)
                continue
            self.substitution = Substitution("aggregator", agent.name, problem)
            return
        self._take_best(answers, error)

    def _take_best(self, answers: Sequence[AgentAnswer], error: Exception) -> None:
        """Take the best answer as the result: a whole one with the most confident model.

        Without probabilities the first answer is the best. Raises ``error`` without any.
        """
        # The last aggregator's answer has a form that other answers lack.
        form = self.last.model.sampling
        has_form = has_grammar(form) or may_call_tools(form)
        if not self.fallback.best_answer or has_form:
            raise error
        limit, written = token_limit(self.sampling), len(self.text.written) // CHARACTERS_PER_TOKEN
        # If an engine does not count, an answer has at most one token a character.
        answers = [one for one in answers if limit is None or written + one.tokens <= limit]
        if not answers:
            raise error
        best = max(answers, key=lambda one: (one.finish_reason == "stop", one.confidence or 0.0))
        self.substitution = Substitution("answer", best.name, describe(error))
        text = "The last aggregator failed; %s's answer is the result: %s"
        logger.warning(text, best.name, self.substitution.problem)
        stops = StopFilter(self.sampling.get("stop"))
        self.result = stops.add(best.text) + stops.end()
        self.finish_reason = "stop" if stops.found else best.finish_reason
        self._write(f"\n\n{self.result}" if self.text.written and self.result else self.result)

    def _write(self, piece: str) -> None:
        self.finished = time.time()
        self.first_token = self.first_token or self.finished
        self.text.write(piece)
