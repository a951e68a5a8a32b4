"""Keep agents' answers (`AgentPromptCache`), and record them from responses (`AnswerRecorder`)."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from flashmoa.linking.streamed_text import Text
from flashmoa.router.forwarding import AnswerObserver, BadRequest, RouterError


class AgentFailed(RouterError):
    """Raised when an agent's answer, which a request reads, will not be completed."""

    status = 424


class AgentKey(NamedTuple):
    """Identifies an agent. ``client`` is the API key of the client whose workflow it is."""

    client: str
    workflow: str
    agent: str


class ReadableAnswer(Text):
    """Holds one agent's answer while it is written.

    Attributes:
        is_begun: whether a request writes it, or has.
        reads: the agents whose answers are in the prompt of that request.
    """

    is_begun = False
    reads: frozenset[AgentKey] = frozenset()


class AgentPromptCache:
    """Holds the latest answer of each agent.

    Args:
        most: the most answers that are kept once no request writes or waits for them: those that
            were begun last.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._answers: WeakValueDictionary[AgentKey, ReadableAnswer] = WeakValueDictionary()
        self._begun: deque[ReadableAnswer] = deque(maxlen=most)

    def read(self, key: AgentKey) -> ReadableAnswer:
        """Return an agent's latest answer, or the one that a later request will write."""
        return self._answers.setdefault(key, ReadableAnswer(key.agent))

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
        answer = self.read(key)
        if answer.is_begun:
            answer = self._answers[key] = ReadableAnswer(key.agent)
        answer.is_begun, answer.reads = True, frozenset(reads)
        self._begun.append(answer)
        return answer

    def _depends_on(self, reads: Collection[AgentKey], target: AgentKey) -> bool:
        """Return whether one of these agents waits for ``target``, directly or through others."""
        seen, left = set[AgentKey](), list(reads)
        while left:
            key = left.pop()
            answer = self._answers.get(key)
            if key in seen or (answer is not None and answer.is_over):
                continue
            if key == target:
                return True
            seen.add(key)
            left += answer.reads if answer is not None else ()
        return False


class AnswerRecorder(AnswerObserver):
    """Writes an engine's chat completion or ``/generate`` response into an agent's answer.

    Args: is_stream: whether the response is a stream of events.
    """

    def __init__(self, answer: ReadableAnswer, is_stream: bool = False) -> None:
        self._answer = answer
        self._is_stream = is_stream
        self._line = b""
        self._length = 0

    def receive(self, content: bytes) -> None:
        if not self._is_stream:
            self._record(content)
            return
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._record(line.removeprefix(b"data: "))

    def end(self, ending: str) -> None:
        if self._answer.is_over:
            return
        if ending == "answered":
            self._answer.close()
        else:  # It was refused by its engine, left by its client, or lost with its engine.
            self._fail(f"{self._answer.name}'s request was {ending}")

    def _record(self, content: bytes) -> None:
        name = self._answer.name
        try:
            event: Any = json.loads(content)
            if "error" in event:
                self._fail(f"{name}: {event['error']}")
            elif "choices" in event:
                for choice in event["choices"][:1]:
                    message = choice.get("delta") or choice.get("message") or {}
                    self._write(message.get("content") or "", choice.get("finish_reason"))
            elif "text" in event:
                # Each event repeats the whole answer so far.
                text: str = event["text"]
                reason = event["meta_info"].get("finish_reason") or {}
                self._write(text[self._length :], reason.get("type"))
                self._length = len(text)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            self._fail(f"{name}'s answer cannot be read: {error!r}")

    def _write(self, text: str, finish_reason: str | None) -> None:
        self._answer.write(text)
        if finish_reason == "abort":
            self._fail(f"{self._answer.name}'s request was aborted")

    def _fail(self, reason: str) -> None:
        self._answer.fail(AgentFailed(f"{reason}; send it again"))
