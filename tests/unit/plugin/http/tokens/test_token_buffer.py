"""A text that is appended in pieces has the canonical tokens: the tokens of the whole text."""

import logging
import random
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.rendering import Piece, RenderedPrompt
from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer, TokenBuffer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.plugin.http.tokens import families
from tests.unit.plugin.http.tokens.families import SCRIPTS, STREAMED, append, canonical, examples

each_family = pytest.mark.parametrize("name", [*families.FAMILIES][:12])
each_streamed = pytest.mark.parametrize("name", STREAMED)
fragments = st.one_of(
    st.sampled_from(
        [
            " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "'s", "'ll", "12", "3456", ".", ", ",
            "! ", "<|im_start|>", "<|im_", "end|>", "<|", "|>", "mask", "<s>", "é", "e\u0301", "中",
            "文，好", "。「", "녙。", "Ｕ．Ｓ", "（笑）", "ID19", "U.S.",
            "русский", "عربي، ", "हिन्दी।", "ไทย", "한국어", "</p>", "²½",
            "🙂", "👩‍👩‍👧", "\u200b", "the", " the", "Kathmandu", " a b c", "ﬁ", "½", "▁", "Ġ",
        ]
    ),
    st.text(max_size=6),
    # Text that has no boundary for long.
    st.sampled_from(["ก", "文", "7", "a", "ab", "-", " ", "\n", "🙂", "ก็", "aB"]).map(
        lambda part: part * 40
    ),
    st.text("ACGT", min_size=60, max_size=90),
)  # fmt: skip
texts = st.lists(fragments, max_size=14).map("".join)
STEPS = ["append", "replace", "repeat", "refuse"]


def streamed(name: str, text: str = "", step: int = 6) -> TokenBuffer:
    """Append a text to a new buffer in pieces of ``step`` characters. Return the buffer."""
    buffer = TokenBuffer(canonical(name), add_special_tokens=False)
    for start in range(0, len(text), step):
        buffer.append(text[start : start + step])
    return buffer


