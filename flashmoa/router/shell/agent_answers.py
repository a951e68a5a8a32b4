"""Agents' answers: kept while they are written, and read out of engines' responses."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from flashmoa.linking.streamed_text import Text
from flashmoa.router.errors import AgentFailed
from flashmoa.router.forwarding import AnswerObserver
from flashmoa.router.metrics import ShellMetrics


class AgentKey(NamedTuple):
    """Identifies an agent: by its workflow, and by the API key whose workflow that is."""

    client: str
    workflow: str
    agent: str


class GrowingAnswer(Text):
    """One agent's answer, as text and as tokens.

    Attributes:
        tokens: of the answer so far; ``None`` where its engine does not tell them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tokens: list[int] | None = []

    def add(self, text: str, tokens: Sequence[int] | None) -> None:
        """Add the next piece. ``tokens``: its tokens; ``None`` where they are not known."""
        if tokens is None:
            self.tokens = None
        elif self.tokens is not None and not self.is_over:
            self.tokens.extend(tokens)
        self.write(text)

    def token_ids(self) -> list[int]:
        """Return its tokens so far. Raises: AgentFailed if they are not known."""
        if self.tokens is None:
            raise AgentFailed(
                f"{self.name}'s tokens are not known; have it answer by /generate, or read its text"
            )
        return self.tokens

    async def token_pieces(self) -> AsyncGenerator[list[int]]:
        """Yield its tokens from the first one on, as they come.

        Raises: the error with which it failed; AgentFailed if its tokens are not known.
        """
        given = 0
        # Each piece of text, even an empty one, comes after its tokens.
        async for _ in self:
            if new := self.token_ids()[given:]:
                given += len(new)
                yield new


class AgentPromptCache:
    """Answers by agent.

    Args:
        max_finished: how many answers are kept once they are over; beyond it the least recently
            used ones are forgotten. An answer that is not begun exists as long as a request waits
            for it.
    """

    def __init__(self, max_finished: int = 10_000) -> None:
        self._max_finished = max_finished
        self._begun: OrderedDict[AgentKey, GrowingAnswer] = OrderedDict()
        self._awaited: WeakValueDictionary[AgentKey, GrowingAnswer] = WeakValueDictionary()
        # The agents that the request which writes an answer waits for.
        self._reads: dict[AgentKey, frozenset[AgentKey]] = {}

    def __len__(self) -> int:
        """Count the answers that are begun."""
        return len(self._begun)

    def read(self, key: AgentKey) -> GrowingAnswer:
        """Return an agent's latest answer, or the one to come, which is kept while it is held."""
        if key in self._begun:
            self._begun.move_to_end(key)
            return self._begun[key]
        return self._awaited.setdefault(key, GrowingAnswer(key.agent))

    def begin(self, key: AgentKey, reads: Collection[AgentKey]) -> GrowingAnswer:
        """Return the answer that a request will write.

        An agent that is asked again writes another answer; readers of the previous one keep that.
        Raises: ValueError if agents would wait for each other.
        """
        if self._depends_on(reads, key):
            raise ValueError(
                f"{key.agent} would wait for an answer that waits for {key.agent}; give each round "
                "its own agent names or its own workflow"
            )
        answer = self._awaited.pop(key, None) or GrowingAnswer(key.agent)
        self._begun[key] = answer
        self._begun.move_to_end(key)
        self._reads[key] = frozenset(reads)
        self._evict()
        return answer

    def _evict(self) -> None:
        over = (key for key, answer in self._begun.items() if answer.is_over)
        for key in list(islice(over, max(0, len(self._begun) - self._max_finished))):
            del self._begun[key], self._reads[key]

    def _depends_on(self, reads: Collection[AgentKey], target: AgentKey) -> bool:
        """Return whether one of these agents waits, directly or not, for ``target``."""
        seen, left = set[AgentKey](), list(reads)
        while left:
            key = left.pop()
            answer = self._begun.get(key)
            if key == target and (answer is None or not answer.is_over):
                return True
            if key not in seen and answer is not None and not answer.is_over:
                seen.add(key)
                left += self._reads[key]
        return False


class AnswerRecorder(AnswerObserver):
    """Writes an engine's chat completion or ``/generate`` response into an agent's answer.

    Args:
        answer: is written into; ``None`` if no agent can read the response.
        streams: whether the response comes as events.

    Attributes:
        last: the last event, which in a stream of ``/generate`` has the whole answer.
        ending: how the response ended, see :class:`~flashmoa.router.forwarding.AnswerObserver`.
    """

    def __init__(self, answer: GrowingAnswer | None, metrics: ShellMetrics, streams: bool) -> None:
        self._answer = answer
        self._metrics = metrics
        self._streams = streams
        self._line = b""
        self._text_length = self._token_count = 0
        self.last: dict[str, Any] = {}
        self.ending: str | None = None

    def heard(self, piece: bytes) -> None:
        if self._answer is None:
            return
        if not self._streams:
            self._record(self._answer, piece)
            return
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._record(self._answer, line.removeprefix(b"data: "))

    def ended(self, ending: str) -> None:
        self.ending = ending
        self._metrics.ended(ending)
        if self._answer is None or self._answer.is_over:
            return
        if ending == "answered":
            self._answer.close()
        else:
            self._answer.fail(AgentFailed(f"{self._answer.name}'s request was {ending}"))

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
            answer.fail(AgentFailed(f"{answer.name}'s answer cannot be read: {error}"))

    def _record_chat(self, answer: GrowingAnswer, event: dict[str, Any]) -> None:
        for choice in event["choices"][:1]:
            message: dict[str, Any] | None = choice.get("delta") or choice.get("message")
            answer.add((message or {}).get("content") or "", None)
            if choice.get("finish_reason") == "abort":
                answer.fail(AgentFailed(f"{answer.name} was aborted"))

    def _record_generation(self, answer: GrowingAnswer, event: dict[str, Any]) -> None:
        # Each event repeats the answer so far.
        text: str = event["text"]
        ids: list[int] = event["output_ids"]
        reason: dict[str, Any] = event["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            answer.fail(AgentFailed(f"{answer.name} was aborted: {reason.get('message')}"))
            return
        if ids and reason.get("matched") == ids[-1]:
            ids = ids[:-1]  # The token that ended the answer does not belong in other prompts.
        answer.add(text[self._text_length :], ids[self._token_count :])
        self._text_length, self._token_count = len(text), len(ids)
