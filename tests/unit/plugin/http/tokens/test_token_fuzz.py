"""Streams have canonical tokens with tokenizers that are put together at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from flashmoa_sglang.http.tokens import token_boundaries
from flashmoa_sglang.http.tokens.expressions import NotUnderstood
from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer, TokenBuffer
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.unit.plugin.http.tokens import random_tokenizers

LIBRARY_ERRORS = ("Exception", "PanicException")


@contextmanager
def skipped_if_the_library_fails() -> Iterator[None]:
    """Skip an example if the library refuses it or panics, or if no text has tokens."""
    try:
        yield
    except BaseException as error:
        if "has no tokens" not in str(error) and type(error).__name__ not in LIBRARY_ERRORS:
            raise
        reject()


def check_boundaries(tokenizer: CanonicalTokenizer, text: str, whole: list[int]) -> int:
    """Check each boundary of a text by itself; return how many there are."""
    boundaries, found = tokenizer.boundaries, 0
    for place in range(1, len(text)):
        if boundaries.holds_at(text, place):
            before = tokenizer.encode(text[:place])
            anchor = boundaries.anchor(text, place)
            rest = tokenizer.encode(anchor + text[place:])[len(tokenizer.encode(anchor)) :]
            assert before + rest == whole, (text[:place], text[place:])
            found += 1
    return found


def check_stream(
    tokenizer: CanonicalTokenizer, pieces: list[str], add_special_tokens: bool, whole: list[int]
) -> None:
    buffer = TokenBuffer(tokenizer, add_special_tokens)
    for piece in pieces:
        before = list(buffer.tokens)
        kept = buffer.append(piece)
        certain = list(buffer.tokens[: buffer.certain_tokens])
        assert certain == whole[: len(certain)]
        assert list(buffer.tokens[:kept]) == before[:kept]
    assert buffer.all_tokens() == whole
    assert buffer.encode(buffer.text, add_special_tokens) == whole


def check(data: st.DataObject) -> None:
    drawn, contents = data.draw(random_tokenizers.tokenizers())
    note(drawn.backend_tokenizer.to_str())
    with skipped_if_the_library_fails():
        tokenizer = CanonicalTokenizer(drawn)
    if not tokenizer.boundaries:
        with pytest.raises(NotUnderstood):
            token_boundaries.read(drawn)
    for _ in range(4):
        text = data.draw(random_tokenizers.texts(contents))
        add_special_tokens = data.draw(st.booleans())
        with skipped_if_the_library_fails():
            plain = drawn.encode(text, add_special_tokens=False)
            whole = drawn.encode(text, add_special_tokens=add_special_tokens)
        check_boundaries(tokenizer, text, plain)
        places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
        pieces = [text[start:end] for start, end in pairwise([0, *places, len(text)])]
        check_stream(tokenizer, pieces, add_special_tokens, whole)


UNLIMITED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=200, suppress_health_check=UNLIMITED)
@given(data=st.data())
def test_any_tokenizer_gives_canonical_tokens(data: st.DataObject) -> None:
    check(data)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, suppress_health_check=UNLIMITED)
@given(data=st.data())
def test_very_many_tokenizers_give_canonical_tokens(data: st.DataObject) -> None:
    check(data)


def test_all_parts_of_the_library_are_tried() -> None:
    """A part or an option that a later release of the library adds must be tried, too."""
    for module, strategies, others in random_tokenizers.COVERED:
        assert random_tokenizers.classes_of(module) <= {*strategies} | others
    signature = AddedToken.__text_signature__
    assert signature is not None
    names = [each.split("=")[0].strip(" ()") for each in signature.split(",")]
    assert names[:2] == ["self", "content"]
    assert set(names[2:]) == {*random_tokenizers.TOKEN_FLAGS, "single_word"}
