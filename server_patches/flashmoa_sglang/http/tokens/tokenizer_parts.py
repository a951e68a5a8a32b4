"""The parts of a tokenizer, and whether text is certainly split where two sides meet.

A tokenizer cuts out its added tokens, normalises the rest, cuts out added tokens again, splits the
rest, and makes tokens of each piece. :func:`read_parts` returns a :class:`Part` for each step, in
this order. A part says that it always splits at a place, or that it might join both sides. Or it
says how it leaves the two sides to the next part. Its answer holds whatever text is before and
after the two sides. A tokenizer is refused if it has a part, or an option, that is not listed here.
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
from flashmoa_sglang.http.tokens.split_patterns import Meeting, SplitPattern

Spec = Mapping[str, Any]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BEHAVIORS = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"}
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


class Ends(NamedTuple):
    """The text on both sides of a place, as one part of a tokenizer leaves it to the next.

    Attributes:
        left: the end of the text before the place. It begins with a character that does not
            combine with the characters before it.
        right: the beginning of the text after the place, in the same way.
        after: the character after that, which does not combine with it; empty if it is not known.
    """

    left: str
    right: str
    after: str


# Whether text is certainly split there (``False``: it may be joined), or what may be left to the
# next part.
Verdict = bool | list[Ends]


class Part:
    """A part that changes nothing near a place inside of a text.

    Attributes:
        starts_matter: whether the part looks at where a text begins, or at the character before a
            place.
        later_starts_matter: whether a later part has ``starts_matter``.
    """

    starts_matter = False
    later_starts_matter = False

    def __call__(self, ends: Ends) -> Verdict:
        return [ends]

    def keeps(self, character: str) -> bool:
        """Return whether it leaves a character as it is."""
        return bool(character)


class Beginning(Part):
    """Puts something before each text."""

    starts_matter = True


class Unknown(Part):
    """May join anything."""

    def __call__(self, ends: Ends) -> Verdict:
        return False


class AddedTokens(Part):
    """The tokens that are cut out of a text, by their contents and options.

    Args:
        contents: the contents, as the text has them where the tokens are looked for.
    """

    def __init__(self, tokens: Sequence[Spec], contents: list[str]) -> None:
        if not all(contents):
            raise NotUnderstood("an added token is empty")
        options = list(zip(tokens, contents, strict=True))
        self._inside = {pair for _, text in options for pair in itertools.pairwise(text)}
        self._first = {text[0] for _, text in options}
        self._last = {text[-1] for _, text in options}
        self._first_stripping = {text[0] for token, text in options if token["lstrip"]}
        self._last_stripping = {text[-1] for token, text in options if token["rstrip"]}
        self._last_of_words = {text[-1] for token, text in options if token["single_word"]}
        self.starts_matter = bool(self._last_of_words)

    def __call__(self, ends: Ends) -> Verdict:
        left, right = ends.left[-1], ends.right[0]
        # A token may end, or begin, between characters that would combine without it.
        is_cut = self._last.intersection(ends.left[:-1]) or self._first.intersection(ends.right[1:])
        if is_cut or (left, right) in self._inside or self._strips(left, right):
            return False
        # A token that must be a word is one at the end of a text, but not before a letter.
        is_word = right.isalnum() or right == "_" or not right.isascii()
        if is_word and left in self._last_of_words:
            return False
        return [ends]

    def _strips(self, left: str, right: str) -> bool:
        """Return whether the text after the place may be cut or treated as after a token."""
        is_left_space, is_right_space = left.isspace(), right.isspace()
        if is_left_space and (
            right in self._first_stripping or (is_right_space and self._first_stripping)
        ):
            return True
        may_end = left in self._last_stripping or bool(is_left_space and self._last_stripping)
        if may_end and (is_right_space or self.later_starts_matter):
            return True
        return self.later_starts_matter and left in self._last


class EachCharacter(Part):
    """Changes each character by itself.

    Args: change: changes a text as the tokenizer does.
    """

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = lru_cache(1 << 16)(change)

    def __call__(self, ends: Ends) -> Verdict:
        changed = Ends(*map(self._change, ends))
        return [changed] if changed.left and changed.right else False

    def keeps(self, character: str) -> bool:
        return self._change(character) == character


class Combining(EachCharacter):
    """Changes characters, some together with the characters after them.

    Args: separate: whether two neighbours never combine.
    """

    def __init__(self, change: Callable[[str], str], separate: Callable[[str, str], bool]) -> None:
        super().__init__(change)
        self._separate = separate

    def __call__(self, ends: Ends) -> Verdict:
        left, right, after = ends
        if (
            after
            and starts_afresh("", left[0])
            and self._separate(left[-1], right[0])
            and self._separate(right[-1], after[0])
        ):
            return super().__call__(ends)
        return False


class Replace(Part):
    """Replaces matches of an expression of several characters."""

    def __init__(self, pattern: SplitPattern, content: str) -> None:
        self._pattern, self._content = pattern, content
        self.starts_matter = pattern.looks_back

    def __call__(self, ends: Ends) -> Verdict:
        left, right, after = ends
        if not self._pattern.meeting(left[-1], right[0]).are_apart:
            return False
        lefts, rights = self._ways(left, left[-1]), self._ways(right, right[0])
        # The text before the place decides what a later part has before the right side.
        if self.later_starts_matter and len({each[-1:] for each in lefts}) > 1:
            return False
        if rights != [right] or self._may_change(after):
            after = ""
        ways = itertools.product(lefts, rights)
        return [Ends(*way, after) for way in ways] if all((*lefts, *rights)) else False

    def keeps(self, character: str) -> bool:
        return not self._may_change(character)

    def _may_change(self, text: str) -> bool:
        return any(map(self._pattern.may_contain, text))

    def _ways(self, text: str, nearest: str) -> list[str]:
        """Return the texts that may remain of a side; ``nearest`` is next to the other side."""
        if not self._may_change(text):
            return [text]
        return [nearest, self._content] if self._may_change(nearest) else [nearest]


class Strip(Part):
    """Drops white space at the ends of a text."""

    starts_matter = True

    def __call__(self, ends: Ends) -> Verdict:
        # The text before the place may be only white space.
        return False if ends.left[-1].isspace() else [ends]


class Split(Part):
    """Splits at matches of an expression.

    Args:
        behavior: the name of a behaviour in the library.
        is_inverted: whether it does that with the text between matches.
    """

    def __init__(self, pattern: SplitPattern, behavior: str, is_inverted: bool = False) -> None:
        if behavior not in _BEHAVIORS:
            raise NotUnderstood(f"the behaviour {behavior!r}")
        self._pattern, self._behavior, self._is_inverted = pattern, behavior, is_inverted
        self.starts_matter = pattern.looks_back

    def __call__(self, ends: Ends) -> Verdict:
        meeting = self._pattern.meeting(ends.left[-1], ends.right[0])
        splits = self._splits(meeting)
        if not meeting.are_apart or (splits is None and self.later_starts_matter):
            return False
        return splits or [ends]

    def _splits(self, meeting: Meeting) -> bool | None:
        """Return whether it splits there; ``None``: the text before and after decides."""
        match self._behavior:
            case "Isolated" | "Removed":
                sides = {meeting.left, meeting.right}
                return True if True in sides else None if None in sides else False
            case "Contiguous":
                is_known = meeting.left is not None and meeting.right is not None
                return meeting.left != meeting.right if is_known else None
            case "MergedWithPrevious":
                return meeting.right if self._is_inverted else meeting.left
            case _:
                return meeting.left if self._is_inverted else meeting.right


class Neighbours(Part):
    """Splits between two characters or not, whatever other characters there are."""

    def __init__(self, split: Callable[[str], list[tuple[str, tuple[int, int]]]]) -> None:
        self._split = split

    def __call__(self, ends: Ends) -> Verdict:
        pieces = self._split(ends.left[-1] + ends.right[0])
        # Without a piece, both characters are dropped.
        return not pieces or any(1 in places for _, places in pieces) or [ends]


class Scripts(Neighbours):
    """Splits where the script changes."""

    starts_matter = True

    def __call__(self, ends: Ends) -> Verdict:
        # A space has the script of the text before it.
        return super().__call__(ends) if self._split(ends.left[-1]) else False


class Metaspace(EachCharacter):
    """Replaces spaces, and splits before the replacement."""

    def __init__(self, replacement: str, prepend_scheme: str, split: bool) -> None:
        super().__init__(lambda text: text.replace(" ", replacement))
        self._splits_before = replacement if split else None
        self.starts_matter = prepend_scheme == "always"

    def __call__(self, ends: Ends) -> Verdict:
        return self._change(ends.right[0]) == self._splits_before or super().__call__(ends)


class Merges(Part):
    """Joins characters in steps to the entries of a vocabulary, which is BPE.

    Args:
        joined: for each merge, the last character of its first part and the first of its second.
        known: the characters that are in the vocabulary; ``None``: all are spelled with bytes.
    """

    def __init__(self, joined: set[tuple[str, str]], known: set[str] | None) -> None:
        self._joined, self._known = joined, known

    def __call__(self, ends: Ends) -> Verdict:
        left, right = ends.left[-1], ends.right[0]
        is_known = self._known is None or (left in self._known and right in self._known)
        return is_known and (left, right) not in self._joined


def starts_afresh(_before: str, character: str) -> bool:
    """Return whether no normal form combines a character with the one before it."""
    return _starts(character)


@lru_cache(1 << 16)
def _starts(character: str) -> bool:
    first = unicodedata.normalize("NFKD", character)[0]
    # Vowels and final consonants of Hangul combine, although they are no marks. A character that
    # this release of Unicode lacks may be a mark to the tokenizer.
    return (
        not 0x1160 <= ord(first) < 0x1200
        and unicodedata.category(first) not in ("Mn", "Mc", "Me", "Cn")
        and not unicodedata.combining(first)
    )


def are_graphemes(before: str, character: str) -> bool:
    """Return whether two neighbours are also never one character to a reader (a grapheme)."""
    if not starts_afresh(before, character) or before + character == "\r\n":
        return False
    kind, next_kind = unicodedata.category(before), unicodedata.category(character)
    # Signs before numbers, and letters of Malayalam and of further scripts of India, belong to the
    # next character.
    if kind in ("Cf", "Cn", "Co") or before == "\u0d4e":
        return False
    if kind == "Lo" and 0x10000 <= ord(before) < 0x20000:
        return False
    if before.isascii() or character.isascii() or next_kind[0] == "P":
        return next_kind not in ("Cf", "Sk", "So") or character.isascii()
    # In some scripts of India a mark joins two letters, and so do parts of syllables in Korea.
    is_initial = 0x1100 <= ord(before) < 0x1160 or 0xA960 <= ord(before) < 0xA980
    is_later = 0xD7B0 <= ord(character) < 0xD800
    return next_kind[0] in "LN" and kind[0] != "M" and not is_initial and not is_later


def read_parts(spec: Spec) -> tuple[list[Part], Callable[[str, str], bool]]:
    """Read the JSON of a tokenizer.

    Return its parts, and what tells whether two neighbours never combine.

    Raises: NotUnderstood
    """
    _check(spec, "tokenizer", _TOKENIZER)
    normalizers = _flatten(spec["normalizer"], "normalizers", _NORMALIZERS)
    pre_tokenizers = _flatten(spec["pre_tokenizer"], "pretokenizers", _PRE_TOKENIZERS)
    has_graphemes = any(each["type"] == "Precompiled" for each in normalizers)
    first = list(map(_normalizer, normalizers))
    second = [part for each in pre_tokenizers for part in _pre_tokenizer(each)]
    tokens = spec["added_tokens"]
    for token in tokens:
        _check(token, "added token", _ADDED_TOKEN)
    normalize = library_part("normalizer", spec["normalizer"]).normalize_str if first else str
    raw = [token for token in tokens if not token["normalized"]]
    changed = [token for token in tokens if token["normalized"]]
    parts = [
        AddedTokens(raw, [token["content"] for token in raw]),
        *first,
        AddedTokens(changed, [normalize(token["content"]) for token in changed]),
        *second,
        _model(spec["model"]),
    ]
    return in_order(parts), are_graphemes if has_graphemes else starts_afresh


def in_order(parts: list[Part]) -> list[Part]:
    """Tell each part of a tokenizer what the parts after it do, and return the parts."""
    matter = False
    for part in reversed(parts):
        part.later_starts_matter = matter
        matter = matter or part.starts_matter
    return parts


def read_affixes(spec: Spec) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and after a text.

    Raises: NotUnderstood
    """
    parts = _flatten(spec["post_processor"], "processors", _POST_PROCESSORS)
    found = [affixes for each in parts if any(affixes := _affixes(each))]
    if len(found) > 1:
        raise NotUnderstood("several parts that add special tokens")
    return found[0] if found else ([], [])


