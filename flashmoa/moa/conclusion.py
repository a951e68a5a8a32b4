"""Write the answer of a run (``Conclusion``), also if the last aggregator fails, or ``vote``."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import anyio

from flashmoa import Text, UpstreamCancelled
from flashmoa.errors import BadAnswer, RequestRefused
from flashmoa.moa.agents import Model
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.results import AgentAnswer, MixtureFailed, Substitution, Vote
from flashmoa.moa.sampling import can_be_refused, ends_at_text, has_grammar, token_limit
from flashmoa.moa.settings import CHARACTERS_PER_TOKEN, Fallback

logger = logging.getLogger(__name__)

# Returns the ballot in an answer, such as its final number or letter; None if it has none.
Extract = Callable[[str], str | None]
# Between what a failed aggregator had written, and the answer that takes its place.
_BREAK = "\n\n"


class Ask(Protocol):
    """Asks another aggregator to answer from given answers, after what is written already."""

    async def __call__(
        self, model: Model, answers: Sequence[AgentAnswer], written: str
    ) -> AgentCall: ...


class Conclusion:
    """Copies the last aggregator's answer, and finds a substitute if that fails.

    Args:
        last: the last aggregator's model.
        answers: waits for the agents before the last aggregator, and returns their records by
            layer.
        ask: asks another aggregator.
        sampling: the client's parameters, which every aggregator gets in place of its own.

    Attributes:
        text: what readers of the run get. It fails with the aggregator's error if there is no
            substitute.
        result: the run's answer, once ``text`` is complete. It differs from ``text`` only if a
            complete answer took the place of one that had begun.
        finish_reason: finish reason of that answer in OpenAI's sense.
        first_token, finished: times of the first and last piece of ``text``, in Unix seconds.
    """

    def __init__(
        self,
        fallback: Fallback,
        last: Model,
        answers: Callable[[], Awaitable[Sequence[Sequence[AgentAnswer]]]],
        ask: Ask,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.text = Text("answer")
        self.result = ""
        self.finish_reason: str | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.substitution: Substitution | None = None
        self._fallback = fallback
        self._last = last
        self._answers = answers
        self._ask = ask
        self._sampling = sampling or {}
        self._scope = anyio.CancelScope()

    async def run(self, last: Text, finish_reason: Callable[[], str | None]) -> None:
        """Write ``text``. An error fails it and is not raised.

        Args:
            last: the last aggregator's answer.
            finish_reason: returns its finish reason.
        """
        with self._scope:
            try:
                try:
                    await self._copy(last, finish_reason)
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

    async def _copy(self, answer: Text, finish_reason: Callable[[], str | None]) -> None:
        async for piece in answer:
            self._write(piece)
        self.finish_reason = finish_reason()
        # An answer may begin with the text at which the client wants it to end.
        is_ended = self.finish_reason == "stop" and ends_at_text(self._sampling)
        is_call = self.finish_reason == "tool_calls"
        # A longer answer would be more than the client wants.
        is_cut = self.finish_reason == "length" and token_limit(self._sampling) is not None
        if not (answer.written.strip() or is_ended or is_call or is_cut):
            raise BadAnswer("it answered nothing")

    async def _substitute(self, error: Exception) -> None:
        """Let another aggregator answer, or take the best answer. Raises ``error`` without any.

        An engine that refuses the client's own parameters is right, and the client can mend them.
        """
        is_refused = isinstance(error, RequestRefused) and error.blames_request
        if is_refused and can_be_refused(self._sampling):
            raise error
        problem = str(error) or type(error).__name__
        answers = best_layer(await self._answers())
        if not answers:
            raise error
        # If the aggregator only lacked answers to read, it is asked again with those of an earlier
        # layer.
        models = [self._last] if isinstance(error, MixtureFailed) else []
        for model in (*models, *self._fallback.models):
            if self.text.written and has_grammar({**model.sampling, **self._sampling}):
                continue  # Its grammar would begin the answer again.
            call = await self._ask(model, answers, self.text.written)
            logger.warning("The last aggregator failed; %s takes its place: %s", call.name, problem)
            try:
                await self._copy(call, lambda call=call: call.finish_reason)
            except UpstreamCancelled:
                raise
            except Exception as other:
                logger.warning("%s failed, too: %s", call.name, other)
                continue
            self.substitution = Substitution("aggregator", call.name, problem)
            return
        # The answer of an agent before the last has not the form that the client asked for.
        if not self._fallback.best_answer or has_grammar(self._sampling):
            raise error
        limit, written = token_limit(self._sampling), len(self.text.written) // CHARACTERS_PER_TOKEN
        answers = [answer for answer in answers if fits(answer, limit, written)]
        if not answers:
            raise error
        best = best_answer(answers)
        text = "The last aggregator failed; %s's answer is the result: %s"
        logger.warning(text, best.name, problem)
        self.substitution = Substitution("answer", best.name, problem)
        self.result, self.finish_reason = best.text, best.finish_reason
        self._write(_BREAK + best.text if self.text.written else best.text)

    def _write(self, piece: str) -> None:
        self.finished = time.time()
        self.first_token = self.first_token or self.finished
        self.text.write(piece)


def best_layer(layers: Sequence[Sequence[AgentAnswer]]) -> list[AgentAnswer]:
    """Return the complete answers of the last layer that has any; an empty list without any."""
    for layer in reversed(layers):
        if answers := [agent for agent in layer if agent.is_complete]:
            return answers
    return []


def fits(answer: AgentAnswer, limit: int | None, written: int = 0) -> bool:
    """Return whether an answer, after so many tokens, keeps to a limit of tokens, if there is one.

    An answer of an engine that does not count has at most as many tokens as characters.
    """
    return limit is None or written + answer.tokens <= limit


def best_answer(answers: Sequence[AgentAnswer]) -> AgentAnswer:
    """Return the answer that is whole and of which its model was most confident.

    Answers that reached their ``max_tokens`` come after whole ones. If no engine was asked for
    probabilities, the first answer is returned.
    """
    return max(answers, key=lambda agent: (agent.finish_reason == "stop", agent.confidence or 0.0))


def vote(answers: Sequence[str], extract: Extract) -> Vote:
    """Return the most common ballot in answers. Empty answers have no ballot.

    In a tie the ballot that comes first wins. If no answer has a ballot, ``place`` is that of the
    first answer that is not empty.

    Raises:
        ValueError: if all answers are empty.
        Exception: if ``extract`` raises it.
    """
    nonempty = [place for place, answer in enumerate(answers) if answer]
    if not nonempty:
        raise ValueError(f"a vote needs an answer; all {len(answers)} are empty")
    ballots = tuple(extract(answer) if answer else None for answer in answers)
    # If several ballots are equally common, most_common() returns the first of them.
    common = Counter(ballot for ballot in ballots if ballot is not None).most_common(1)
    if not common:
        return Vote(ballots, None, 0, nonempty[0])
    winner, count = common[0]
    return Vote(ballots, winner, count, ballots.index(winner))
