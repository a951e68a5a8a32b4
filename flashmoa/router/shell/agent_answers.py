"""Keep agents' answers (`AgentPromptCache`), and record them from responses (`AnswerRecorder`)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from prometheus_client import Counter

from flashmoa.linking.streamed_text import Text
from flashmoa.router.errors import AgentFailed, BadRequest
from flashmoa.router.forwarding import AnswerObserver


class AgentKey(NamedTuple):
    """Identifies an agent. ``client`` is the API key of the client whose workflow it is."""

    client: str
    workflow: str
    agent: str


class GrowingAnswer(Text):
    """Holds one agent's answer, as text and as tokens, while it is written.

    Attributes:
        tokens: the answer's tokens so far; ``None`` if its engine does not report them.
        prefill: URL of the prefill engine of the pair that writes it; empty before it is begun.
        reads: the agents whose answers are in the prompt of the request that writes this one.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tokens: list[int] | None = []
        self.prefill = ""
        self.reads: frozenset[AgentKey] = frozenset()

    def add(self, text: str, tokens: Sequence[int] | None) -> None:
        """Add the next piece, and its tokens if they are known."""
        if tokens is None:
            self.tokens = None
        elif self.tokens is not None and not self.is_over:
            self.tokens.extend(tokens)
        self.write(text)

    def token_ids(self) -> list[int]:
        """Return the tokens so far. Raises: AgentFailed if they are not known."""
        if self.tokens is None:
            raise AgentFailed(
                f"{self.name}'s tokens are not known; ask {self.name} through /generate, or read "
                "its answer as text"
            )
        return self.tokens

    async def token_pieces(self) -> AsyncGenerator[list[int]]:
        """Yield all tokens as they arrive.

        Raises: AgentFailed if the tokens are not known; the answer's own error if it fails.
        """
        count = 0
        # The tokens of a piece of text, even of an empty one, are added before it.
        async for _ in self:
            if new := self.token_ids()[count:]:
                count += len(new)
                yield new


class AgentPromptCache:
    """Holds the latest answer of each agent, of one PD pair or of several.

    Args:
        max_finished: the most answers that are kept once they are over; the least recently used
            ones are forgotten first. An answer that no request writes yet exists as long as a
            request waits for it.
    """

    def __init__(self, max_finished: int = 10_000) -> None:
        self._max_finished = max_finished
        self._answers: OrderedDict[AgentKey, GrowingAnswer] = OrderedDict()
        # Answers that no request writes yet.
        self._awaited: WeakValueDictionary[AgentKey, GrowingAnswer] = WeakValueDictionary()

    def __len__(self) -> int:
        """Count the answers that are written or over."""
        return len(self._answers)

    def read(self, key: AgentKey) -> GrowingAnswer:
        """Return an agent's latest answer, or the one that a later request will write."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        return self._awaited.setdefault(key, GrowingAnswer(key.agent))

    def begin(self, key: AgentKey, reads: Collection[AgentKey], prefill: str = "") -> GrowingAnswer:
        """Return the answer that a request will write.

        An agent that is asked again writes another answer; readers of the previous one keep that.

        Args:
            reads: the agents whose answers are in the request's prompt.
            prefill: URL of the prefill engine of the pair that will write it.

        Raises: BadRequest if agents would wait for each other.
        """
        if self._depends_on(reads, key):
            raise BadRequest(
                f"{key.agent} would wait for an answer that waits for {key.agent}; give each round "
                "its own agent names or its own workflow"
            )
        answer = self._awaited.pop(key, None) or GrowingAnswer(key.agent)
        answer.prefill, answer.reads = prefill, frozenset(reads)
        self._answers[key] = answer
        self._answers.move_to_end(key)
        over = (key for key, answer in self._answers.items() if answer.is_over)
        for oldest in list(islice(over, max(0, len(self._answers) - self._max_finished))):
            del self._answers[oldest]
        return answer

    def _depends_on(self, reads: Collection[AgentKey], target: AgentKey) -> bool:
        """Return whether one of these agents waits for ``target``, directly or through others."""
        seen, left = set[AgentKey](), list(reads)
        while left:
            key = left.pop()
            answer = self._answers.get(key)
            if key == target and (answer is None or not answer.is_over):
                return True
            if key not in seen and answer is not None and not answer.is_over:
                seen.add(key)
                left += answer.reads
        return False


# How a request ended, if not by its answer, as the end of a sentence.
_ENDINGS = {
    "refused": "refused by its engine",
    "left": "left by its client, which disconnected; send it again",
    "lost": "lost: the connection to its engine broke; send it again",
}


class AnswerRecorder(AnswerObserver):
    """Writes an engine's chat completion or ``/generate`` response into an agent's answer.

    Args:
        answer: the agent's answer; ``None`` if no agent can read the response.
        endings: counts how responses end.
        is_stream: whether the response is a stream of events.

    Attributes:
        last: the last event, which in a stream of ``/generate`` contains the whole answer.
        ending: how the response ended, see :class:`~flashmoa.router.forwarding.AnswerObserver`.
    """

    def __init__(
        self, answer: GrowingAnswer | None, endings: Counter, is_stream: bool = False
    ) -> None:
        self._answer = answer
        self._endings = endings
        self._is_stream = is_stream
        self._line = b""
        self._text_length = self._token_count = 0
        self.last: dict[str, Any] = {}
        self.ending: str | None = None

    def receive(self, content: bytes) -> None:
        if self._answer is None:
            return
        if not self._is_stream:
            self._record(self._answer, content)
            return
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._record(self._answer, line.removeprefix(b"data: "))

    def end(self, ending: str) -> None:
        self.ending = ending
        self._endings.labels(ending).inc()
        if self._answer is None or self._answer.is_over:
            return
        if ending == "answered":
            self._answer.close()
        else:
            what = _ENDINGS.get(ending, ending)
            self._answer.fail(AgentFailed(f"{self._answer.name}'s request was {what}"))

    def _record(self, answer: GrowingAnswer, content: bytes) -> None:
        try:
            event: Any = json.loads(content)
            if not isinstance(event, dict):
                return
            self.last = event = cast("dict[str, Any]", event)
            if "error" in event:
                answer.fail(AgentFailed(f"{answer.name}: {event['error']}"))
            elif "choices" in event:
                self._record_chat(answer, event)
            elif "text" in event:
                self._record_generation(answer, event)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            answer.fail(AgentFailed(f"{answer.name}'s answer cannot be read: {error!r}"))

    def _record_chat(self, answer: GrowingAnswer, event: dict[str, Any]) -> None:
        for choice in event["choices"][:1]:
            message: dict[str, Any] | None = choice.get("delta") or choice.get("message")
            answer.add((message or {}).get("content") or "", None)
            if choice.get("finish_reason") == "abort":
                answer.fail(AgentFailed(f"{answer.name}'s request was aborted; send it again"))

    def _record_generation(self, answer: GrowingAnswer, event: dict[str, Any]) -> None:
        # Each event repeats the whole answer so far.
        text: str = event["text"]
        ids: list[int] = event["output_ids"]
        reason: dict[str, Any] = event["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            message = f"{answer.name}'s request was aborted: {reason.get('message')}"
            answer.fail(AgentFailed(f"{message}; send it again"))
            return
        if ids and reason.get("matched") == ids[-1]:
            ids = ids[:-1]  # The token that ended the answer does not belong in other prompts.
        answer.add(text[self._text_length :], ids[self._token_count :])
        self._text_length, self._token_count = len(text), len(ids)
