"""Streams have canonical tokens with tokenizers that are put together at random."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from flashmoa_sglang.http.tokens import token_boundaries
from flashmoa_sglang.http.tokens.expressions import NotUnderstood
from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.unit.plugin.http.tokens import families, random_tokenizers

LIBRARY_ERRORS = ("Exception", "PanicException")
UNLIMITED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@contextmanager
def skipped_if_the_library_fails() -> Iterator[None]:
    """Skip an example if the library refuses it or panics, or if no text has tokens."""
    try:
        yield
    except BaseException as error:
        if "has no tokens" not in str(error) and type(error).__name__ not in LIBRARY_ERRORS:
            raise
        reject()


def check_boundaries(tokenizer: CanonicalTokenizer, text: str, whole: list[int]) -> None:
    """Check each boundary of a text by itself."""
    boundaries = tokenizer.boundaries
    for place in range(1, len(text)):
        if boundaries.holds_at(text, place):
            anchor = boundaries.anchor(text, place)
            rest = tokenizer.encode(anchor + text[place:])[len(tokenizer.encode(anchor)) :]
            assert tokenizer.encode(text[:place]) + rest == whole, (text[:place], text[place:])


@families.examples(200, 20_000, pytest.mark.timeout(1800))
def test_any_tokenizer_gives_canonical_tokens(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=UNLIMITED)
    @given(data=st.data())
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
            special = data.draw(st.booleans())
            with skipped_if_the_library_fails():
                plain = drawn.encode(text, add_special_tokens=False)
                whole = drawn.encode(text, add_special_tokens=special)
            check_boundaries(tokenizer, text, plain)
            families.check_pieces(tokenizer, families.cut_up(text, data), special, whole)

    check()


def test_all_parts_of_the_library_are_tried() -> None:
    """A part or an option that a later release of the library adds must be tried, too."""
    for module, strategies, others in random_tokenizers.COVERED:
        assert random_tokenizers.classes_of(module) <= {*strategies} | others
    signature = AddedToken.__text_signature__
    assert signature is not None
    names = [each.split("=")[0].strip(" ()") for each in signature.split(",")]
    assert names[:2] == ["self", "content"]
    assert set(names[2:]) == {*random_tokenizers.TOKEN_FLAGS, "single_word"}
