"""Hypothesis strategies for tokenizers of all parts that the ``tokenizers`` library has."""

from __future__ import annotations

import inspect
import unicodedata
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import sentencepiece
from hypothesis import assume
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

# Texts that parts of a tokenizer treat in different ways, or join with others.
PIECES = [
    "a", "a", "b", "b", "A", "ab", "ba", "e", "e", "\u0301", "é", "É", "s", "1", "12", " ", " ",
    " ", "  ", "▁", "\n", "\n\n", "\u0001",
    "\r\n", "\t", ".", ",", "'s", "-", "_", "<", ">", "=", "\u0338", "文", "，", "。", "ｶ", "ﾞ",
    "ﬁ", "\u200b", "\u00ad", "½", "²", "１", "🙂", "👩‍👩", "ก็", "한", "\u1100", "\u1161", "\u11a8",
    "\u0d4e", "ﹰ", "Ġ", "İ", "ß", "\u0000", "\u3000", "\u00a0", "``", "क्", "ष", "٣", "\U00011f02",
]  # fmt: skip
EXPRESSIONS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"\d{1,3}(?=(?:\d{3})*(?!\d))",
    r"[^(\s|[.,])]+",
    r"\p{L}+|\p{N}",
    r"\s?\p{L}+",
    r"\s+$",
    r" {2,}",
    r"\s+",
    r"[\r\n]",
    r"[a-e\u0300-\u0340]+",
    r"(?<=a)b|e",
    r"\bb|A",
    r"a+?b",
    r"^a|[.,]+",
    r"^aa|a",
    r"(?<=\.)bb|b",
    r"b\z|文",
    r"ab|a",
]
STRINGS = [" ", "a", "ab", ".", "``", "\u0301", "▁", "é", "  "]
CONTENTS = ["", " ", "▁", "a", "\u0301", ".", "é", "b "]


def charsmap(rules: str) -> bytes:
    """Compile replacements as sentencepiece does: of a name, or lines of code points."""
    import io
    import tempfile

    option = {"normalization_rule_name": rules}
    if "\t" in rules:
        with tempfile.NamedTemporaryFile("w", suffix=".tsv", delete=False) as file:
            file.write(rules)
        option = {"normalization_rule_tsv": file.name}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f"] * 9),
        model_writer=model,
        vocab_size=12,
        hard_vocab_limit=False,
        minloglevel=2,
        **option,
    )
    normalizer_spec, precompiled_charsmap = 3, 2
    return field(field(model.getvalue(), normalizer_spec), precompiled_charsmap)


