"""Calls whose prompts are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoa.engine import PromptUsage
from flashmoa.observe import CallFinished, CallStarted, PromptSent
from flashmoa.observe.calls import Call
from flashmoa.observe.earlier_prompts import RenderedPrompt
from flashmoa.observe.prefix_breaks import PrefixBreak, find_breaks

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "You are a writer."}
TASK = {"role": "user", "content": "Write a plan."}
ANSWER = {"role": "assistant", "content": "First, walk."}
MORE = {"role": "user", "content": "Go on, please."}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A tool.", **fields}}


def call(
    messages: Messages,
    tools: Sequence[dict[str, Any]] = (),
    *,
    agent: str = "writer",
    at: float = 0.0,
    answer: str = "",
    usage: PromptUsage | None = None,
    **sent: Any,
) -> Call:
    """Make a call; ``at`` is also its id."""
    who = {"agent": agent, "engine": "http://e", "call_id": str(at)}
    prompt = PromptSent(**who, at=at, messages=messages, tools=list(tools), **sent)
    finished = CallFinished(**who, at=at + 0.9, text=answer, usage=usage)
    return Call(CallStarted(**who, at=at, model="m"), at + 0.5, finished, prompt)


def used(prompt: int, cached: int | None, streamed: int | None = None) -> PromptUsage:
    return PromptUsage(
        prompt_tokens=prompt,
        completion_tokens=5,
        cached_tokens=cached,
        streamed_tokens=streamed,
    )


def only_break(earlier: Call, later: Call) -> PrefixBreak:
    (found,) = find_breaks([earlier, later])
    return found


def compare(
    old: Messages, new: Messages, old_tools: Tools | None = None, new_tools: Tools | None = None
) -> PrefixBreak:
    return only_break(call(old, old_tools or []), call(new, new_tools or [], at=1.0))


def render(messages: Messages, tools: Sequence[dict[str, Any]] = ()) -> RenderedPrompt:
    """Render messages as many chat templates do."""
    shown = "".join(f"<tool>{one}</tool>" for one in tools)
    turns = (f"<|{one['role']}|>\n{one['content']}" for one in messages)
    return RenderedPrompt(shown + "<|end|>\n".join(turns), "<|end|>\n<|assistant|>\n")


def system(text: str) -> Messages:
    return [{"role": "system", "content": text}, TASK]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SEARCH, READ = tool("search"), tool("read")
