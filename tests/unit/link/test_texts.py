"""Texts, as their writers use them; their marks in prompts; policies for their failures."""

import asyncio
import copy
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import httpx
import openai
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from flashmoa import FailurePolicy, Text, UpstreamCancelled
from flashmoa.errors import EngineTimeout, EngineUnreachable
from flashmoa.link.failure_policy import classify_failure
from flashmoa.link.streamed_text import find_texts, replace_marks


async def test_leaving_a_text_closes_it() -> None:
    with Text("draft") as text:
        text.write("a plan")
        assert not text.is_over and f"{text}" == text._mark
    assert text.is_over and text.is_complete
    assert f"{text}" == await text == "a plan"


async def test_leaving_a_text_by_an_exception_fails_it() -> None:
    text = Text("draft")
    with pytest.raises(ZeroDivisionError), text:
        raise ZeroDivisionError
    assert text.is_over and not text.is_complete
    # The error does not collect the frames of all its readers.
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as raised:
            await text
        assert len(raised.traceback) == 3


async def test_readers_get_every_part_of_a_text() -> None:
    text = Text("draft")
    text.write("a ")
    text.write("good ")
    pieces = aiter(text)
    read = [await anext(pieces)]
    text.finish("a good plan")
    assert text._parts == ["a good plan"]
    assert read + [piece async for piece in pieces] == ["a ", "good ", "plan"]
    assert [piece async for piece in text] == ["a good plan"]


async def test_an_empty_text_has_no_parts() -> None:
    closed, failed = Text("draft"), Text("draft")
    closed.close()
    failed.fail(ZeroDivisionError())
    assert [piece async for piece in closed] == []
    with pytest.raises(ZeroDivisionError):
        await anext(aiter(failed))


async def test_a_reader_is_told_of_replaced_parts() -> None:
    text = Text("draft")
    fresh, behind, waiting = aiter(text), aiter(text), aiter(text)
    first = asyncio.ensure_future(anext(fresh))
    await asyncio.sleep(0)
    text.write("a pl")
    assert [await anext(behind), await anext(waiting)] == ["a pl"] * 2
    next_piece = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    text.finish("b")
    # The first reader has not read anything yet.
    assert await first in ("a pl", "b")
    for piece in (anext(behind), next_piece):
        with pytest.raises(RuntimeError, match="'draft' was finished with another string"):
            await piece
    assert [piece async for piece in text] == ["b"]
    text.finish("c")
    assert await text == "b"


async def test_a_complete_text_stands_for_its_string() -> None:
    text, other = Text("draft"), Text("other")
    assert text != "yes" and text != other and text == text
    assert f"{text}" == repr(text) == text._mark and text != text._mark
    for use in (lambda: pickle.dumps(text), lambda: f"{text:>5}"):
        with pytest.raises(TypeError, match=r"'draft' is not complete.* await it first"):
            use()
    text.finish("yes")
    other.finish("no")
    assert not text != "yes" and not "yes" != text  # noqa: SIM202, SIM300
    assert text == "yes" and "yes" == text and text != "no" and text in ["yes"]  # noqa: SIM300
    assert text + other == "yesno" and "un" + text + "!" == "unyes!" and f"{text:>5}" == "  yes"
    assert type(pickle.loads(pickle.dumps([text]))[0]) is str
    assert pickle.loads(pickle.dumps([text])) == ["yes"]
    assert {text: 1}[text] == 1


class _Message(BaseModel):
    content: str | list[str]


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_text_is_not_used_like_a_string(is_complete: bool) -> None:
    text: Any = Text("draft")
    if is_complete:
        text.finish("a plan")
    by_readers: list[Callable[[], object]] = [
        lambda: "\n".join([text]),
        lambda: "".join(text),
        lambda: str.__add__("Read ", text),
        lambda: "Read it".replace("it", text),
        lambda: json.dumps({"draft": text}),
        lambda: re.sub("a", "b", text),
        lambda: io.StringIO().write(text),
        lambda: _Message(content=text),
        lambda: TypeAdapter(list[str]).validate_python([text]),
    ]
    for use in by_readers:
        with pytest.raises((TypeError, ValidationError)):
            use()
    by_itself: list[Callable[[], object]] = [
        lambda: len(text),
        lambda: text[:4],
        lambda: "a" in text,
        lambda: list(text),
        lambda: text.upper(),
    ]
    for use in by_itself:
        with pytest.raises((TypeError, AttributeError), match=r"'draft' has no .*; await it"):
            use()
    assert not isinstance(text, Iterable) and not hasattr(text, "strip")
    with pytest.raises(AttributeError, match="'Text' object has no attribute 'usage'"):
        text.usage  # noqa: B018
    assert copy.deepcopy([text])[0] is text and bool(text)


@pytest.mark.parametrize(
    "prompt",
    [
        "Evaluate \u27e6ans",
        "Fill in \u27e6answer-1:",
        "add\u27e7 is the rest",
        "bad\u27e7 and \u27e6x:e\u27e7, " * 3,
        "id 1700000000123456789, 00000000000000000000000000000000",
    ],
)
def test_brackets_and_numbers_are_no_marks(prompt: str) -> None:
    texts = [Text(f"answer-{number}") for number in range(2000)]
    assert find_texts([prompt], {text._mark: text for text in texts}) == []


def test_marks_of_texts_are_found_and_replaced() -> None:
    texts = {text._mark: text for text in (Text("one"), Text("tw:o"), Text("th\u27e6re\u27e7e"))}
    one, two, three = texts
    assert [t._mark for t in find_texts([f"{two} {one}", f"x{two}"], texts)] == [two, one]
    assert find_texts(["\u27e6one:0123456789abcdef\u27e7"], texts) == []
    assert replace_marks(f"<{one}{three}>", {one: two, three: ""}) == f"<{two}>"


def caused(error: Exception, cause: Exception) -> Exception:
    """Return the error with a cause."""
    error.__cause__ = cause
    return error


LATE = httpx.ReadTimeout("late")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError(), "error"),
        (EngineUnreachable("gone"), "error"),
        # A circle of causes.
        (caused(circle := ValueError(), caused(KeyError(), circle)), "error"),
        (EngineTimeout("late"), "timeout"),
        (TimeoutError(), "timeout"),
        (LATE, "timeout"),
        (type("ReadTimeout", (type("TimeoutException", (Exception,), {}),), {})(), "timeout"),
        (caused(openai.APITimeoutError(httpx.Request("POST", "http://x")), LATE), "timeout"),
        (UpstreamCancelled("stopped"), "cancel"),
        (asyncio.CancelledError(), "cancel"),
        (GeneratorExit(), "cancel"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_exception_is_classified_as_a_failure(error: BaseException, failure: str) -> None:
    assert classify_failure(error) == failure


def test_one_action_is_for_all_but_stalls() -> None:
    policy = FailurePolicy.of("finalize")
    assert [policy.action(one) for one in ("error", "cancel", "timeout")] == ["finalize"] * 3
    assert policy.action("stall") == "abort"
    assert FailurePolicy.of(policy) is policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"error": "ignore"}, "error must be 'abort' or 'finalize'")]
    + [({"stall_seconds": each}, "stall_seconds must be a positive") for each in (0, -1, "soon")],
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
