"""Failure policies, and texts read by them."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import httpx
import openai
import pytest

from flashmoa import FailurePolicy, Text, UpstreamCancelled
from flashmoa.errors import EngineTimeout, EngineUnreachable
from flashmoa.link.failure_policy import classify_failure
from flashmoa.link.streamed_text import find_texts, replace_marks


def caused(error: Exception, cause: Exception) -> Exception:
    """Return the error with a cause."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError(), "error"),
        (EngineUnreachable("gone"), "error"),
        (EngineTimeout("late"), "timeout"),
        (TimeoutError(), "timeout"),
        (httpx.ReadTimeout("late"), "timeout"),
        (type("ReadTimeout", (type("TimeoutException", (Exception,), {}),), {})(), "timeout"),
        (
            caused(
                openai.APITimeoutError(request=httpx.Request("POST", "http://x")),
                httpx.ReadTimeout("late"),
            ),
            "timeout",
        ),
        (UpstreamCancelled("stopped"), "cancel"),
        (asyncio.CancelledError(), "cancel"),
        (GeneratorExit(), "cancel"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_exception_is_classified_as_a_failure(error: BaseException, failure: str) -> None:
    assert classify_failure(error) == failure


def test_a_cycle_of_causes_is_classified() -> None:
    error = ValueError()
    assert classify_failure(caused(error, caused(KeyError(), error))) == "error"


def test_one_action_is_for_all_failures_but_stalls() -> None:
    policy = FailurePolicy.of("finalize")
    assert [policy.action(one) for one in ("error", "cancel", "timeout")] == ["finalize"] * 3
    assert policy.action("stall") == "abort"
    assert FailurePolicy.of(policy) is policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"error": "ignore"}, "error must be 'abort' or 'finalize'"),
        ({"stall_seconds": 0}, "stall_seconds must be a positive number"),
        ({"stall_seconds": -1}, "stall_seconds must be a positive number"),
        ({"stall_seconds": "soon"}, "stall_seconds must be a positive number"),
    ],
)
def test_invalid_policies_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FailurePolicy(**arguments)


async def test_a_reader_follows_its_policy() -> None:
    text = Text("draft")
    text.write("so far")
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.05):
            await text._read(FailurePolicy(stall_seconds=0.01))
    stalled = FailurePolicy(stall="finalize", stall_seconds=0.01)
    assert await text._read(stalled) == "so far"
    text.fail(ValueError("broken"))
    text.write(" and no further")
    text.close()
    assert await text._read(FailurePolicy(error="finalize")) == "so far"
    for policy in (FailurePolicy(), FailurePolicy(timeout="finalize")):
        with pytest.raises(ValueError, match="broken"):
            await text._read(policy)
    assert not text.is_complete and f"{text}" == text._mark


def test_marks_of_texts_are_found_and_replaced() -> None:
    texts = {text._mark: text for text in (Text("one"), Text("tw:o"), Text("th\u27e6re\u27e7e"))}
    one, two, three = texts
    assert [t._mark for t in find_texts([f"{two} {one}", f"x{two}"], texts)] == [two, one]
    assert find_texts(["\u27e6one:0123456789abcdef\u27e7"], texts) == []
    assert replace_marks(f"<{one}{three}>", {one: two, three: ""}) == f"<{two}>"
