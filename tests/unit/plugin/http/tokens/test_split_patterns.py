"""The engines find matches where the plugin says that matches can be."""

import sys
import unicodedata

import pytest
from flashmoa_sglang.http.tokens import split_patterns
from flashmoa_sglang.http.tokens.expressions import NotUnderstood
from flashmoa_sglang.http.tokens.split_patterns import SplitPattern
from flashmoa_sglang.http.tokens.tokenizer_parts import library_engine
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

Match = tuple[int, int]
CLASSES = [
    "a", "b", "1", " ", "-", r"\n", r"\s", r"\S", r"\w", r"\p{L}", r"\p{N}", "[ab]", "[^a]", ".",
    r"[^\s\p{L}\p{N}]", r"[a1\n]", r"[\p{L}&&[^b]]", "(?i:a)", "(?i:[sk])",
]  # fmt: skip
one_character = st.sampled_from(CLASSES)
repeated = st.builds(
    "{}{}".format,
    one_character,
    st.sampled_from(["*", "+", "?", "{1,3}", "{2}", "{2,}", "++", "*+", "?+"]),
)
parts = st.recursive(
    st.one_of(one_character, one_character, repeated, st.just("$")),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{1,2}"])),
        st.builds("(?={})".format, inner),
        st.builds("(?!{})".format, inner),
    ),
    max_leaves=5,
)
alternatives = st.one_of(
    st.builds("{}{}".format, parts, one_character),
    st.builds("{}{}".format, one_character, parts),
    st.builds("{}+".format, one_character),
    repeated,
)
expressions = st.lists(alternatives, min_size=1, max_size=4).map("|".join)
texts = st.text("ab1 \n-é文²Sſ\u212a", min_size=2, max_size=9)


def find(expression: str, text: str) -> list[Match]:
    split = pre_tokenizers.Split(Regex(expression), "removed", invert=True)
    return [place for _, place in split.pre_tokenize_str(text)]


def check(pattern: SplitPattern, expression: str, text: str) -> None:
    """Check all that a pattern says of the matches in a text, at each place."""
    matches = find(expression, text)
    for place in range(1, len(text)):
        meeting = pattern.meeting(text[place - 1], text[place])
        if not meeting.are_apart:
            continue
        assert not any(start < place < end for start, end in matches)
        assert find(expression, text[:place]) == [each for each in matches if each[1] <= place]
        rest = find(expression, text[place - 1 :])
        shifted = [(start + place - 1, end + place - 1) for start, end in rest]
        assert [each for each in shifted if each[0] >= place] == [
            each for each in matches if each[0] >= place
        ]
        if meeting.are_matched:
            assert any(start <= place <= end for start, end in matches)


@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
@given(expression=expressions, data=st.data())
def test_what_is_said_of_matches_is_so(expression: str, data: st.DataObject) -> None:
    few = "".join(map(chr, range(1, 0x250))) + "文²ſ\u212a\u0301"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_patterns, "_usual_characters", lambda: few)
        try:
            find(expression, "a")
            pattern = SplitPattern(expression, library_engine)
        except Exception as error:
            # The library refuses some.
            if type(error) not in (Exception, NotUnderstood):
                raise
            reject()
        for text in data.draw(st.lists(texts, min_size=5, max_size=10)):
            check(pattern, expression, text)


# Of Qwen, gpt-oss, DeepSeek's first models and V3, BLOOM, and Kimi.
REAL = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-Ჺᴀ-ᴫᵫ-ᵷ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"[一-龥ࠀ-一가-퟿]+",
    r"[一-龥\u3040-\u309f゠-ヿ]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[\p{Han}]+|[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}",
]


@pytest.mark.parametrize("expression", REAL)
def test_the_classes_of_every_character_are_known(expression: str) -> None:
    pattern = SplitPattern(expression, library_engine)
    every = [
        character
        for character in map(chr, range(1, sys.maxunicode + 1))
        if unicodedata.category(character) not in ("Cn", "Co", "Cs")
    ]
    assert pattern.masks_of("".join(every)) <= pattern.masks


@pytest.mark.parametrize(
    ("expression", "where"),
    [
        ("a*", "matches an empty text"),
        ("(a", "at 2"),
        ("a)", "at 1"),
        (r"(a)\1", "at 5"),
        ("(?>ab)c", "at 1"),
        ("(?<=a)c", "at 1"),
        ("^a", "at 0"),
        (r"\ba", "at 2"),
        ("a+?", "at 3"),
        ("(?:ab)++", "at 8"),
        ("a{1,3}+", "at 7"),
        ("a{1,99999}", "too large"),
        ("a**", "at 3"),
        ("*a", "at 0"),
        ("[]a]", "at 1"),
        ("[a", "at 2"),
        (r"\Ga", "at 2"),
        (r"\Za", "at 2"),
        (r"\X", "at 2"),
        (r"[\x{3040}-\x{309f}]", "at 1"),
        (r"(?i:\p{Lu})", "at 10"),
        ("(?i:[^a])", "at 8"),
        ("(?i:fi)", "at 7"),
        ("(?i:é)", "at 6"),
        ("(?x:a b)", "at 1"),
        ("(?:" * 5 + "a|b(?=a+)(?=b+)(?=c+)(?=d+)(?=e+)" + ")" * 5, "too many conditions"),
    ],
)
def test_what_is_not_understood_is_refused(expression: str, where: str) -> None:
    with pytest.raises(NotUnderstood, match=where):
        SplitPattern(expression, library_engine)
