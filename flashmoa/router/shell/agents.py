"""Keep agents' answers (`AgentPromptCache`), and parse chats that read or write answers.

``workflow`` and ``agent`` in a chat's body name the agent that writes the answer. Among the parts
of a message, ``{"type": "agent", "agent": NAME}`` stands for that agent's answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakValueDictionary

from flashmoa.link.answers import AnswerReader
from flashmoa.link.streamed_text import Text, replace_marks
from flashmoa.router.forwarding import AnswerObserver, RouterError


class BadRequest(RouterError, ValueError):
    """Raised when a request's fields that concern agents are malformed."""

    status = 400


class AgentFailed(RouterError):
    """Raised when an answer that a request reads will not be completed."""

    status = 424


# Number of last begun answers that are kept even if nothing uses them.
MAX_UNUSED_ANSWERS = 10_000

# The API key of the workflow's client, the workflow, and the agent's name.
AgentKey = tuple[str, str, str]


class ReadableAnswer(Text):
    """An agent's answer, which a request writes or will write."""

    is_begun = False


class AgentPromptCache:
    """Keeps each agent's latest answer while it is used, and the answers that were begun last."""

    def __init__(self) -> None:
        self._answers: WeakValueDictionary[AgentKey, ReadableAnswer] = WeakValueDictionary()
        self._begun: deque[ReadableAnswer] = deque(maxlen=MAX_UNUSED_ANSWERS)

    def read(self, key: AgentKey) -> ReadableAnswer:
        """Return an agent's latest answer, or the answer that a later request will write."""
        return self._answers.setdefault(key, ReadableAnswer(key[2]))

    def begin(self, key: AgentKey) -> ReadableAnswer:
        """Return the answer that a request will write.

        An agent that is asked again writes another answer. Readers keep the previous one.
        """
        answer = self.read(key)
        if answer.is_begun:
            answer = self._answers[key] = ReadableAnswer(key[2])
        answer.is_begun = True
        self._begun.append(answer)
        return answer


class AnswerRecorder(AnswerObserver):
    """Writes an engine's chat completion, which may be a stream, into an agent's answer."""

    def __init__(self, answer: ReadableAnswer, is_stream: bool = False) -> None:
        self._answer = answer
        self._reader = AnswerReader(is_stream=is_stream)

    def receive(self, content: bytes) -> None:
        if text := self._reader.feed(content):
            self._answer.write(text)

    def end(self, ending: str) -> None:
        if ending != "answered":  # The engine has refused it or is lost, or the client left.
            self._fail(f"'s request was {ending}; send it again")
        elif (result := self._reader.result()) is None:
            self._fail(f": {self._reader.problem}")
        elif result.finish_reason == "abort":
            self._fail("'s request was aborted; send it again")
        else:
            self._answer.finish(result.text)

    def _fail(self, reason: str) -> None:
        self._answer.fail(AgentFailed(f"{self._answer.name}{reason}"))


@dataclass(slots=True)
class AgentRequest:
    """A parsed request.

    Attributes:
        agent: the agent that writes the answer; ``None`` if no request can read the answer.
        body: the body without the router's own fields, with :attr:`marks` in place of answers.
        marks: by agent, the mark that stands for the agent's answer in the body.
    """

    workflow: str
    agent: str | None
    body: dict[str, Any]
    marks: dict[str, str] = field(default_factory=dict[str, str])

    def filled(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the body with each agent's text in place of its answer."""
        return replace_marks(self.body, {self.marks[name]: text for name, text in texts.items()})


def parse_request(body: Mapping[str, Any]) -> AgentRequest:
    """Parse the body of a chat completion.

    Raises: BadRequest if the fields or parts that concern agents are malformed.
    """
    rest = dict(body)
    workflow, agent = rest.pop("workflow", ""), rest.pop("agent", None)
    if not isinstance(workflow, str) or not (agent is None or isinstance(agent, str)):
        raise BadRequest(f"workflow {workflow!r} and agent {agent!r} must be strings")
    if agent is not None and (rest.get("n") or 1) != 1:
        raise BadRequest(f"agent {agent!r} writes one answer; ask for n=1, or leave agent out")
    request = AgentRequest(workflow, agent, rest)
    if isinstance(messages := rest.get("messages"), list):
        given = cast("list[Any]", messages)
        rest["messages"] = [_mark_message(message, request.marks) for message in given]
    return request


def _mark_message(message: Any, marks: dict[str, str]) -> Any:
    """Return a message with marks for agents, its content as one string if it is all text."""
    content: Any = _get(message, "content")
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    if not any(_get(part, "type") == "agent" for part in parts):
        return message
    marked: list[Any] = []
    for part in parts:
        if _get(part, "type") != "agent":
            marked.append(part)
        elif isinstance(name := _get(part, "agent"), str):
            marked.append({"type": "text", "text": marks.setdefault(name, f"{Text('agent')}")})
        else:
            raise BadRequest(f"a part of type agent has an agent's name; {part!r} has none")
    texts = [_get(part, "text") for part in marked]
    is_text = all(isinstance(text, str) for text in texts)
    return {**message, "content": "".join(texts) if is_text else marked}


def _get(value: Any, name: str) -> Any:
    """Return a field of an object; ``None`` for any other value."""
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