@examples(50, 150)
@each_family
def test_pieces_have_the_tokens_of_the_whole(name: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(text=texts, special=st.booleans(), data=st.data())
    def check(text: str, special: bool, data: st.DataObject) -> None:
        whole = canonical(name).encode(text, special)
        families.check_pieces(canonical(name), families.cut_up(text, data), special, whole)

    check()


@examples(60, 350)
@each_family
def test_changed_texts_have_the_tokens_of_the_whole(name: str, examples: int) -> None:
    tokenizer = canonical(name)
    steps = st.lists(st.tuples(st.sampled_from(STEPS), texts), max_size=8)

    @settings(max_examples=examples)
    @given(steps=steps, real=texts, data=st.data())
    def check(steps: list[tuple[str, str]], real: str, data: st.DataObject) -> None:
        buffer, text = TokenBuffer(tokenizer, add_special_tokens=True), ""
        snapshot = buffer.snapshot()
        for step, piece in steps:
            snapshot, start = buffer.snapshot(), len(text)
            if step == "refuse":
                state = buffer.checkpoint()
                buffer.append(piece)
                buffer.restore(state)
                continue
            if step != "append":
                start = data.draw(st.integers(0, len(text)))
            if step == "repeat":  # Some of the text that was there comes again.
                piece = text[start : data.draw(st.integers(start, len(text)))] + piece
            text = text[:start] + piece
            whole = tokenizer.encode(text, add_special_tokens=True)
            append(buffer, piece, whole, start=None if step == "append" else start)
            assert buffer.text == text and buffer.all_tokens() == whole
        assert buffer.all_tokens() == tokenizer.encode(text, add_special_tokens=True)
        # The prompt departs from the streamed text. Another thread may use a snapshot.
        text = text[: data.draw(st.integers(0, len(text)))] + real
        for each in (buffer, snapshot):
            for special in (False, True):
                assert each.encode(text, special) == tokenizer.encode(text, special)

    check()


@given(text=texts, start=st.integers(0, 400))
def test_the_last_boundary_is_the_last_of_all_places(text: str, start: int) -> None:
    boundaries = canonical("llama").boundaries
    places = [place for place in range(start + 1, len(text)) if boundaries.holds_at(text, place)]
    assert boundaries.last(text, start, len(text)) == max(places, default=start)


@pytest.mark.parametrize("script", SCRIPTS)
@each_streamed
def test_nearly_all_tokens_are_known_at_once(name: str, script: str) -> None:
    buffer = streamed(name, SCRIPTS[script] * (600 // len(SCRIPTS[script]) + 1))
    whole, known = buffer.all_tokens(), list(buffer.tokens)
    assert len(known) >= 0.9 * len(whole)
    assert known == whole[: len(known)]


@pytest.mark.parametrize("step", [len(STREAMED), pytest.param(1, marks=pytest.mark.nightly)])
@each_streamed
def test_unicode_has_the_tokens_of_the_whole(name: str, step: int) -> None:
    """Each block is tried with one family, and with all families at night."""
    dice = random.Random(name)
    for block in range(0x80 * (STREAMED.index(name) % step), 0x30000, 0x80 * step):
        characters = [
            character
            for character in map(chr, range(block, block + 0x80))
            if unicodedata.category(character) not in ("Cn", "Cs", "Co")
        ]
        if not characters:
            continue
        own = "".join(dice.choices(characters, k=60))
        words = ["".join(dice.choices(characters, k=4)), " ", "7", ",", "\n", "a", "文", " b"]
        text, pieces = own + "".join(dice.choices(words, k=30)), list[str]()
        whole, rest = canonical(name).encode(text), text
        while rest:
            end = dice.randint(1, 12)
            pieces.append(rest[:end])
            rest = rest[end:]
        families.check_pieces(canonical(name), pieces, False, whole)


def test_a_boundary_keeps_tokens_that_stay_the_same() -> None:
    buffer = streamed("deepseek", SCRIPTS["thai"], step=1000)
    assert buffer.certain_tokens == 0
    ahead = len(buffer.tokens)
    assert buffer.append("กอง and so on") == ahead > 0
    assert buffer.certain_tokens > ahead


def test_tokens_that_more_text_changes_are_taken_back() -> None:
    buffer = streamed("digits from the right")
    taken_back, digits = 0, "1234567890" * 40
    for start in range(0, len(digits), 11):
        before = list(buffer.tokens)
        kept = buffer.append(digits[start : start + 11])
        assert list(buffer.tokens[:kept]) == before[:kept]
        taken_back += len(before) - kept
    assert taken_back
    assert buffer.all_tokens() == canonical("digits from the right").encode(digits)


# How often text is tokenised.


@contextmanager
def counting(owner: Any, name: str) -> Iterator[list[int]]:
    """Yield the number of characters that each call of a method gets from its place on."""
    lengths, method = list[int](), getattr(owner, name)

    def count_and_call(text: str, *args: Any, **kwargs: Any) -> Any:
        start = args[0] if args else 0
        lengths.append(len(text) - max(start, 0))
        return method(text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count_and_call)
        yield lengths


def test_text_without_boundaries_is_searched_once() -> None:
    with counting(canonical("trained").boundaries, "last") as searched:
        buffer = streamed("trained", "文字列に境界はない" * 500, step=9)
    assert 0 < sum(searched) < 2 * len(buffer.text)


def test_text_without_boundaries_has_windows() -> None:
    text = SCRIPTS["thai"] * 60
    with counting(canonical("deepseek"), "encode_window") as tokenised:
        streamed("deepseek", text)
    assert 0 < sum(tokenised) < 12 * len(text)


@pytest.mark.parametrize("text", ["a" * 8000, " " * 8000, "文" * 8000])
def test_a_token_without_end_is_tokenised_few_times(text: str) -> None:
    """Like BERT's tokenizer, this one gives white space no token, and a long word one."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = CanonicalTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    with counting(tokenizer, "encode_window") as tokenised:
        for start in range(0, len(text), 16):
            buffer.append(text[start : start + 16])
    # There is a boundary between two spaces, because no token has a space.
    assert bool(tokenised) == (not text.isspace())
    assert sum(tokenised) < 3 * len(text)
    assert buffer.all_tokens() == tokenizer.encode(text)


def test_text_is_tokenised_once(guide: str) -> None:
    """Appends, replacements and the final request tokenise the new text, and not the whole."""
    with counting(canonical("trained"), "_encode") as encoded:
        buffer = streamed("trained", guide, step=7)
        assert 0 < sum(encoded) < 3 * len(guide)
        encoded.clear()
        buffer.encode(guide + " The end.", add_special_tokens=False)
        assert 0 < sum(encoded) < 60
        encoded.clear()
        known = len(buffer.tokens)
        assert buffer.replace(7, guide[7:]) == known
        assert buffer.replace(len(guide) - 30, guide[-30:] + " The end, and more.") == known
        assert sum(encoded) < 200
        # Another end leaves all tokens before it.
        assert buffer.replace(len(guide) // 2, "Something else. ") > known // 3
        assert sum(encoded) < 500


# Other tokenizers.


def test_a_tokenizer_without_places_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Placeless(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **options: Any) -> Any:
            if options.get("return_offsets_mapping"):
                raise NotImplementedError("no places")
            return super().__call__(*args, **options)

    backend = families.smollm().backend_tokenizer
    tokenizer = CanonicalTokenizer(Placeless(tokenizer_object=backend))
    for _ in range(2):
        buffer = TokenBuffer(tokenizer, add_special_tokens=False)
        for _ in range(4):
            buffer.append("ก" * 20)
        assert len(buffer.tokens) == 0
        assert buffer.all_tokens() == tokenizer.encode("ก" * 80)
    (record,) = caplog.records
    assert record.message.startswith("Text without boundaries is tokenised at its end,")


class Wrapped:
    """A tokenizer that has only ``encode`` and the methods that a test adds."""

    def __init__(self, tokenizer: Any, **shown: Any) -> None:
        self._tokenizer = tokenizer
        self.__dict__.update(shown)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def fails() -> dict[str, int]:
    raise NotImplementedError("this tokenizer has no vocabulary to show")


@pytest.mark.parametrize("shown", [{}, {"get_vocab": fails}, {"get_vocab": lambda: {7: 7}}])
def test_unknown_tokenizers_know_tokens_at_the_end(
    shown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    real, text = families.served(), "One two three. Four\nfive"
    with caplog.at_level(logging.WARNING):
        tokenizer = CanonicalTokenizer(Wrapped(real, **shown))
    (record,) = caplog.records
    assert "certain when they end" in record.message
    assert not tokenizer.boundaries
    assert (tokenizer.digest is None) == (shown.get("get_vocab") in (None, fails))
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    for piece in (text[:8], text[8:20], text[20:]):
        buffer.append(piece)
        assert len(buffer.tokens) == 0
    assert buffer.all_tokens() == real.encode(text, add_special_tokens=False)


def test_an_unfixed_special_token_is_refused() -> None:
    tokenizer = families.with_pattern()
    encode = tokenizer.encode

    def with_length(text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = encode(text, add_special_tokens=False)
        return [len(tokens), *tokens] if add_special_tokens else tokens

    tokenizer.encode = with_length
    with pytest.raises(ValueError, match="no fixed special tokens"):
        CanonicalTokenizer(tokenizer)


def test_streams_take_token_ids_with_any_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = SimpleNamespace(encode=lambda text: [len(text)])
    dispatcher = SimpleNamespace(_mapping={})
    with caplog.at_level(logging.WARNING):
        engine = Engine(SimpleNamespace(_result_dispatcher=dispatcher, tokenizer=tokenizer))
    assert engine.tokenizer is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "token ids only" in record.message


def with_bos() -> Any:
    tokenizer = families.sentencepiece()
    tokenizer.bos_token = "<s>"
    return tokenizer


def joined_as_sglang_does(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """Join as ``OpenAIServingChat._append_assistant_prefix_to_prompt_ids`` does."""
    encoded = tokenizer.encode(answer)
    if encoded and encoded[0] == tokenizer.bos_token_id:
        encoded = encoded[1:]
    return tokenizer.encode(prompt, add_special_tokens=False) + encoded


@examples(50, 150)
@pytest.mark.parametrize("make", [families.with_pattern, with_bos])
def test_an_answer_to_continue_is_tokenised_alone(make: Any, examples: int) -> None:
    tokenizer = make()
    canonical = CanonicalTokenizer(tokenizer)

    @settings(max_examples=examples)
    @example(prompt="", answer="", more="Kathmandu.")
    @example(prompt="", answer="7" * 40, more="12" + "7" * 40)
    @given(prompt=texts, answer=texts, more=texts)
    def check(prompt: str, answer: str, more: str) -> None:
        # SGLang and the plugin join two encodings that are only a beginning-of-text token.
        if tokenizer.bos_token and answer.startswith(tokenizer.bos_token):
            return
        rendered = RenderedPrompt([Piece(prompt, False), Piece(answer, True)])
        buffer, first = rendered.new_buffer(canonical)
        for piece in (first, more):
            buffer.append(piece)
        whole = joined_as_sglang_does(tokenizer, prompt, answer + more)
        # After the last boundary tokens are only likely, as in a long number.
        is_number = re.search(r"\d{32}", answer + more)
        known = list(buffer.tokens[: buffer.certain_tokens if is_number else None])
        assert known == whole[: len(known)]
        assert buffer.all_tokens() == whole
        assert buffer.whole_text == prompt + answer + more
        assert buffer.encode_piece(prompt, False, first=True) == canonical.encode(prompt)
        assert buffer.encode_piece(answer, True, first=False) == canonical.encode(answer, True)

    check()
