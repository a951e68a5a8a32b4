"""Parse requests that read or write agents' answers (`parse_request`); pure.

``workflow`` and ``agent`` in a body name the agent that writes the answer. In a prompt,
``{"agent": NAME}`` stands for that agent's answer: as ``{"type": "agent", "agent": NAME}`` among
the parts of a message, or in ``/generate``'s ``prompt``, which is a list of such parts and of
``{"text": ...}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from flashmoa.linking.streamed_text import Text, replace_marks
from flashmoa.router.forwarding import CHAT, BadRequest

# Fields that prevent a request from sharing KV with other requests that have the same tokens.
_NAMESPACE = ("cache_salt", "extra_key", "lora_path", "image_data", "audio_data", "video_data")
_MAX_AGENTS = 256


@dataclass(slots=True)
class AgentRequest:
    """A parsed request.

    Attributes:
        workflow: the workflow whose agents it reads and writes.
        agent: the agent that writes the answer; ``None`` if no request can read the answer.
        body: the body without the router's own fields, with :attr:`marks` in place of answers.
        is_chat: whether it has messages, and not a text.
        marks: by agent, the mark that stands for the agent's answer in the body.
    """

    workflow: str
    agent: str | None
    body: dict[str, Any]
    is_chat: bool
    marks: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_ordinary(self) -> bool:
        """Whether the request neither reads nor writes agents' answers."""
        return self.agent is None and not self.marks

    @property
    def can_prefill_early(self) -> bool:
        """Whether the prompt's KV can be computed before the request is sent."""
        return not any(self.body.get(name) for name in _NAMESPACE)

    def filled(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the body with these texts, by agent, in place of the answers."""
        return replace_marks(self.body, {self.marks[name]: text for name, text in texts.items()})

    def mark(self, part: Any) -> str:
        """Return the mark of a part's agent. Raises: BadRequest if it names none, or too many."""
        name = _get(part, "agent")
        if not isinstance(name, str):
            raise BadRequest(f"a part of a prompt has text or an agent's name; {part!r} has none")
        if name not in self.marks and len(self.marks) == _MAX_AGENTS:
            raise BadRequest(f"a prompt may read at most {_MAX_AGENTS} agents; split it")
        return self.marks.setdefault(name, f"{Text('agent')}")


def parse_request(path: str, body: Mapping[str, Any]) -> AgentRequest:
    """Parse the body of a request.

    Raises: BadRequest if the fields or parts that concern agents are malformed.
    """
    rest = dict(body)
    workflow, agent = rest.pop("workflow", ""), rest.pop("agent", None)
    if not isinstance(workflow, str) or not (agent is None or isinstance(agent, str)):
        raise BadRequest(f"workflow {workflow!r} and agent {agent!r} must be strings")
    request = AgentRequest(workflow, agent, rest, path == CHAT)
    if request.is_chat:
        if isinstance(messages := rest.get("messages"), list):
            given = cast("list[Any]", messages)
            rest["messages"] = [_mark_message(message, request) for message in given]
    elif isinstance(rest.get("prompt"), list):
        _parse_generation(request)
    if agent is not None and _asks_for_several_answers(rest):
        raise BadRequest(
            f"agent {agent!r} writes one answer, and this request asks for several; send one "
            "prompt with n=1, or leave agent out"
        )
    return request


def _parse_generation(request: AgentRequest) -> None:
    body = request.body
    given: list[Any] = body.pop("prompt")
    if "text" in body or "input_ids" in body:
        raise BadRequest("give one of prompt, text and input_ids, not several")
    texts = [(_get(part, "text"), part) for part in given]
    body["text"] = "".join(
        text if isinstance(text, str) else request.mark(part) for text, part in texts
    )


def _mark_message(message: Any, request: AgentRequest) -> Any:
    """Return a message with marks for agents, its content as one string if it is all text."""
    content: Any = _get(message, "content")
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    if not any(_get(part, "type") == "agent" for part in parts):
        return message
    marked: list[Any] = [
        {"type": "text", "text": request.mark(part)} if _get(part, "type") == "agent" else part
        for part in parts
    ]
    texts = [_get(part, "text") for part in marked]
    is_text = all(isinstance(text, str) for text in texts)
    return {**message, "content": "".join(texts) if is_text else marked}


def _asks_for_several_answers(body: Mapping[str, Any]) -> bool:
    sampling, ids = body.get("sampling_params"), body.get("input_ids")
    lists: list[Any] = [body.get("text"), sampling, *(ids[:1] if isinstance(ids, list) else ())]
    answers: Any = _get(sampling, "n") or body.get("n") or 1
    return answers != 1 or any(isinstance(value, list) for value in lists)


def _get(value: Any, name: str) -> Any:
    """Return a field of an object; ``None`` for any other value."""
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
