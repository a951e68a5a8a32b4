"""Test that a tokenizer with missing methods is reported, and does not stop a server."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.cpu import torchvision_ops
from hypothesis import given, settings

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http.engine import Engine  # noqa: E402
from flashmoa_sglang.http.rendering import Piece, RenderedPrompt  # noqa: E402
from flashmoa_sglang.http.token_buffer import CanonicalTokenizer, TokenBuffer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.unit.plugin.test_token_buffer import byte_level_with_pattern, sentencepiece_like, texts  # noqa: E402


class Wrapped:
    """A tokenizer that has only ``encode`` and the methods that a test adds."""

    def __init__(self, tokenizer: Any, **shown: Any) -> None:
        self._tokenizer = tokenizer
        self.__dict__.update(shown)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def real(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def fails() -> dict[str, int]:
    raise NotImplementedError("this tokenizer has no vocabulary to show")


@pytest.mark.parametrize("shown", [{}, {"get_vocab": fails}, {"get_vocab": lambda: {7: 7}}])
def test_without_a_vocabulary_text_is_held_back_to_its_end(
    real: Any, shown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = CanonicalTokenizer(Wrapped(real, **shown))
    assert len(caplog.records) == 1
    assert "certain when they end" in caplog.text
    assert tokenizer.boundaries.kinds == []
    assert (tokenizer.digest is None) == (shown.get("get_vocab") in (None, fails))
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    for piece in ("One two ", "three. Four\n", "five"):
        buffer.append(piece)
        assert len(buffer.tokens) == 0
    assert buffer.all_tokens() == real.encode("One two three. Four\nfive", add_special_tokens=False)


def test_a_vocabulary_of_bytes_is_read(real: Any) -> None:
    spelled = {token.replace("Ġ", " ").encode(): index for token, index in real.get_vocab().items()}
    tokenizer = CanonicalTokenizer(Wrapped(real, get_vocab=lambda: {**spelled, b"\xff": 9999}))
    assert "word" in tokenizer.boundaries.kinds
    assert tokenizer.digest


def no_keyword(text: str) -> list[int]:
    return [len(text)]


def test_with_an_incompatible_encode_method_streams_still_take_token_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = SimpleNamespace(
        _result_dispatcher=SimpleNamespace(_mapping={}),
        tokenizer=SimpleNamespace(encode=no_keyword),
    )
    with caplog.at_level(logging.WARNING):
        engine = Engine(manager)
    assert engine.tokenizer is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "token ids only" in caplog.text


def with_bos() -> Any:
    tokenizer = sentencepiece_like()
    tokenizer.bos_token = "<s>"
    return tokenizer


def joined_as_sglang_does(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """Join as ``OpenAIServingChat._append_assistant_prefix_to_prompt_ids`` does."""
    encoded = tokenizer.encode(answer)
    if encoded and encoded[0] == tokenizer.bos_token_id:
        encoded = encoded[1:]
    return tokenizer.encode(prompt, add_special_tokens=False) + encoded


@pytest.fixture(scope="module", params=[byte_level_with_pattern, with_bos])
def special(request: pytest.FixtureRequest) -> tuple[Any, CanonicalTokenizer]:
    """Return a tokenizer that adds special tokens to plain text."""
    tokenizer = request.param()
    return tokenizer, CanonicalTokenizer(tokenizer)


@settings(max_examples=150, deadline=None)
@given(prompt=texts, answer=texts, more=texts)
def test_an_answer_to_continue_is_tokenised_separately_from_the_prompt(
    special: tuple[Any, CanonicalTokenizer], prompt: str, answer: str, more: str
) -> None:
    tokenizer, canonical = special
    # SGLang and the plugin join two encodings that are only a beginning-of-text token.
    if tokenizer.bos_token and answer.startswith(tokenizer.bos_token):
        return
    rendered = RenderedPrompt([Piece(prompt, False), Piece(answer, True)])
    buffer, first = rendered.new_buffer(canonical)
    for piece in (first, more):
        buffer.append(piece)
    whole = joined_as_sglang_does(tokenizer, prompt, answer + more)
    assert list(buffer.tokens) == whole[: len(buffer.tokens)]
    assert buffer.all_tokens() == whole
    assert buffer.whole_text == prompt + answer + more
    assert buffer.encode_piece(prompt, False, first=True) == canonical.encode(prompt)
    assert buffer.encode_piece(answer, True, first=False) == canonical.encode(answer, True)
