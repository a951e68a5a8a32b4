"""Read and write requests of OpenAI's Responses API as messages of chat completions.

That API splits an agent's turn into several items: its reasoning, its text and each call of a tool.
Here the turn is one message, with only the fields that shape a prompt: links look for texts and
calls of tools in messages. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa.link.prompt import NotForecastable

Message = Mapping[str, Any]

# The role of a message for the instructions, which are no item of the input.
_INSTRUCTIONS = "instructions"
# The other fields that shape the prompt.
_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning", "chat_template_kwargs")
# With these fields the prompt may contain more than the request.
_STORED = ("previous_response_id", "conversation", "prompt")
_TEXT_PARTS = ("input_text", "output_text", "text")
# Fields of a message that a model does not see.
_NOT_SHOWN = frozenset(("id", "status", "type"))


def read_messages(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a request; its instructions are the first. Raises: NotForecastable."""
    for name in _STORED:
        if body.get(name):
            raise NotForecastable(f"a part of its prompt is stored at the server ({name})")
    given, messages = body.get("input"), list[Message]()
    if instructions := body.get("instructions"):
        messages.append({"role": _INSTRUCTIONS, "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise NotForecastable("it has no input")
    return [*messages, *read_items(cast("list[Any]", given))]


def read_items(items: Sequence[Any]) -> list[Message]:
    """Return items of an input or of an output as messages. Raises: NotForecastable."""
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise NotForecastable(f"it has an item that is no object: {item!r:.80}")
        message = _read_item(cast("dict[str, Any]", item))
        if messages and _continues(messages[-1], message):
            messages[-1] = _join(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _read_item(item: Mapping[str, Any]) -> Message:
    kind = item.get("type") or "message"
    if kind == "message":
        shown = {name: item[name] for name in item if name not in _NOT_SHOWN}
        return {**shown, "content": _read_content(item.get("content"))}
    if kind == "function_call":
        id_ = item.get("call_id") or item.get("id")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": id_, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = _read_content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        texts = {name: item[name] for name in ("summary", "content") if item.get(name)}
        return {"role": "assistant", "content": None, "reasoning": texts}
    raise NotForecastable(f"it has an item of the type {kind!r}")


def _read_content(content: Any) -> Any:
    """Return a text, or its parts. Raises: NotForecastable."""
    if not isinstance(content, list):
        return content
    parts = cast("list[dict[str, Any]]", content)
    for part in parts:
        is_object = isinstance(cast("object", part), dict)
        if not is_object or part.get("type") not in _TEXT_PARTS:
            raise NotForecastable(f"only text can be prefilled ahead; it has {part!r:.80}")
    return [{name: part.get(name) for name in ("type", "text")} for part in parts]


def _continues(last: Message, message: Message) -> bool:
    """Return whether an item continues the turn of the last message, in the usual order."""
    if not last.get("role") == message.get("role") == "assistant" or "reasoning" in message:
        return False
    has_begun = last.get("content") is not None or "tool_calls" in last
    return "tool_calls" in message or ("reasoning" in last and not has_begun)


def _join(last: Message, message: Message) -> Message:
    if "tool_calls" in message:
        return {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
    return {**last, **message}


def write_messages(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the fields of a request that has these messages; undoes :func:`read_messages`."""
    fields: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == _INSTRUCTIONS:
            fields["instructions"] = message["content"]
        else:
            items += _write_items(message)
    return {**fields, "input": items}


def _write_items(message: Message) -> list[dict[str, Any]]:
    if message.get("role") == "tool":
        id_, output = message.get("tool_call_id"), message.get("content")
        return [{"type": "function_call_output", "call_id": id_, "output": output}]
    calls: Sequence[Message] = message.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if "reasoning" in message:
        items.append({"type": "reasoning", "summary": [], **message["reasoning"]})
    if message.get("content") is not None or not (items or calls):
        items.append({key: message[key] for key in message.keys() - {"reasoning", "tool_calls"}})
    called = [{"call_id": call["id"], **call["function"]} for call in calls]
    return [*items, *({"type": "function_call", **each} for each in called)]


def response_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that shape its prompt, without the messages."""
    fields = {name: body.get(name) for name in _FIELDS}
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with its messages beside its input, for readers of chats."""
    try:
        messages = read_messages(body)
    except NotForecastable:
        given = body.get("input")
        items = cast("list[Any]", given if isinstance(given, list) else [])
        messages = [cast("Message", item) for item in items if isinstance(item, dict)]
    return {**body, "messages": messages}