def field(message: bytes, wanted: int) -> bytes:
    """Return a field of bytes of a message in protobuf's format."""

    def number() -> int:
        nonlocal message
        value = shift = 0
        while True:
            byte, message = message[0], message[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while message:
        tag = number()
        size = {0: lambda: number() * 0, 1: lambda: 8, 2: number, 5: lambda: 4}[tag & 7]()
        if tag >> 3 == wanted:
            return message[:size]
        message = message[size:]
    raise LookupError(wanted)


CHARSMAPS = [
    charsmap("nmt_nfkc"),
    charsmap("nfkc_cf"),
    # e with its accent, a letter that disappears, one that becomes two, and a mark.
    charsmap("65 301\tE9\n62\t\n41\t61 20\n2E\t301\n200B\t20\nD4E\t61\n"),
]

flags = st.booleans()
expressions = st.sampled_from(EXPRESSIONS).map(Regex)
patterns = st.one_of(st.sampled_from(STRINGS), expressions)
behaviors = st.sampled_from(
    ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
)


def with_sequences(module: ModuleType, parts: Mapping[str, st.SearchStrategy[Any]]) -> Any:
    """Return a strategy for one part, a sequence of some, or ``None``."""
    # Earlier releases of the library lack some.
    one = st.one_of(*(strategy for name, strategy in parts.items() if hasattr(module, name)))
    many = st.lists(one, min_size=1, max_size=4).map(module.Sequence)
    return st.one_of(st.none(), one, many)


NORMALIZERS: dict[str, st.SearchStrategy[Any]] = {
    "NFC": st.builds(normalizers.NFC),
    "NFD": st.builds(normalizers.NFD),
    "NFKC": st.builds(normalizers.NFKC),
    "NFKD": st.builds(normalizers.NFKD),
    "Lowercase": st.builds(normalizers.Lowercase),
    "StripAccents": st.builds(normalizers.StripAccents),
    "Nmt": st.builds(normalizers.Nmt),
    "ByteLevel": st.builds(normalizers.ByteLevel),
    "Prepend": st.sampled_from(["▁", "a", "ab", "\u0301"]).map(normalizers.Prepend),
    "Strip": st.builds(normalizers.Strip, left=flags, right=flags),
    "Replace": st.builds(normalizers.Replace, patterns, st.sampled_from(CONTENTS)),
    "Precompiled": st.sampled_from(CHARSMAPS).map(normalizers.Precompiled),
    "BertNormalizer": st.builds(
        normalizers.BertNormalizer,
        clean_text=flags,
        handle_chinese_chars=flags,
        strip_accents=st.one_of(st.none(), flags),
        lowercase=flags,
    ),
}
PRE_TOKENIZERS: dict[str, st.SearchStrategy[Any]] = {
    "BertPreTokenizer": st.builds(pre_tokenizers.BertPreTokenizer),
    "ByteLevel": st.builds(
        pre_tokenizers.ByteLevel, add_prefix_space=flags, trim_offsets=flags, use_regex=flags
    ),
    "CharDelimiterSplit": st.sampled_from(" a▁").map(pre_tokenizers.CharDelimiterSplit),
    "Digits": flags.map(pre_tokenizers.Digits),
    "FixedLength": st.integers(1, 5).map(lambda length: pre_tokenizers.FixedLength(length=length)),
    "Metaspace": st.builds(
        pre_tokenizers.Metaspace,
        replacement=st.sampled_from("▁_"),
        prepend_scheme=st.sampled_from(["always", "first", "never"]),
        split=flags,
    ),
    "Punctuation": behaviors.map(pre_tokenizers.Punctuation),
    "Split": st.builds(pre_tokenizers.Split, patterns, behaviors, flags),
    "UnicodeScripts": st.builds(pre_tokenizers.UnicodeScripts),
    "Whitespace": st.builds(pre_tokenizers.Whitespace),
    "WhitespaceSplit": st.builds(pre_tokenizers.WhitespaceSplit),
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = [*dict.fromkeys("".join(PIECES) + "▁_'")]


@st.composite
def entries(draw: st.DrawFn) -> tuple[list[str], list[tuple[str, str]]]:
    """Draw the entries of a vocabulary, and the two parts of each longer entry."""
    spelled = sorted(pre_tokenizers.ByteLevel.alphabet())
    few = draw(st.lists(st.sampled_from(ALPHABET), max_size=12, unique=True))
    found = draw(
        st.sampled_from([[*ALPHABET], spelled, [*dict.fromkeys([*ALPHABET, *spelled])], few])
    )
    found, merges = ["<unk>", *found], list[tuple[str, str]]()
    usual = [found.index(each) for each in "abab e▁Ġ\u0301.1" if each in found] or [0]
    for _ in range(draw(st.integers(0, 20))):
        places = st.one_of(st.sampled_from(usual), st.integers(1, max(len(found) - 1, 1)))
        places = st.one_of(places, st.integers(max(len(found) - 4, 0), len(found) - 1))
        left, right = (found[min(draw(places), len(found) - 1)] for _ in range(2))
        if left + right not in found:
            found.append(left + right)
            merges.append((left, right))
    return found, merges


@st.composite
def bpe(draw: st.DrawFn) -> models.BPE:
    found, merges = draw(entries())
    has_bytes = draw(st.sampled_from([False, False, True]))
    found += draw(st.sampled_from([BYTES, BYTES[:200]])) if has_bytes else []
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["plain", "plain", "plain", "prefix", "suffix", "whole"]))
    if kind == "prefix":
        options["continuing_subword_prefix"] = "##"
        found += [f"##{each}" for each in found]
        merges = []
    elif kind == "suffix":
        options["end_of_word_suffix"] = "</w>"
        found += [f"{each}</w>" for each in found]
    elif kind == "whole":
        options["ignore_merges"] = True
        merges = merges[: draw(st.integers(0, len(merges)))]
    return models.BPE(
        vocab={each: number for number, each in enumerate(dict.fromkeys(found))},
        merges=merges,
        unk_token=draw(st.sampled_from([None, "<unk>"])),
        fuse_unk=draw(flags),
        byte_fallback=has_bytes,
        **options,
    )


