"""Where text is certainly split follows from all parts of a tokenizer."""

import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
from flashmoa_sglang.http.tokens.expressions import NotUnderstood
from flashmoa_sglang.http.tokens.token_boundaries import Boundaries, read_tokenizer
from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer, TokenBuffer
from flashmoa_sglang.http.tokens.tokenizer_parts import read_parts, starts_afresh
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.conftest import GUIDE
from tests.unit.plugin.http.tokens import families
from tests.unit.plugin.http.tokens.families import canonical

# The names of usual boundaries, each with texts before and after a boundary.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "word": (("n", " n"), ("ы", " ы"), (".", " n")),
    "symbol": (("n", " -"), (",", ' "')),
    "line": (("n", "\nn"), ("文", "\n文")),
    "next line": (("\n", "no"), ("\n", "文文")),
    "end of word": (("n", ", "), ("ы", ". ")),
    "end of foreign word": (("文", "，文"), ("n", "。文")),
    "number after a letter": (("n", "1 "), ("文", "10")),
    "letter after a number": (("1", "n "), ("9", "文文")),
    "number after a symbol": (("-", "1 "), ("(", "10")),
}
ALL = list(KINDS)
# GPT-2's pattern looks at the character after white space.
WITHOUT_NEXT_LINE = [kind for kind in ALL if kind != "next line"]

# In the small vocabularies of tests, some words have an entry with their comma.
WITHOUT_END_OF_WORD = [kind for kind in ALL if kind != "end of word"]
# The usual boundaries of models' tokenizers.
KINDS_OF_MODELS = {
    **dict.fromkeys(("pattern", "llama", "o200k", "deepseek", "deepseek-like"), ALL),
    **dict.fromkeys(("smollm-like", "gpt-2", "falcon"), WITHOUT_NEXT_LINE),
    **dict.fromkeys(("sentencepiece", "mistral", "gemma"), WITHOUT_END_OF_WORD),
}


def check_boundaries(tokenizer: CanonicalTokenizer, text: str, every: int = 1) -> int:
    """Check that a text is split at boundaries. Return the number of boundaries."""
    places = [place for place in range(len(text)) if tokenizer.boundaries.holds_at(text, place)]
    whole = tokenizer.encode(text)
    for place in places[::every]:
        before = tokenizer.encode(text[:place])
        assert before + tokenizer.encode_between(text, place, len(text)) == whole
    return len(places)


def kinds_of(tokenizer: CanonicalTokenizer) -> list[str]:
    """Return the names of the usual boundaries that a tokenizer has."""
    holds_at = tokenizer.boundaries.holds_at
    return [
        name
        for name, sides in KINDS.items()
        if all(holds_at(left + right, len(left)) for left, right in sides)
    ]


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_tokenizers_of_models_have_their_kinds(name: str) -> None:
    assert kinds_of(canonical(name)) == KINDS_OF_MODELS[name]
    text = "".join(families.SCRIPTS.values()) + GUIDE.read_text()[:3000]
    assert check_boundaries(canonical(name), text, every=7) > 300


