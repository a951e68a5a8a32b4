"""A text that is appended in pieces has the canonical tokens: those of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flashmoa_sglang.cpu import torchvision_ops
from hypothesis import given, settings
from hypothesis import strategies as st

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http.token_buffer import CanonicalTokenizer, TokenBuffer  # noqa: E402
from tokenizers import (  # noqa: E402
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from tests.conftest import GUIDE  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The splitting pattern of the Qwen and Llama 3 families.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_with_pattern() -> Any:
    """Make a BPE like Llama 3's: with a splitting pattern, NFC and a beginning-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(GUIDE)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def sentencepiece_like() -> Any:
    """Make a BPE like Llama 2's and Gemma's: it splits nowhere, and white space is a letter."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<unk>", "<s>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        max_token_length=12,
    )
    # Trained on single words, its vocabulary has no entries across words, like sentencepiece's.
    tokenizer.train_from_iterator(GUIDE.read_text().split(), trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def greedy_added_token() -> Any:
    """Make a tokenizer with an added token that swallows the white space around it."""
    tokenizer = byte_level_with_pattern()
    tokenizer.add_tokens([AddedToken("mask", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(model: Path) -> dict[str, CanonicalTokenizer]:
    factories: dict[str, Callable[[], Any]] = {
        "trained": lambda: AutoTokenizer.from_pretrained(model),
        "pattern": byte_level_with_pattern,
        "sentencepiece": sentencepiece_like,
        "greedy": greedy_added_token,
    }
    return {name: CanonicalTokenizer(make()) for name, make in factories.items()}


NAMES = ["trained", "pattern", "sentencepiece", "greedy"]

fragments = st.one_of(
    st.sampled_from(
        [
            " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "'s", "'ll", "12", "3456", ".", ", ",
            "! ", "<|im_start|>", "<|im_", "end|>", "<|", "|>", "mask", "<s>", "é", "e\u0301", "中",
            "文，好",
            "🙂", "👩‍👩‍👧", "\u200b", "the", " the", "Kathmandu", " a b c", "ﬁ", "½", "▁", "Ġ",
        ]
    ),
    st.text(max_size=6),
)  # fmt: skip
texts = st.lists(fragments, max_size=14).map("".join)


def cut_up(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    edges = [0, *places, len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(text=texts, add_special_tokens=st.booleans(), data=st.data())
def test_pieces_have_the_tokens_of_the_whole(
    tokenizers: dict[str, CanonicalTokenizer],
    name: str,
    text: str,
    add_special_tokens: bool,
    data: st.DataObject,
) -> None:
    tokenizer = tokenizers[name]
    buffer = TokenBuffer(tokenizer, add_special_tokens)
    whole = tokenizer.encode(text, add_special_tokens)
    for piece in cut_up(text, data):
        buffer.append(piece)
        certain = list(buffer.tokens)
        # Tokens that have been emitted do not change: they are a prefix of all tokens.
        assert certain == whole[: len(certain)]
    assert buffer.all_tokens() == whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(streamed=texts, real=texts, shared=texts)
def test_a_wrong_prediction_still_gives_the_real_tokens(
    tokenizers: dict[str, CanonicalTokenizer], name: str, streamed: str, real: str, shared: str
) -> None:
    tokenizer = tokenizers[name]
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    buffer.append(shared)
    buffer.append(streamed)
    assert buffer.encode(shared + real, add_special_tokens=False) == tokenizer.encode(shared + real)
    assert buffer.encode(shared + real, add_special_tokens=True) == tokenizer.encode(
        shared + real, True
    )


@pytest.mark.parametrize("name", NAMES)
@given(first=texts, second=texts, third=texts)
@settings(max_examples=100, deadline=None)
def test_a_refused_piece_leaves_no_trace(
    tokenizers: dict[str, CanonicalTokenizer], name: str, first: str, second: str, third: str
) -> None:
    buffer = TokenBuffer(tokenizers[name], add_special_tokens=True)
    buffer.append(first)
    before = buffer.checkpoint()
    buffer.append(second)
    buffer.restore(before)
    buffer.append(third)
    assert buffer.all_tokens() == tokenizers[name].encode(first + third, True)


def test_ordinary_text_is_certain_almost_to_its_end(
    tokenizers: dict[str, CanonicalTokenizer], guide: str
) -> None:
    for name in ("trained", "pattern", "sentencepiece"):
        buffer = TokenBuffer(tokenizers[name], add_special_tokens=False)
        buffer.append(guide)
        assert len(buffer.all_tokens()) - len(buffer.tokens) < 12, name


def test_cuts_a_tokenizer_would_tokenise_across_are_not_used(
    tokenizers: dict[str, CanonicalTokenizer],
) -> None:
    assert "word" in tokenizers["pattern"].boundaries
    # "mask" swallows the space after it, so a space after a letter is not always a boundary.
    assert "word" not in tokenizers["greedy"].boundaries


def test_a_vocabulary_that_spans_words_is_never_cut_between_words() -> None:
    tokenizer = byte_level_with_pattern()
    tokenizer.add_tokens(["in the valley"])
    assert "word" not in CanonicalTokenizer(tokenizer).boundaries


def test_text_without_boundaries_is_searched_once(
    tokenizers: dict[str, CanonicalTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, searched = tokenizers["trained"], 0
    search = tokenizer.last_boundary

    def count_and_search(text: str, start: int) -> int:
        nonlocal searched
        searched += len(text) - max(start, 0)
        return search(text, start)

    monkeypatch.setattr(tokenizer, "last_boundary", count_and_search)
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    for _ in range(500):
        buffer.append("文字列に境界はない")
    assert searched < 2 * len(buffer.text)


def test_text_is_tokenised_once(tokenizers: dict[str, CanonicalTokenizer], guide: str) -> None:
    """Appends and the final request tokenise the new text, and not the whole."""
    tokenizer = tokenizers["trained"]
    encoded_lengths: list[int] = []
    encode = tokenizer._encode

    def count_and_encode(text: str, **kwargs: Any) -> list[int]:
        encoded_lengths.append(len(text))
        return encode(text, **kwargs)

    tokenizer._encode = count_and_encode
    try:
        buffer = TokenBuffer(tokenizer, add_special_tokens=False)
        for start in range(0, len(guide), 7):
            buffer.append(guide[start : start + 7])
        assert sum(encoded_lengths) < 3 * len(guide)
        encoded_lengths.clear()
        buffer.encode(guide + " The end.", add_special_tokens=False)
        assert sum(encoded_lengths) < 60
    finally:
        tokenizer._encode = encode
