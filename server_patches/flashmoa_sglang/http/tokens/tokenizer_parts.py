"""The parts of a tokenizer, and whether text is certainly split where two sides meet.

A tokenizer cuts out its added tokens, normalises the rest, cuts out added tokens again, splits the
rest, and makes tokens of each piece. :func:`read_parts` returns a :data:`Part` for each step, in
this order. A tokenizer is refused if it has a part, or an option, that is not listed here, or parts
in an order that models do not have.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy

from flashmoa_sglang.http.tokens.expressions import NotUnderstood, escaped
from flashmoa_sglang.http.tokens.split_patterns import SplitPattern

Spec = Mapping[str, Any]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


class Ends(NamedTuple):
    """The text on both sides of a place, as one part of a tokenizer leaves it to the next.

    Attributes:
        left: the end of the text before the place. Its first character starts afresh.
        right: the beginning of the text after the place. Its first character starts afresh, and so
            does the character that follows it in the text.
    """

    left: str
    right: str


# Says that a part always splits between two sides (``True``), or that it may join them (``False``),
# or how it leaves them to the next part. This holds whatever text is before and after the sides.
Part = Callable[[Ends], bool | Ends]


class AddedTokens:
    """The part that cuts added tokens out of a text.

    Args:
        tokens: the tokens with their options.
        contents: the contents, as the text has them where the tokens are looked for.
        marks_beginnings: whether a later part treats the beginning of a text specially, and so the
            text after an added token.
    """

    def __init__(
        self, tokens: Sequence[Spec], contents: Sequence[str], *, marks_beginnings: bool
    ) -> None:
        if not all(contents):
            raise NotUnderstood("an added token is empty")
        if any(token["single_word"] for token in tokens):
            raise NotUnderstood("an added token that must be a word")
        options = list(zip(tokens, contents, strict=True))
        self._inside = {pair for text in contents for pair in itertools.pairwise(text)}
        self._first = {text[0] for text in contents}
        self._last = {text[-1] for text in contents}
        self._first_stripping = {text[0] for token, text in options if token["lstrip"]}
        self._last_stripping = {text[-1] for token, text in options if token["rstrip"]}
        self._marks_beginnings = marks_beginnings

    def __call__(self, ends: Ends) -> bool | Ends:
        left, right = ends.left[-1], ends.right[0]
        # A token may end, or begin, between characters that would combine without it.
        is_cut = self._last.intersection(ends.left[:-1]) or self._first.intersection(ends.right[1:])
        if is_cut or (left, right) in self._inside or self._strips(left, right):
            return False
        return ends

    def _strips(self, left: str, right: str) -> bool:
        """Return whether the text after the place may be cut, or begin after a token."""
        if self._marks_beginnings and left in self._last:
            return True
        is_left_space, is_right_space = left.isspace(), right.isspace()
        if is_left_space and (
            right in self._first_stripping or (is_right_space and self._first_stripping)
        ):
            return True
        may_end = left in self._last_stripping or (is_left_space and self._last_stripping)
        return bool(may_end) and (is_right_space or self._marks_beginnings)


def _changes(change: Callable[[str], str]) -> Part:
    """Return a part that changes each side as if it were alone."""
    change = lru_cache(maxsize=1 << 16)(change)

    def part(ends: Ends) -> bool | Ends:
        changed = Ends(change(ends.left), change(ends.right))
        return changed if all(changed) else False

    return part


def split_at(pattern: SplitPattern, behavior: str) -> Part:
    """Return the part that splits at the matches of an expression.

    Args: behavior: the library's name of a way to split.
    """

    def part(ends: Ends) -> bool | Ends:
        meeting = pattern.meeting(ends.left[-1], ends.right[0])
        if not meeting.are_apart:
            return False
        # Other behaviours join matches with the text beside them, or with one another.
        splits = meeting.are_matched and behavior in ("Isolated", "Removed")
        return True if splits else ends

    return part


def _neighbours(split: Callable[[str], list[tuple[str, tuple[int, int]]]]) -> Part:
    """Return a part that splits between two characters or not, whatever text is around them."""

    def part(ends: Ends) -> bool | Ends:
        pieces = split(ends.left[-1] + ends.right[0])
        # Without a piece, both characters are dropped.
        splits = not pieces or any(1 in places for _, places in pieces)
        return True if splits else ends

    return part


def _metaspace(replacement: str, *, splits: bool) -> Part:
    """Return the part that replaces spaces, and may split before the replacement."""
    replace = _changes(lambda text: text.replace(" ", replacement))

    def part(ends: Ends) -> bool | Ends:
        return True if splits and ends.right[0] in (" ", replacement) else replace(ends)

    return part


def _merges(joined: set[tuple[str, str]], known: set[str] | None) -> Part:
    """Return the part that joins characters in steps to entries of a vocabulary, which is BPE.

    Args:
        joined: for each merge, the last character of its first part and the first of its second.
        known: the characters in the vocabulary; ``None``: bytes spell all other characters.
    """

    def part(ends: Ends) -> bool:
        left, right = ends.left[-1], ends.right[0]
        is_known = known is None or (left in known and right in known)
        return is_known and (left, right) not in joined

    return part


@lru_cache(maxsize=1 << 16)
def starts_afresh(character: str) -> bool:
    """Return whether no normal form combines a character with a character before it."""
    first = unicodedata.normalize("NFKD", character)[0]
    # Vowels and final consonants of Hangul combine, although they are no marks. A character that
    # this release of Unicode lacks may be a mark to the tokenizer.
    return (
        not 0x1160 <= ord(first) < 0x1200
        and unicodedata.category(first) not in ("Mn", "Mc", "Me", "Cn")
        and not unicodedata.combining(first)
    )


def read_parts(spec: Spec) -> list[Part]:
    """Read the JSON of a tokenizer.

    Raises: NotUnderstood
    """
    _check(spec, "tokenizer", _TOKENIZER)
    normalizers = _flatten(spec["normalizer"], "normalizers", _NORMALIZERS)
    pre_tokenizers = _flatten(spec["pre_tokenizer"], "pretokenizers", _PRE_TOKENIZERS)
    changes = [each for each in normalizers if each["type"] != "Prepend"]
    marks_beginnings = len(changes) < len(normalizers) or any(map(_prepends, pre_tokenizers))
    for token in spec["added_tokens"]:
        _check(token, "added token", _ADDED_TOKEN)
    raw = [token for token in spec["added_tokens"] if not token["normalized"]]
    changed = [token for token in spec["added_tokens"] if token["normalized"]]
    normalize = _normalize(normalizers)
    contents = [normalize(token["content"]) for token in changed]
    return [
        AddedTokens(raw, [token["content"] for token in raw], marks_beginnings=marks_beginnings),
        _normalizer(changes),
        AddedTokens(changed, contents, marks_beginnings=marks_beginnings),
        *_pre_tokenizers(pre_tokenizers),
        *_model(spec["model"]),
    ]


def library_part(kind: str, spec: Spec) -> Any:
    """Make a part by itself with the library of the tokenizer."""
    from tokenizers import Tokenizer

    others = dict.fromkeys(_TOKENIZER - {"version", "added_tokens"})
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    whole = {**others, "version": "1.0", "added_tokens": [], "model": model, kind: spec}
    return getattr(Tokenizer.from_str(json.dumps(whole)), kind)


def library_engine(expression: str) -> Callable[[str], Any]:
    """Compile the expression of a class, as the library does."""
    spec = {"type": "Replace", "pattern": {"Regex": expression}, "content": "\0"}
    replace = library_part("normalizer", spec).normalize_str

    def matches(characters: str) -> Any:
        replaced = replace(characters)
        if len(replaced) != len(characters):
            raise NotUnderstood(f"{expression!r} matches several characters")
        return numpy.frombuffer(replaced.encode("utf-32-le"), numpy.uint32) == 0

    return matches


def _check(spec: Spec, name: str, options: set[str]) -> None:
    if unknown := spec.keys() - options - {"type"}:
        raise NotUnderstood(f"{name} has the option {min(unknown)!r}")


def _flatten(spec: Spec | None, field: str, known: Mapping[str, set[str]]) -> list[Spec]:
    """Return the parts of a sequence, which may be of sequences."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        _check(spec, "Sequence", {field})
        return [part for each in spec[field] for part in _flatten(each, field, known)]
    _check_kind(spec, known)
    return [spec]


