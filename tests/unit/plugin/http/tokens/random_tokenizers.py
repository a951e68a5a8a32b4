"""Hypothesis strategies for tokenizers of all parts that models use."""

import inspect
import unicodedata
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
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
    r"a++|ab|é",
    r"a(?=b*e)|b",
    r"ab|a",
]
STRINGS = [" ", "a", "ab", ".", "``", "\u0301", "▁", "é", "  "]
# Expressions that match a single character, and their replacements.
CLASSES = [
    " ",
    "a",
    "\u0301",
    "▁",
    "é",
    Regex(r"\s"),
    Regex(r"[a-e\u0300-\u0340]"),
    Regex(r"\p{N}"),
]
CONTENTS = ["", " ", "▁", "a", "\u0301", ".", "é", "b "]

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
    "Lowercase": st.builds(normalizers.Lowercase),
    "ByteLevel": st.builds(normalizers.ByteLevel),
    "Prepend": st.sampled_from(["▁", "a", "ab", "\u0301"]).map(normalizers.Prepend),
    "Replace": st.builds(normalizers.Replace, st.sampled_from(CLASSES), st.sampled_from(CONTENTS)),
}
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@st.composite
def normalizer(draw: st.DrawFn) -> Any:
    """Draw a normal form or none, and then other normalizers."""
    form = draw(st.sampled_from([None, *NORMAL_FORMS]))
    first = [] if form is None else [getattr(normalizers, form)()]
    return normalizers.Sequence(
        first + draw(st.lists(st.one_of(*NORMALIZERS.values()), max_size=3))
    )


PRE_TOKENIZERS: dict[str, st.SearchStrategy[Any]] = {
    "ByteLevel": st.builds(
        pre_tokenizers.ByteLevel, add_prefix_space=flags, trim_offsets=flags, use_regex=flags
    ),
    "Digits": flags.map(pre_tokenizers.Digits),
    "Metaspace": st.builds(
        pre_tokenizers.Metaspace,
        replacement=st.sampled_from("▁_"),
        prepend_scheme=st.sampled_from(["always", "first", "never"]),
        split=flags,
    ),
    "Punctuation": behaviors.map(pre_tokenizers.Punctuation),
    "Split": st.builds(pre_tokenizers.Split, patterns, behaviors, flags),
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
# What the library has: the parts with a strategy, and others. The plugin refuses most others.
COVERED: list[tuple[ModuleType, Iterable[str], set[str]]] = [
    (
        normalizers,
        [*NORMALIZERS, *NORMAL_FORMS],
        {"Normalizer", "Sequence", "BertNormalizer", "Nmt", "Precompiled", "Strip", "StripAccents"},
    ),
    (
        pre_tokenizers,
        PRE_TOKENIZERS,
        {
            "PreTokenizer", "Sequence", "BertPreTokenizer", "CharDelimiterSplit", "FixedLength",
            "UnicodeScripts",
        },
    ),
    (models, MODELS, {"Model"}),
    (processors, PROCESSORS, {"PostProcessor", "Sequence"}),
]  # fmt: skip
TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "special")


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
    tokenizer.normalizer = normalizes = draw(normalizer())
    if (pre_tokenizer := draw(with_sequences(pre_tokenizers, PRE_TOKENIZERS))) is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if (processor := draw(with_sequences(processors, PROCESSORS))) is not None:
        tokenizer.post_processor = processor
    added = draw(st.lists(added_tokens, max_size=4))
    # The library takes memory without end if it looks for a token that the normalizer has emptied.
    assume(all(normalizes.normalize_str(each.content) for each in added if each.normalized))
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