def library_part(kind: str, spec: Spec | None) -> Any:
    """Make a part by itself with the library of the tokenizer."""
    from tokenizers import Tokenizer

    others = dict.fromkeys(_TOKENIZER - {"version", "added_tokens"})
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    whole = {**others, "version": "1.0", "added_tokens": [], "model": model, kind: spec}
    return getattr(Tokenizer.from_str(json.dumps(whole)), kind)


def library_engine(expression: str) -> Callable[[str], Any]:
    """Compile an expression for one character, as the library does."""
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
    if spec["type"] not in known:
        raise NotUnderstood(f"the part {spec['type']!r}")
    _check(spec, spec["type"], known[spec["type"]])
    return [spec]


# The options of each part.
_NORMALIZERS: dict[str, set[str]] = {
    "NFC": set(),
    "NFD": set(),
    "NFKC": set(),
    "NFKD": set(),
    "BertNormalizer": {"clean_text", "handle_chinese_chars", "strip_accents", "lowercase"},
    "Precompiled": {"precompiled_charsmap"},
    "Lowercase": set(),
    "StripAccents": set(),
    "Nmt": set(),
    "ByteLevel": set(),
    "Replace": {"pattern", "content"},
    "Prepend": {"prepend"},
    "Strip": {"strip_left", "strip_right"},
}
_PRE_TOKENIZERS: dict[str, set[str]] = {
    "BertPreTokenizer": set(),
    "ByteLevel": {"add_prefix_space", "trim_offsets", "use_regex"},
    "CharDelimiterSplit": {"delimiter"},
    "Digits": {"individual_digits"},
    "FixedLength": {"length"},
    "Metaspace": {"replacement", "prepend_scheme", "split"},
    "Punctuation": {"behavior"},
    "Split": {"pattern", "behavior", "invert"},
    "UnicodeScripts": set(),
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
# They add tokens before and after a text, and change none of its own.
_POST_PROCESSORS: dict[str, set[str]] = {
    "BertProcessing": {"sep", "cls"},
    "RobertaProcessing": {"sep", "cls", "trim_offsets", "add_prefix_space"},
    "ByteLevel": {"add_prefix_space", "trim_offsets", "use_regex"},
    "TemplateProcessing": {"single", "pair", "special_tokens"},
}
_TOKENIZER = {
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
    "post_processor", "decoder", "model",
}  # fmt: skip
_ADDED_TOKEN = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}


