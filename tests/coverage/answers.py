"""Let a tiny random model answer as an agent of a real model would (:class:`Script`).

Requests get a grammar and limits just before they are sent, below FlashMoA and the frameworks. So
the engine itself writes calls of tools and the names of speakers; all other texts are the model's.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

Body = Mapping[str, Any]
# A text that the engine must write; ``None`` for the model's own text.
Answer = str | None
# Number of tokens of the model's own texts: enough that a link can be made meanwhile.
TEXT_TOKENS = 64
_NAME = re.compile(r"You are (\w+)\.")


def call(name: str, **arguments: object) -> str:
    """Return a call of a tool as a model of the Qwen family writes it."""
    function = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


LOOK = call("look", place="lake")


class Script:
    """The scripted answers of a run's agents.

    An agent that is offered ``look`` calls it before each text. Agents are known by "You are NAME."
    in their first message.

    Args:
        steps: by agent, the first answers. They replace the answers described above.
        others: returns the answers of agents without a name.
    """

    def __init__(
        self,
        steps: Mapping[str, Sequence[Answer]] | None = None,
        others: Callable[[Body], Answer] = lambda _: None,
    ) -> None:
        self._steps = {name: iter(answers) for name, answers in (steps or {}).items()}
        self._others = others

    def answer(self, body: Body) -> Answer:
        name = agent_of(body)
        if name is None:
            return self._others(body)
        try:
            return next(self._steps.get(name, iter(())))
        except StopIteration:
            tools = [each.get("function", each).get("name") for each in body.get("tools") or ()]
            is_after_tools = messages_of(body)[-1].get("role") == "tool"
            return LOOK if "look" in tools and not is_after_tools else None


def ask_experts(*names: str, argument: str = "task") -> Script:
    """Return the answers of a run whose boss calls two agents as tools."""
    tasks = ("Find a lake.", "Find a hill.")
    calls = [call(name, **{argument: task}) for name, task in zip(names, tasks, strict=True)]
    return Script({"boss": calls})


def messages_of(body: Body) -> list[dict[str, Any]]:
    return list(body["messages"])


def agent_of(body: Body) -> str | None:
    """Return the name in an agent's first message."""
    found = _NAME.search(json.dumps(messages_of(body)[0].get("content")))
    return found.group(1) if found else None


def constrain(body: Body, script: Script) -> dict[str, Any]:
    """Return a request's body whose answer is the script's."""
    answer = script.answer(body)
    dropped = {"max_completion_tokens"}
    if answer is not None:
        dropped |= {"response_format", "tool_choice"}
    kept = {name: value for name, value in body.items() if name not in dropped}
    given: dict[str, Any] = {"temperature": 0, "max_tokens": TEXT_TOKENS, "ignore_eos": True}
    if answer is not None:
        grammar = f"root ::= {json.dumps(answer)}"
        given |= {"max_tokens": 1000, "ignore_eos": False, "ebnf": grammar}
    if body.get("stream"):
        given["stream_options"] = {"include_usage": True}
    return {**kept, **given}


@contextmanager
def scripted(script: Script) -> Generator[None]:
    """Constrain the answers to all chat completions of this process."""
    with patch.multiple(__name__, _script=script):
        yield


_script: Script | None = None


def install() -> None:
    """Let requests of httpx and httpx2 pass through the script."""
    for name in ("httpx", "httpx2"):
        with suppress(ImportError):
            _install_in(importlib.import_module(name))


def _install_in(library: Any) -> None:
    def constrained(request: Any) -> Any:
        if _script is None or not request.url.path.endswith("/chat/completions"):
            return request
        body = constrain(json.loads(request.content), _script)
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("content-length", "transfer-encoding")
        }
        return library.Request(
            request.method, request.url, headers=headers, json=body, extensions=request.extensions
        )

    whole = library.AsyncHTTPTransport.handle_async_request
    blocking = library.HTTPTransport.handle_request

    async def handle_async_request(self: Any, request: Any) -> Any:
        return await whole(self, constrained(request))

    def handle_request(self: Any, request: Any) -> Any:
        return blocking(self, constrained(request))

    library.AsyncHTTPTransport.handle_async_request = handle_async_request
    library.HTTPTransport.handle_request = handle_request
