"""Keep agents' answers (`AgentPromptCache`), and record them from responses (`AnswerRecorder`)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
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


class ReadableAnswer(Text):
    """Holds one agent's answer while it is written.

    Attributes:
        reads: the agents whose answers are in the prompt of the request that writes this one.
    """

    reads: frozenset[AgentKey] = frozenset()


class AgentPromptCache:
    """Holds the latest answer of each agent, of one PD pair or of several.

    Args:
        max_finished: the most answers that are kept once they are over; the least recently used
            ones are forgotten first. An answer that no request writes yet exists as long as a
            request waits for it.
    """

    def __init__(self, max_finished: int = 10_000) -> None:
        self._max_finished = max_finished
        self._answers: OrderedDict[AgentKey, ReadableAnswer] = OrderedDict()
        # Answers that no request writes yet.
        self._awaited: WeakValueDictionary[AgentKey, ReadableAnswer] = WeakValueDictionary()

    def __len__(self) -> int:
        """Count the answers that are written or over."""
        return len(self._answers)

    def read(self, key: AgentKey) -> ReadableAnswer:
        """Return an agent's latest answer, or the one that a later request will write."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        return self._awaited.setdefault(key, ReadableAnswer(key.agent))

    def begin(self, key: AgentKey, reads: Collection[AgentKey]) -> ReadableAnswer:
        """Return the answer that a request will write.

        An agent that is asked again writes another answer; readers of the previous one keep that.

        Args: reads: the agents whose answers are in the request's prompt.

        Raises: BadRequest if agents would wait for each other.
        """
        if self._depends_on(reads, key):
            raise BadRequest(
                f"{key.agent} would wait for an answer that waits for {key.agent}; give each round "
                "its own agent names or its own workflow"
            )
        answer = self._awaited.pop(key, None) or ReadableAnswer(key.agent)
        answer.reads = frozenset(reads)
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
        self, answer: ReadableAnswer | None, endings: Counter, is_stream: bool = False
    ) -> None:
        self._answer = answer
        self._endings = endings
        self._is_stream = is_stream
        self._line = b""
        self._length = 0
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

    def _record(self, answer: ReadableAnswer, content: bytes) -> None:
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

    def _record_chat(self, answer: ReadableAnswer, event: dict[str, Any]) -> None:
        for choice in event["choices"][:1]:
            message: dict[str, Any] | None = choice.get("delta") or choice.get("message")
            answer.write((message or {}).get("content") or "")
            if choice.get("finish_reason") == "abort":
                answer.fail(AgentFailed(f"{answer.name}'s request was aborted; send it again"))

    def _record_generation(self, answer: ReadableAnswer, event: dict[str, Any]) -> None:
        reason: dict[str, Any] = event["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            message = f"{answer.name}'s request was aborted: {reason.get('message')}"
            answer.fail(AgentFailed(f"{message}; send it again"))
            return
        # Each event repeats the whole answer so far.
        text: str = event["text"]
        answer.write(text[self._length :])
        self._length = len(text)
