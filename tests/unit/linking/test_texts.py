"""Texts, as their writers use them."""

from __future__ import annotations

import pytest

from flashmoa import Text

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_leaving_a_text_closes_it() -> None:
    with Text("draft") as text:
        text.write("a plan")
        assert not text.is_over and f"{text}" == text.mark
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