def _check_kind(spec: Spec, known: Mapping[str, set[str]]) -> None:
    if spec["type"] not in known:
        raise NotUnderstood(f"the part {spec['type']!r}")
    _check(spec, spec["type"], known[spec["type"]])


# The options of each part.
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_NORMALIZERS: dict[str, set[str]] = {
    **{form: set[str]() for form in _NORMAL_FORMS},
    "ByteLevel": set(),
    "Lowercase": set(),
    "Prepend": {"prepend"},
    "Replace": {"pattern", "content"},
}
_PRE_TOKENIZERS: dict[str, set[str]] = {
    "ByteLevel": {"add_prefix_space", "trim_offsets", "use_regex"},
    "Digits": {"individual_digits"},
    "Metaspace": {"replacement", "prepend_scheme", "split"},
    "Punctuation": {"behavior"},
    "Split": {"pattern", "behavior", "invert"},
    "Whitespace": set(),
    "WhitespaceSplit": set(),
}
_MODELS: dict[str, set[str]] = {
    "BPE": {
        "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix",
        "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
    },
    "Unigram": {"vocab", "unk_id", "byte_fallback"},
    "WordLevel": {"vocab", "unk_token"},
    "WordPiece": {
        "vocab", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word",
    },
}  # fmt: skip
_TOKENIZER = {
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
    "post_processor", "decoder", "model",
}  # fmt: skip
_ADDED_TOKEN = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}