def _normalizer(spec: Spec) -> Part:
    match spec["type"]:
        case "Prepend":
            return Beginning()
        case "Strip":
            return Strip()
        case "Replace":
            pattern = _expression(spec["pattern"])
            if not pattern.is_one_character:
                return Replace(pattern, spec["content"])
        case _:
            pass
    change = library_part("normalizer", spec).normalize_str
    match spec["type"]:
        case "NFC" | "NFD" | "NFKC" | "NFKD" | "BertNormalizer":
            return Combining(change, starts_afresh)
        case "Precompiled":
            return Combining(change, are_graphemes)
        case _:
            return EachCharacter(change)


def _pre_tokenizer(spec: Spec) -> list[Part]:
    match spec["type"]:
        case "FixedLength":
            return [Unknown()]
        case "Metaspace":
            return [Metaspace(spec["replacement"], spec["prepend_scheme"], spec["split"])]
        case "Split":
            pattern = _expression(spec["pattern"])
            return [Split(pattern, spec["behavior"], spec["invert"])]
        case "ByteLevel":
            spelled = library_part("normalizer", {"type": "ByteLevel"}).normalize_str
            parts: list[Part] = [Beginning()] if spec["add_prefix_space"] else []
            if spec["use_regex"]:
                parts.append(Split(_pattern(_GPT2), "Isolated"))
            return [*parts, EachCharacter(spelled)]
        case kind:
            split = library_part("pre_tokenizer", spec).pre_tokenize_str
            return [(Scripts if kind == "UnicodeScripts" else Neighbours)(split)]