class OfXai:
    """A tokenizer like SGLang's ``TiktokenTokenizer``, which is not one of Hugging Face's."""

    __module__ = "sglang.srt.tokenizer.tiktoken_tokenizer"

    def __init__(self, expression: str) -> None:
        ranks = {bytes([byte]): byte for byte in range(256)}
        for number, pair in enumerate((b"th", b"the", b" a", b"12", b"123")):
            ranks[pair] = 256 + number
        special = {"<|separator|>": 300, "<|eos|>": 301}
        self.tokenizer = tiktoken.Encoding(
            "test", pat_str=expression, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        del add_special_tokens
        return self.tokenizer.encode(text, allowed_special="all", disallowed_special=())


# The expression of Ling, whose repetitions are possessive.
LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


class OfMistral(OfXai):
    """A tokenizer like transformers' ``MistralCommonBackend``, whose special tokens come first."""

    __module__ = "transformers.tokenization_mistral_common"

    def __init__(self, expression: str) -> None:
        super().__init__(expression)
        self.tokenizer = SimpleNamespace(model=SimpleNamespace(encoding=self.tokenizer))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        encoding = self.tokenizer.model.encoding
        return [1] * add_special_tokens + [token + 1000 for token in encoding.encode_ordinary(text)]


class OfMoonshot(OfXai):
    """A tokenizer that comes with a model, and cuts long texts and long words."""

    __module__ = "transformers_modules.tokenization"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        words = re.findall(r"\S{1,25000}|\s{1,25000}", text[:400_000])
        cuts = [word for word in words if len(word) == 25_000]
        if not cuts:
            return super().encode(text[:400_000]) + super().encode(text[400_000:])
        before, cut, after = text.partition(cuts[0])
        return super().encode(before + cut) + self.encode(after)


@pytest.mark.parametrize(
    ("wrapper", "expression"),
    [
        (OfXai, families.PATTERN),
        (OfXai, families.O200K),
        (OfXai, LING),
        (OfMistral, families.O200K),
        (OfMoonshot, families.PATTERN),
    ],
)
def test_tiktoken_has_the_kinds_of_its_expression(
    wrapper: Callable[[str], Any], expression: str
) -> None:
    tokenizer = CanonicalTokenizer(wrapper(expression))
    assert kinds_of(tokenizer) == ALL
    text = "".join(families.SCRIPTS.values()) + "the<|eos|>\n\n a<|separator|>  b 1234\r\n"
    assert check_boundaries(tokenizer, text)


def test_long_texts_of_a_models_own_code_are_encoded_whole() -> None:
    tokenizer = CanonicalTokenizer(OfMoonshot(families.PATTERN))
    for piece in ("the the 12 ", "the123"):
        buffer = TokenBuffer(tokenizer, add_special_tokens=False)
        text = "abcd " + piece * (500_000 // len(piece))
        for start in range(0, len(text), 90_000):
            buffer.append(text[start : start + 90_000])
            assert start > 20_000 or buffer.certain_tokens > 1000
        whole = tokenizer.encode(text)
        assert list(buffer.tokens) == whole[: len(buffer.tokens)]
        assert buffer.all_tokens() == whole == tokenizer.encode_from(text, 0)


@pytest.mark.parametrize(
    ("normalizer", "pieces"),
    [
        (normalizers.NFC(), ["Order a cafe\u0301 au", " lait now", ", please. "]),
        (normalizers.NFKC(), ["Order a ｃafé au", " lait now", ", please. "]),
        (normalizers.Lowercase(), ["Order a CAFÉ AU", " Lait now", ", please. "]),
        (normalizers.Replace("#", "é"), ["Order a caf# au", " lait now", ", please. "]),
    ],
)
def test_added_tokens_are_found_in_normalised_text(
    normalizer: normalizers.Normalizer, pieces: list[str]
) -> None:
    tokenizer = families.with_parts(families.smollm(), normalizer)
    tokenizer.add_tokens([AddedToken("café au lait", normalized=True)])
    canonical = CanonicalTokenizer(tokenizer)
    buffer = TokenBuffer(canonical, add_special_tokens=False)
    for piece in pieces:
        buffer.append(piece)
    added = tokenizer.convert_tokens_to_ids("café au lait")
    whole = tokenizer.encode("".join(pieces), add_special_tokens=False)
    assert added in whole
    assert list(buffer.tokens) == whole[: len(buffer.tokens)]
    assert buffer.all_tokens() == whole
    assert buffer.certain_tokens > 0


def of_pieces(steps: list[Any], splits: list[Any], tokens: list[AddedToken] | None = None) -> Any:
    """Make a tokenizer that has an entry for each piece of a text, so that each piece shows."""
    entries = ["<unk>", "a", "b", "ab", "e", "é", " ", "\u0301 ", "\u0301", " é", "aa", "aab", ".a"]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.add_tokens(tokens or [])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SPACES = pre_tokenizers.WhitespaceSplit()


def isolated(pattern: str | Regex) -> Any:
    return pre_tokenizers.Split(pattern, "isolated")


def test_an_added_token_may_end_before_an_accent() -> None:
    """The accent would be composed with the letter, if the letter were not a token."""
    tokenizer = of_pieces(
        [normalizers.NFC()], [isolated(Regex("[\u0301 ]+"))], [AddedToken("e", normalized=False)]
    )
    canonical, text = CanonicalTokenizer(tokenizer), "e\u0301 b"
    assert not canonical.boundaries.holds_at(text, 2)
    assert canonical.boundaries.holds_at(text, 1) is False
    assert canonical.boundaries.holds_at(f"{text} b", 3)


# These tokenizers join distant characters, or distant text decides how the next piece begins.
REFUSED: dict[str, Callable[[], Any]] = {
    # The character between a letter and its accent is dropped before the two are composed.
    "normal form after a change": lambda: of_pieces(
        [normalizers.Replace("\u0001", ""), normalizers.NFC()], [isolated(Regex("[ é]+"))]
    ),
    # Text after a place begins anew at its own beginning, and not so in the whole.
    "fixed length": lambda: of_pieces([], [pre_tokenizers.FixedLength(length=3), SPACES]),
    # Two full stops become an accent, which is composed with the letter before them.
    "long replacement": lambda: of_pieces([normalizers.Replace("..", "\u0301")], [SPACES]),
    # The letter is the beginning of a piece only if there are two spaces before it.
    "look back": lambda: of_pieces([], [isolated("  "), isolated(Regex("^aa|a"))]),
    "metaspace after a split": lambda: of_pieces(
        [], [isolated("  "), pre_tokenizers.Metaspace(split=False), isolated("b")]
    ),
    "bytes after a split": lambda: of_pieces(
        [], [isolated("  "), pre_tokenizers.ByteLevel(use_regex=False), isolated("b")]
    ),
    "single word": lambda: of_pieces([], [SPACES], [AddedToken("aa", single_word=True)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_that_join_distant_text_are_refused(name: str) -> None:
    canonical = CanonicalTokenizer(REFUSED[name]())
    assert not canonical.boundaries
    buffer, text = (
        TokenBuffer(canonical, add_special_tokens=False),
        "a e\u0001\u0301 b  aa ebaa.. aab",
    )
    for character in text:
        buffer.append(character)
        assert buffer.certain_tokens == 0
    assert buffer.all_tokens() == canonical.encode(text)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "normalizer": lambda spec: spec.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Transliterate"}]}
    ),
    # It replaces a letter of Malayalam and the space after it together, as one grapheme.
    "precompiled": lambda spec: spec.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": ""}
    ),
    "pre-tokenizer": lambda spec: spec.update(pre_tokenizer={"type": "Lines"}),
    "model": lambda spec: spec.update(model={"type": "Bytes"}),
    "option": lambda spec: spec["pre_tokenizer"]["pretokenizers"][0].update(lookahead=3),
    "step": lambda spec: spec.update(spell_checker=None),
    "dropout": lambda spec: spec["model"].update(dropout=0.1),
    "option of a token": lambda spec: spec["added_tokens"][0].update(regex=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_unknown_part_leaves_no_boundaries(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = families.smollm()
    backend = tokenizer.backend_tokenizer
    spec = json.loads(backend.to_str())
    read_parts(spec)
    CHANGES[change](spec)
    with pytest.raises(NotUnderstood):
        read_parts(spec)
    later = SimpleNamespace(
        backend_tokenizer=SimpleNamespace(
            model=backend.model, to_str=lambda: json.dumps(spec), encode=backend.encode
        )
    )
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    with caplog.at_level(logging.WARNING):
        assert not read_tokenizer(later, encode)
    assert "certain when they end" in caplog.text


class Own(PreTrainedTokenizerFast):
    """A tokenizer whose own code changes the text before its parts see it."""

    def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
        return super()._encode_plus(text.replace("\n\n", "\n"), *args, **options)


def test_a_tokenizer_with_its_own_code_has_no_boundaries(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Own(tokenizer_object=families.smollm().backend_tokenizer)
    with caplog.at_level(logging.WARNING):
        assert not CanonicalTokenizer(tokenizer).boundaries
    assert "Own changes text in its own way" in caplog.text


def test_an_added_token_that_normalising_empties_is_refused() -> None:
    tokens = [AddedToken(" ", normalized=True)]
    tokenizer = of_pieces([normalizers.Replace(" ", "")], [SPACES], tokens)
    with pytest.raises(NotUnderstood, match="is empty"):
        read_parts(json.loads(tokenizer.backend_tokenizer.to_str()))


def test_a_tokenizer_that_chooses_at_random_has_no_boundaries() -> None:
    tokenizer = families.unigram()
    if not hasattr(tokenizer.backend_tokenizer.model, "alpha"):
        pytest.skip("this release of tokenizers chooses no tokens at random")
    tokenizer.backend_tokenizer.model.alpha = 0.5
    assert not read_tokenizer(tokenizer, tokenizer.encode)


def test_long_texts_are_searched_from_their_ends_only() -> None:
    boundaries: Boundaries = canonical("smollm-like").boundaries
    text = "one two" + "n" * 3000
    assert boundaries.last(text, 0, len(text)) == 0
    assert boundaries.last(text, 0, 500) == 3


CHARACTERS = [
    character
    for character in map(chr, range(1, sys.maxunicode + 1))
    if unicodedata.category(character) not in ("Cn", "Cs", "Co")
]


def test_no_normal_form_joins_what_starts_afresh() -> None:
    """If two characters are composed to one, the second does not start afresh."""
    for character in CHARACTERS:
        first, *others = unicodedata.normalize("NFKD", character)
        if unicodedata.combining(first):
            assert not starts_afresh(character)
        for other in others:
            if unicodedata.normalize("NFC", first + other) != first + other:
                assert not starts_afresh(other), (character, other)
        # Syllables of Hangul are made of their parts one by one.
        whole = unicodedata.normalize("NFD", character)
        for place in range(1, len(whole)):
            joined = unicodedata.normalize("NFC", whole[:place] + whole[place])
            if len(joined) == 1:
                assert not starts_afresh(whole[place]), character


def test_what_is_a_space_to_the_library_is_one_here() -> None:
    pieces = pre_tokenizers.WhitespaceSplit().pre_tokenize_str("".join(CHARACTERS))
    kept = {*"".join(piece for piece, _ in pieces)}
    assert all(character.isspace() for character in {*CHARACTERS} - kept)