@st.composite
def unigram(draw: st.DrawFn) -> models.Unigram:
    found, _ = draw(entries())
    has_bytes = draw(flags)
    found += BYTES if has_bytes else []
    scores = draw(st.lists(st.integers(-9, 0), min_size=4, max_size=4))
    scored = [(each, float(scores[number % 4])) for number, each in enumerate(found)]
    return models.Unigram(scored, 0, has_bytes)


@st.composite
def wordpiece(draw: st.DrawFn) -> models.WordPiece:
    found, _ = draw(entries())
    prefix = draw(st.sampled_from(["##", ""]))
    found += [f"{prefix}{each}" for each in found] if prefix else []
    return models.WordPiece(
        {each: number for number, each in enumerate(found)},
        unk_token="<unk>",
        max_input_chars_per_word=draw(st.sampled_from([3, 100])),
        continuing_subword_prefix=prefix,
    )


wordlevel = entries().map(
    lambda drawn: models.WordLevel(
        {each: number for number, each in enumerate(drawn[0])}, unk_token="<unk>"
    )
)
MODELS: dict[str, st.SearchStrategy[Any]] = {
    "BPE": bpe(),
    "Unigram": unigram(),
    "WordLevel": wordlevel,
    "WordPiece": wordpiece(),
}
SPECIAL = [("[CLS]", 9001), ("[SEP]", 9002)]
PROCESSORS: dict[str, st.SearchStrategy[Any]] = {
    "BertProcessing": st.just(processors.BertProcessing(SPECIAL[1], SPECIAL[0])),
    "ByteLevel": flags.map(lambda trim: processors.ByteLevel(trim_offsets=trim)),
    "RobertaProcessing": st.just(processors.RobertaProcessing(SPECIAL[1], SPECIAL[0])),
    "TemplateProcessing": st.sampled_from(
        ["$A", "[CLS] $A", "$A [SEP]", "[CLS] [SEP] $A [CLS]"]
    ).map(lambda single: processors.TemplateProcessing(single=single, special_tokens=SPECIAL)),
}
# What the library has, and a strategy for each.
COVERED: list[tuple[ModuleType, Mapping[str, Any], set[str]]] = [
    (normalizers, NORMALIZERS, {"Normalizer", "Sequence"}),
    (pre_tokenizers, PRE_TOKENIZERS, {"PreTokenizer", "Sequence"}),
    (models, MODELS, {"Model"}),
    (processors, PROCESSORS, {"PostProcessor", "Sequence"}),
]
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def classes_of(module: ModuleType) -> set[str]:
    return {name for name, each in vars(module).items() if inspect.isclass(each)}


texts_of_tokens = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
added_tokens = st.builds(
    AddedToken,
    texts_of_tokens,
    **{flag: st.sampled_from([False, False, True]) for flag in TOKEN_FLAGS},
)


@st.composite
def tokenizers(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """Draw a tokenizer, and the contents of its added tokens."""
    tokenizer = Tokenizer(draw(st.one_of(MODELS["BPE"], st.one_of(*MODELS.values()))))
    if (normalizer := draw(with_sequences(normalizers, NORMALIZERS))) is not None:
        tokenizer.normalizer = normalizer
    if (pre_tokenizer := draw(with_sequences(pre_tokenizers, PRE_TOKENIZERS))) is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if (processor := draw(with_sequences(processors, PROCESSORS))) is not None:
        tokenizer.post_processor = processor
    added = draw(st.lists(added_tokens, max_size=4))
    # The library takes memory without end if it looks for a token that the normalizer has emptied.
    assume(
        normalizer is None
        or all(normalizer.normalize_str(each.content) for each in added if each.normalized)
    )
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), [each.content for each in added]


def variants(text: str) -> list[str]:
    """Return texts that a tokenizer may take for the same."""
    forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    return [
        text,
        *forms,
        text.upper(),
        text.lower(),
        f" {text}",
        f"{text} ",
        f"{text}\n",
        f"a{text}",
    ]


@st.composite
def texts(draw: st.DrawFn, contents: list[str]) -> str:
    """Draw a text of pieces, and of texts that a tokenizer may take for its added tokens."""
    pieces = [*PIECES, *(each for content in contents for each in 3 * variants(content))]
    return "".join(draw(st.lists(st.sampled_from(pieces), max_size=12)))