def _expression(pattern: Spec) -> SplitPattern:
    """Read a pattern: an expression, or a text that is one when it is escaped."""
    ((kind, text),) = pattern.items()
    if kind == "String":
        text = "".join(map(escaped, text))
    return _pattern(text)


@lru_cache(32)
def _pattern(expression: str) -> SplitPattern:
    return SplitPattern(expression, library_engine)


def _model(spec: Spec) -> Part:
    kind = spec["type"]
    if kind not in _MODELS:
        raise NotUnderstood(f"the model {kind!r}")
    _check(spec, kind, _MODELS[kind])
    if spec.get("dropout"):
        raise NotUnderstood("a random model")
    # The other models look at whole pieces, and so do these options.
    whole = ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if kind != "BPE" or any(map(spec.get, whole)):
        return Unknown()
    vocabulary: set[str] = {*spec["vocab"]}
    merges = [each.split(" ") if isinstance(each, str) else each for each in spec["merges"]]
    joined = {(left[-1], right[0]) for left, right in merges}
    if not (spec["byte_fallback"] and vocabulary >= _BYTE_TOKENS):
        # Characters that are unknown may be left out, or joined to one token.
        return Merges(joined, {entry for entry in vocabulary if len(entry) == 1})
    has_merged_bytes = not _BYTE_TOKENS.isdisjoint(itertools.chain.from_iterable(merges))
    return Unknown() if has_merged_bytes else Merges(joined, None)


def _affixes(spec: Spec) -> tuple[list[int], list[int]]:
    """Return the tokens that a part adds before and after a text."""
    match spec["type"]:
        case "ByteLevel":
            return [], []
        case "TemplateProcessing":
            tokens = {name: each["ids"] for name, each in spec["special_tokens"].items()}
            items = [each.get("SpecialToken", {}).get("id") for each in spec["single"]]
            texts = [each["Sequence"]["id"] for each in spec["single"] if "Sequence" in each]
            if texts != ["A"]:
                raise NotUnderstood("a template that has not exactly one text")
            middle = items.index(None)
            sides = items[:middle], items[middle + 1 :]
            before, after = ([token for name in side for token in tokens[name]] for side in sides)
            return before, after
        case _:
            return [spec["cls"][1]], [spec["sep"][1]]
