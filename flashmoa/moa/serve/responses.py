"""Read requests of OpenAI's Responses API as chat completions, and make its answers; pure.

Nothing is stored, so a request has its whole conversation.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from flashmoa.link.prompt import NotForecastable
from flashmoa.link.response_items import read_messages
from flashmoa.moa.results import Result
from flashmoa.moa.serve.chat_completions import (
    ChatQuestion,
    ChatRequestRefused,
    count,
    refuse,
)

# Fields of chat completions that have another name here.
_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
_STORED = "nothing is stored here; send the whole conversation in input"
_TRUNCATION = "prompts are never cut; leave it out"
# Fields that no answer can follow: the values that ask for nothing, and why others are refused.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "an answer comes with its request; leave it out"),
    "truncation": (("disabled",), _TRUNCATION),
    "previous_response_id": ((), _STORED),
    "conversation": ((), _STORED),
    "prompt": ((), _STORED),
    "include": (([], ["reasoning.encrypted_content"]), "answers have no such parts; leave it out"),
}
# Fields of a request that its answer repeats.
_REPEATED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "user")


def parse_response_request(body: Mapping[str, Any]) -> ChatQuestion:
    """Read a body. Raises: ChatRequestRefused, which names the field as the body does."""
    chat = read_response_request(body)
    try:
        return ChatQuestion.parse(chat)
    except ChatRequestRefused as error:
        if (name := _RENAMED.get(error.param or "")) is None:
            raise
        # Items are not counted as messages are.
        message = re.sub(rf"\b{error.param}\b(\.\d+)?", name, str(error), count=1)
        refuse(message, name.partition(".")[0], error.code)


def read_response_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a chat completion that asks for the same.

    Raises: ChatRequestRefused, which names the field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, (neutral, reason) in _UNSUPPORTED.items():
        if name in given and given.pop(name) not in neutral:
            refuse(f"{name} is {body[name]!r:.80}: {reason}", name, "unsupported_parameter")
    for name, ours in _RENAMED.items():
        if name in given:
            refuse(f"there is no field {name!r}: use {ours}", name, "unknown_parameter")
    if isinstance(items := given.get("input"), list):
        given["input"] = [
            _read_parts(item, place) for place, item in enumerate(cast("list[Any]", items))
        ]
    try:
        messages = _join_system([_read_message(message) for message in read_messages(given)])
    except (NotForecastable, AttributeError, TypeError) as error:
        refuse(f"the input cannot be read: {error}; send the whole conversation as text", "input")
    ours = ("instructions", *(name.partition(".")[0] for name in _RENAMED.values()))
    chat = {name: value for name, value in given.items() if name not in ours}
    chat["messages"] = messages
    text, reasoning = _read_object(given, "text"), _read_object(given, "reasoning")
    options = {
        "max_completion_tokens": given.get("max_output_tokens"),
        "response_format": _nest(text.get("format"), "json_schema"),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
    }
    chat |= {name: value for name, value in options.items() if value is not None}
    if isinstance(tools := given.get("tools"), list):
        chat["tools"] = [_nest_tool(tool) for tool in cast("list[Any]", tools)]
    if "tool_choice" in given:
        chat["tool_choice"] = _nest(given["tool_choice"], "function")
    return chat


def _read_parts(item: Any, place: int) -> Any:
    """Return an item whose refusals are texts. Raises: ChatRequestRefused for other parts."""
    if not isinstance(item, dict):
        return item
    given = cast("dict[str, Any]", item)
    kind = given.get("type") or "message"
    name = "output" if kind == "function_call_output" else "content"
    content: Any = given.get(name)
    if kind not in ("message", "function_call_output") or not isinstance(content, list):
        return given
    parts: list[Any] = []
    for number, one in enumerate(cast("list[Any]", content)):
        part = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            advice = "agents read each other's texts, so leave the part out"
            where = f"input.{place}.{name}.{number} has type {kind!r:.80}"
            refuse(f"{where}: {advice}", "input", "unsupported_content")
        text: dict[str, Any] = {"type": "output_text", "text": part.get("refusal")}
        parts.append(text if kind == "refusal" else part)
    return {**given, name: parts}


def _join_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without empty turns of assistants, and with one system message to begin."""
    found: list[dict[str, Any]] = []
    for message in messages:
        is_thought = message["role"] == "assistant" and message["content"] is None
        if is_thought and not message.get("tool_calls"):
            continue  # A turn of nothing but thought, which no agent reads.
        is_system = message["role"] in ("system", "developer")
        is_second = len(found) == 1 and found[0]["role"] in ("system", "developer")
        contents = [one["content"] for one in (*found[:1], message)]
        if is_system and is_second and all(isinstance(one, str | list) for one in contents):
            texts = map(_text_of, contents)
            found[0] = {"role": "system", "content": "\n\n".join(filter(None, texts))}
        else:
            found.append(message)
    return found


def _text_of(content: str | list[Any]) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content