def _normalize(specs: Sequence[Spec]) -> Callable[[str], str]:
    return library_part("normalizer", {"type": "Sequence", "normalizers": specs}).normalize_str


def _normalizer(specs: Sequence[Spec]) -> Part:
    if any(spec["type"] in _NORMAL_FORMS for spec in specs[1:]):
        # Characters that do not combine may be replaced by characters that do.
        raise NotUnderstood("a normal form of text that is already changed")
    for spec in specs:
        if spec["type"] == "Replace" and not _expression(spec["pattern"]).is_one_character:
            raise NotUnderstood("a replacement of several characters")
    return _changes(_normalize(specs))


def _prepends(spec: Spec) -> bool:
    """Return whether a pre-tokenizer puts something before each piece of a text."""
    return bool(spec.get("add_prefix_space")) or spec.get("prepend_scheme") == "always"


def _pre_tokenizers(specs: Sequence[Spec]) -> list[Part]:
    parts, may_split = list[Part](), False
    for spec in specs:
        if may_split and _prepends(spec):
            # Distant text may decide where an expression splits.
            raise NotUnderstood("a part that puts something before what an expression splits")
        may_split = may_split or spec["type"] == "Split" or bool(spec.get("use_regex"))
        parts += _pre_tokenizer(spec)
    return parts


def _pre_tokenizer(spec: Spec) -> list[Part]:
    match spec["type"]:
        case "Metaspace":
            return [_metaspace(spec["replacement"], splits=spec["split"])]
        case "Split":
            return [split_at(_expression(spec["pattern"]), spec["behavior"])]
        case "ByteLevel":
            spell = _changes(_normalize([{"type": "ByteLevel"}]))
            return [split_at(_pattern(_GPT2), "Isolated"), spell] if spec["use_regex"] else [spell]
        case _:
            return [_neighbours(library_part("pre_tokenizer", spec).pre_tokenize_str)]


def _expression(pattern: Spec) -> SplitPattern:
    """Read a pattern: an expression, or a text that is one when it is escaped."""
    ((kind, text),) = pattern.items()
    if kind == "String":
        text = "".join(map(escaped, text))
    return _pattern(text)


@lru_cache(maxsize=32)
def _pattern(expression: str) -> SplitPattern:
    return SplitPattern(expression, library_engine)


def _model(spec: Spec) -> list[Part]:
    _check_kind(spec, _MODELS)
    if spec.get("dropout"):
        raise NotUnderstood("a random model")
    # The other models look at whole pieces, and so do these options.
    whole = ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if spec["type"] != "BPE" or any(map(spec.get, whole)):
        return []
    vocabulary: set[str] = {*spec["vocab"]}
    merges = [each.split(" ") if isinstance(each, str) else each for each in spec["merges"]]
    joined = {(left[-1], right[0]) for left, right in merges}
    if not (spec["byte_fallback"] and vocabulary >= _BYTE_TOKENS):
        # Characters that are unknown may be left out, or joined to one token.
        return [_merges(joined, {entry for entry in vocabulary if len(entry) == 1})]
    has_merged_bytes = not _BYTE_TOKENS.isdisjoint(itertools.chain.from_iterable(merges))
    return [] if has_merged_bytes else [_merges(joined, None)]
