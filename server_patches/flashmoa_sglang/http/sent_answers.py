"""Reads answers as they leave the server, since their clients send them back.

SGLang's parsers of streams and of whole answers differ. So the sent answer is read, not the text
that the model wrote. There is a class for each API:

- ``read`` returns the parts of a whole answer; none if it is an error.
- An instance adds up the events of a streamed answer, and ``parts`` returns its parts.
- ``end`` is text that only the last event of an answer with tool calls has, or may have. In texts,
  quotes and line ends are escaped.
- ``returns_thoughts`` says whether most clients return a model's thoughts with the results of
  tools.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pydantic_core import from_json

# A chat message, a block of Anthropic's API, or an item of the Responses API.
Part = dict[str, Any]


class Chat:
    """Reads the chunks of a chat completion."""

    end = '"finish_reason":"tool_calls"'
    returns_thoughts = False

    @staticmethod
    def read(response: Any) -> list[Part]:
        choices = getattr(response, "choices", None) or ()
        return [choice.message.model_dump(exclude_none=True) for choice in choices]

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


class Messages:
    """Reads the events of Anthropic's API."""

    end = '"stop_reason":"tool_use"'
    returns_thoughts = True

    @staticmethod
    def read(response: Any) -> list[Part]:
        return from_json(response.body).get("content") or []

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


class Responses:
    """Reads the items of the Responses API from its last event, which has all items."""

    end = "event: response.completed\n"
    returns_thoughts = True

    @staticmethod
    def read(response: Any) -> list[Part]:
        output = getattr(response, "output", None) or ()
        return [item.model_dump(exclude_none=True) for item in output]

    def __init__(self) -> None:
        self._last = ""

    def add(self, event: str) -> None:
        self._last = event

    def parts(self) -> list[Part]:
        return _data(self._last)["response"]["output"]


SentAnswer = Chat | Messages | Responses


def _data(event: str) -> dict[str, Any]:
    """Return the data of a server-sent event; nothing if the data is no object."""
    _, found, data = event.partition("data: {")
    return from_json("{" + data) if found else {}
