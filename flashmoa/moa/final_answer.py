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
from flashmoa.moa.agent import Agent
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.results import AgentAnswer, MixtureFailed, Substitution
from flashmoa.moa.settings import (
    CHARACTERS_PER_TOKEN,
    can_be_refused,
    has_grammar,
    token_limit,
)

logger = logging.getLogger(__name__)

# The answers of a question's agents, by layer.
Layers = Sequence[Sequence[AgentAnswer]]
# Asks another aggregator to answer from given answers, after what is written already.
Ask = Callable[[Model, Sequence[AgentAnswer], str], Awaitable[Agent]]
# Between what a failed aggregator had written, and the answer that takes its place.
_BREAK = "\n\n"


@dataclass(slots=True)
class FinalAnswer:
    """Copies the last aggregator's answer, and finds a substitute if that fails.

    Args:
        last: the last aggregator.
        answers: waits for the agents before the last aggregator, and returns their answers.
        ask: asks another aggregator.
        sampling: the client's parameters, which every aggregator gets in place of its own.

    Attributes:
        text: what readers of the run get. It fails with the aggregator's error if there is no
            substitute.
        result: the answer, once ``text`` is complete. It differs from ``text`` only if a complete
            answer took the place of one that had begun.
        finish_reason: finish reason of that answer in OpenAI's sense.
        first_token, finished: times of the first and last piece of ``text``, in Unix seconds.
    """

    fallback: Fallback
    last: Agent
    answers: Callable[[], Awaitable[Layers]]
    ask: Ask
    sampling: Mapping[str, Any]
    text: Text = field(default_factory=lambda: Text("answer"))
    result: str = ""
    finish_reason: str | None = None
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
                self.result = self.result or self.text.written
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
        self.finish_reason = agent.finish_reason
        # An answer may begin with the text at which the client wants it to end.
        ends = ("stop", "stop_regex", "stop_token_ids")
        is_ended = self.finish_reason == "stop" and any(map(self.sampling.get, ends))
        is_call = self.finish_reason == "tool_calls"
        # A longer answer would be more than the client wants.
        is_cut = self.finish_reason == "length" and token_limit(self.sampling) is not None
        if not (agent.written.strip() or is_ended or is_call or is_cut):
            agent.error = BadAnswer("it answered nothing")
            raise agent.error

    async def _substitute(self, error: Exception) -> None:
        """Let another aggregator answer, or take the best answer. Raises ``error`` without any.

        An engine that refuses the client's own parameters is right, and the client can mend them.
        """
        is_refused = isinstance(error, RequestRefused) and error.blames_request
        if is_refused and can_be_refused(self.sampling):
            raise error
        problem = str(error) or type(error).__name__
        layers = [[one for one in layer if one.is_complete] for layer in await self.answers()]
        answered = [layer for layer in layers if layer]
        if not answered:
            raise error
        answers = answered[-1]
        # If the aggregator only lacked answers to read, it is asked again with those of an earlier
        # layer.
        models = [self.last.model] if isinstance(error, MixtureFailed) else []
        for model in (*models, *self.fallback.models):
            if self.text.written and has_grammar({**model.sampling, **self.sampling}):
                continue  # Its grammar would begin the answer again.
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
        self._take_best(answers, error, problem)

    def _take_best(self, answers: Sequence[AgentAnswer], error: Exception, problem: str) -> None:
        """Take the best answer as the result: a whole one, of which its model was most confident.

        Without probabilities the first one is the best.
        """
        # The answer of an agent before the last has not the form that the client asked for.
        if not self.fallback.best_answer or has_grammar(self.sampling):
            raise error
        limit, written = token_limit(self.sampling), len(self.text.written) // CHARACTERS_PER_TOKEN
        answers = [answer for answer in answers if _fits(answer, limit, written)]
        if not answers:
            raise error
        best = max(answers, key=lambda one: (one.finish_reason == "stop", one.confidence or 0.0))
        text = "The last aggregator failed; %s's answer is the result: %s"
        logger.warning(text, best.name, problem)
        self.substitution = Substitution("answer", best.name, problem)
        self.result, self.finish_reason = best.text, best.finish_reason
        self._write(_BREAK + best.text if self.text.written else best.text)

    def _write(self, piece: str) -> None:
        self.finished = time.time()
        self.first_token = self.first_token or self.finished
        self.text.write(piece)


def _fits(answer: AgentAnswer, limit: int | None, written: int = 0) -> bool:
    """Return whether an answer, after so many tokens, keeps to a limit of tokens, if there is one.

    An answer of an engine that does not count has at most as many tokens as characters.
    """
    return limit is None or written + answer.tokens <= limit
