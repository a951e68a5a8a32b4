"""Predict what an agent asks when its tools have run, from its answer and from an earlier run.

Its next messages are those that it sent, its answer, and the results in the order of the calls.
Pure functions of JSON values; no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flashmoa.linking.learned_prompts import Divergence, Messages

# An answer that calls tools, as a message of OpenAI's API.
Message = Mapping[str, Any]

# Whatever else an answer has, say its reasoning, only some programs send back.
_ALWAYS_SENT_BACK = {"role", "content", "tool_calls"}


def call_ids(answer: Message) -> list[str]:
    """Return the ids of an answer's calls, in their order."""
    return [call["id"] for call in answer["tool_calls"]]


def called_tools(answer: Message) -> list[str]:
    """Return the names of the tools that an answer calls, in the order of the calls."""
    return [_called(call)["name"] for call in answer["tool_calls"]]


def _called(call: Message) -> Message:
    """Return the function of a call, or the custom tool, with its arguments."""
    return call.get("custom") or call["function"]


def follows(messages: Messages, asked: Messages, answer: Message) -> bool:
    """Return whether messages continue those that were ``asked``, after the tools of the answer.

    Frameworks write the answer down in their own ways, but keep the ids of its calls.
    """
    count = len(asked)
    if len(messages) <= count or list(messages[:count]) != list(asked):
        return False
    ids = [call.get("id") for call in messages[count].get("tool_calls") or ()]
    return ids == call_ids(answer)


def extra_fields(answer: Message) -> set[str]:
    """Return the fields of an answer that only some programs send back."""
    return answer.keys() - _ALWAYS_SENT_BACK


def sent_back(answer: Message, extra: Collection[str]) -> Message:
    """Return an answer as its program sends it back, with these extra fields."""
    return {key: answer[key] for key in answer if key in _ALWAYS_SENT_BACK or key in extra}


def likely_results(
    answer: Message,
    earlier: Message,
    earlier_results: Messages,
    predicted: Messages,
    differed: Divergence | None,
) -> list[Message]:
    """Return the first of the messages after an answer that are likely to be as predicted.

    A result is likely to be the same if its tool is called with the same arguments, and to hold the
    texts of this run if it held those of the earlier one.

    Args:
        answer, earlier: the answers of this run, and of the earlier one.
        earlier_results: the messages that followed the earlier answer.
        predicted: these, as predicted for this run.
        differed: where they were not as predicted before; what comes after that is not likely.
    """
    calls, earlier_calls = answer["tool_calls"], earlier["tool_calls"]
    if called_tools(answer) != called_tools(earlier):
        return []
    likely: list[Message] = []
    for index, (before, message) in enumerate(zip(earlier_results, predicted, strict=True)):
        if differed is not None and index >= differed.message:
            break
        if index < len(calls):
            is_same_call = _called(calls[index]) == _called(earlier_calls[index])
            if not is_same_call and before.get("content") == message.get("content"):
                break
        likely.append(message)
    return likely


def after_tools(
    asked: Messages, answer: Message, likely: Sequence[Message], missing: Sequence[str]
) -> Messages:
    """Return the messages of the request after the tools of an answer.

    Args:
        asked: the messages that were answered.
        answer: as it is sent back.
        likely: the first messages that are likely to follow it.
        missing: for each call, what stands for its result if that is not likely to be known.
    """
    results = [
        {"role": "tool", "tool_call_id": id_, "content": text}
        for id_, text in zip(call_ids(answer), missing, strict=True)
    ]
    return [*asked, answer, *likely, *results[len(likely) :]]
