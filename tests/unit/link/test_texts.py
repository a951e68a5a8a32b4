"""Texts, as their writers use them."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from flashmoa import Text
from flashmoa.link.streamed_text import find_texts


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


async def test_a_reader_is_told_if_its_parts_were_replaced() -> None:
    text = Text("draft")
    fresh, behind, waiting = aiter(text), aiter(text), aiter(text)
    first = asyncio.ensure_future(anext(fresh))
    await asyncio.sleep(0)
    text.write("a pl")
    assert [await anext(behind), await anext(waiting)] == ["a pl"] * 2
    next_piece = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    text.finish("b")
    # This one has not read anything yet.
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
@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda text: "\n".join([text]), TypeError),
        (lambda text: "".join(text), TypeError),
        (lambda text: str.__add__("Read ", text), TypeError),
        (lambda text: "Read it".replace("it", text), TypeError),
        (lambda text: json.dumps({"draft": text}), TypeError),
        (lambda text: re.sub("a", "b", text), TypeError),
        (lambda text: io.StringIO().write(text), TypeError),
        (lambda text: _Message(content=text), ValidationError),
        (lambda text: TypeAdapter(list[str]).validate_python([text]), ValidationError),
    ],
)
async def test_readers_of_strings_refuse_a_text(
    use: Callable[[Any], object], error: type[Exception], is_complete: bool
) -> None:
    text = Text("draft")
    if is_complete:
        text.finish("a plan")
    with pytest.raises(error):
        use(text)


@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_text_is_not_used_like_a_string(is_complete: bool) -> None:
    text: Any = Text("draft")
    if is_complete:
        text.finish("a plan")
    uses: list[Callable[[], object]] = [
        lambda: len(text),
        lambda: text[:4],
        lambda: "a" in text,
        lambda: list(text),
        lambda: text.upper(),
    ]
    for use in uses:
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
async def test_brackets_and_numbers_of_a_prompt_are_no_marks(prompt: str) -> None:
    texts = [Text(f"answer-{number}") for number in range(2000)]
    assert find_texts([prompt], {text._mark: text for text in texts}) == []