def _read_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value: Any = body.get(name, {})
    if not isinstance(value, dict):
        refuse(f"{name} is {value!r:.80}; give an object", name)
    return cast("dict[str, Any]", value)


def _nest(fields: Any, kind: str) -> Any:
    """Return an object of this type with its fields in a field of their own, as in chats."""
    given = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
    if given.get("type") != kind:
        return cast("Any", fields)
    return {"type": kind, kind: {name: given[name] for name in given if name != "type"}}


def _nest_tool(tool: Any) -> Any:
    kind = cast("dict[str, Any]", tool).get("type") if isinstance(tool, dict) else None
    if kind != "function":
        text = f"tools has a tool of type {kind!r}; agents call functions only, so leave it out"
        refuse(text, "tools", "unsupported_parameter")
    return _nest(tool, "function")


def _read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of :func:`read_messages` in the form of chat completions."""
    read = {name: value for name, value in message.items() if name not in ("reasoning", "content")}
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = cast("list[Mapping[str, Any]]", content)
        content = [{"type": "text", "text": part.get("text")} for part in parts]
    role = "system" if read.get("role") == "instructions" else read.get("role")
    return {**read, "role": role, "content": content}


@dataclass(slots=True)
class Response:
    """Makes an answer's body, and the events of a streamed one.

    Args:
        asked: the body of the request.
    """

    model: str
    asked: Mapping[str, Any]
    identity: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _message: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _sent: int = 0
    _text: str = ""
    _has_message: bool = False

    def whole(self, result: Result, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a whole answer. ``record`` is its field ``flashmoa``."""
        is_cut = result.finish_reason == "length"
        usage, final = count(result.final.usage), result.final
        thought = max(0, usage["completion_tokens"] - final.tokens) if final.thought else 0
        return {
            **self._body("incomplete" if is_cut else "completed", self._items(result)),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            },
            "flashmoa": record,
        }

    def begin(self) -> list[dict[str, Any]]:
        """Return the events before a streamed answer."""
        kinds = ("created", "in_progress")
        return [self._event(f"response.{kind}", response=self._body(kinds[1])) for kind in kinds]

    def add(self, piece: str) -> list[dict[str, Any]]:
        """Return the events of the next piece of the text."""
        events = [] if self._has_message else self._begin_message()
        self._text += piece
        return [
            *events,
            self._event("response.output_text.delta", delta=piece, **self._at(), logprobs=[]),
        ]

    def end(self, result: Result, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events after the text: its end, the calls of tools, and the whole answer."""
        events: list[dict[str, Any]] = []
        if not (self._text or result.tool_calls):
            events += self._begin_message()
        if self._has_message:
            text, done = self._text, "response.output_text.done"
            events.append(self._event(done, text=text, **self._at(), logprobs=[]))
            events.append(self._event("response.content_part.done", part=_part(text), **self._at()))
        whole = self.whole(result, record)
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                events += self._call_events(item, index)
            done = "response.output_item.done"
            events.append(self._event(done, output_index=index, item=item))
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def fail(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of an answer that fails."""
        problem: Mapping[str, Any] = error["error"]
        kind = "server_error" if problem["type"] == "server_error" else "invalid_prompt"
        failed = {**self._body("failed"), "error": {"code": kind, "message": problem["message"]}}
        return [self._event("response.failed", response=failed)]

    def _begin_message(self) -> list[dict[str, Any]]:
        self._has_message = True
        item: dict[str, Any] = {**self._message_item("", "in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", part=_part(""), **self._at()),
        ]

    def _call_events(self, item: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
        place = {"output_index": index, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        kind, arguments = "response.function_call_arguments", item["arguments"]
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"{kind}.delta", delta=arguments, **place),
            self._event(f"{kind}.done", arguments=arguments, name=item["name"], **place),
        ]

    def _items(self, result: Result) -> list[dict[str, Any]]:
        # What has been streamed is the answer, also if another text took its place.
        text = self._text or result.text
        items = [self._message_item(text, "completed")] if text or not result.tool_calls else []
        for call in result.tool_calls:
            function: Mapping[str, Any] = call["function"]
            items.append(
                {
                    "id": f"fc_{call['id']}",
                    "type": "function_call",
                    "status": "completed",
                    "call_id": call["id"],
                    "name": function["name"],
                    "arguments": function["arguments"],
                }
            )
        if result.finish_reason == "length":  # The last item is the one that the limit cut.
            items[-1]["status"] = "incomplete"
        return items

    def _message_item(self, text: str, status: str) -> dict[str, Any]:
        item = {"id": self._message, "type": "message", "role": "assistant", "status": status}
        return {**item, "content": [_part(text)]}

    def _at(self) -> dict[str, Any]:
        return {"output_index": 0, "content_index": 0, "item_id": self._message}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _body(self, status: str, output: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        asked = self.asked
        parallel = asked.get("parallel_tool_calls")
        return {
            **{name: asked.get(name) for name in _REPEATED},
            "id": self.identity,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [*output],
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True if parallel is None else parallel,
            "previous_response_id": None,
            "store": False,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
