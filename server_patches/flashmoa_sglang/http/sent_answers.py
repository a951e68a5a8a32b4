"""Reads answers as they leave the server, since their clients send them back.

SGLang's parsers of streams and of whole answers differ. So the sent answer is read, not the text
that the model wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json

# A chat message, a block of Anthropic's API, or an item of the Responses API.
Part = dict[str, Any]


class Events(Protocol):
    """Adds up the events of an answer that is streamed."""

    def add(self, event: str) -> None: ...
    def parts(self) -> list[Part]: ...


@dataclass(frozen=True, slots=True)
class ChatApi:
    """An API, and how its answers are read.

    Attributes:
        events: makes a reader of an answer's events.
        end: text that only the last event of an answer with tool calls has, or may have.
        read: returns the parts of a whole answer; none if it is an error.
        returns_thoughts: whether most clients return a model's thoughts with the results of tools.
    """

    events: Callable[[], Events]
    end: str
    read: Callable[[Any], list[Part]]
    returns_thoughts: bool


class _Chunks:
    """Adds up the chunks of a chat completion."""

    def __init__(self) -> None:
        self._texts = defaultdict[str, list[str]](list)
        self._calls: dict[int, Part] = {}
        self._arguments = defaultdict[int, list[str]](list)

    def add(self, event: str) -> None:
        for delta in (choice["delta"] for choice in _data(event).get("choices") or ()):
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    self._texts[name].append(delta[name])
            for call in delta.get("tool_calls") or ():
                # The first part of a call has its id and its name; others have arguments only.
                self._calls.setdefault(call["index"], call)
                self._arguments[call["index"]].append(call["function"].get("arguments") or "")

    def parts(self) -> list[Part]:
        calls = [
            {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}
            for index, call in self._calls.items()
        ]
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        return [{"role": "assistant", **texts, "tool_calls": calls}]


class _Blocks:
    """Adds up the events of Anthropic's API."""

    def __init__(self) -> None:
        self._blocks: list[Part] = []
        self._pieces = defaultdict[int, list[str]](list)

    def add(self, event: str) -> None:
        data = _data(event)
        if data.get("type") == "content_block_start":
            self._blocks.append(data["content_block"])
        elif data.get("type") == "content_block_delta":
            # A signature, the fourth kind of delta, is not text.
            for name in ("text", "thinking", "partial_json"):
                self._pieces[data["index"]].append(data["delta"].get(name) or "")

    def parts(self) -> list[Part]:
        texts = ["".join(self._pieces[index]) for index in range(len(self._blocks))]
        return [
            {**block, "input": from_json(text or "{}")}
            if block["type"] == "tool_use"
            else {**block, block["type"]: text}
            for block, text in zip(self._blocks, texts, strict=True)
        ]


class _LastItems:
    """Reads the items of the Responses API from its last event, which has all items."""

    def __init__(self) -> None:
        self._last = ""

    def add(self, event: str) -> None:
        self._last = event

    def parts(self) -> list[Part]:
        return _data(self._last)["response"]["output"]


def _read_completion(response: Any) -> list[Part]:
    choices = getattr(response, "choices", None) or ()
    return [choice.message.model_dump(exclude_none=True) for choice in choices]


def _read_blocks(response: Any) -> list[Part]:
    return from_json(response.body).get("content") or []


def _read_items(response: Any) -> list[Part]:
    output = getattr(response, "output", None) or ()
    return [item.model_dump(exclude_none=True) for item in output]


def _data(event: str) -> dict[str, Any]:
    """Return the data of a server-sent event; nothing if the data is no object."""
    _, found, data = event.partition("data: {")
    return from_json("{" + data) if found else {}


# In texts, quotes and line ends are escaped.
CHAT = ChatApi(_Chunks, '"finish_reason":"tool_calls"', _read_completion, returns_thoughts=False)
MESSAGES = ChatApi(_Blocks, '"stop_reason":"tool_use"', _read_blocks, returns_thoughts=True)
RESPONSES = ChatApi(_LastItems, "event: response.completed\n", _read_items, returns_thoughts=True)
