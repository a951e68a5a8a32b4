"""Test that a candidate's tokens are those of the text after its prompt, for any tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flashmoa_sglang.cpu import torchvision_ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http.errors import CandidateRefused  # noqa: E402
from flashmoa_sglang.http.scoring.candidates import CandidateTokenizer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.unit.plugin.test_token_buffer import byte_level_with_pattern, sentencepiece_like  # noqa: E402

PIECES = [
    " the", " Nepal", "al", " lake", "Answer:", "\n", "\n\n", " ", "  ", ".", "12", "3", "é", "中",
    "<|im_start|>", "assistant", "🙂", "Yes", "No", "A", "'s", "\t",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join)
candidates = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)


class CountingTokenizer:
    """Counts the texts that it tokenises, without the special tokens of whole prompts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.count = 0

    def encode(self, text: str) -> list[int]:
        self.count += 1
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def after(self) -> CandidateTokenizer:
        return CandidateTokenizer(lambda: self)  # type: ignore[arg-type, return-value]


def real(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(
    scope="module",
    params=[real, lambda _: byte_level_with_pattern(), lambda _: sentencepiece_like()],
    ids=["served", "llama 3", "llama 2"],
)
def tokenizer(request: pytest.FixtureRequest, model: Path) -> CountingTokenizer:
    make: Callable[[Path], Any] = request.param
    return CountingTokenizer(make(model))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompt=texts, candidate=candidates)
def test_candidate_is_tokenised_as_after_its_prompt_or_refused(
    tokenizer: CountingTokenizer, prompt: str, candidate: str
) -> None:
    before = tokenizer.tokenizer.encode(prompt)
    whole = tokenizer.tokenizer.encode(prompt + candidate)
    try:
        found = tokenizer.after().tokenize(before, candidate)
    except CandidateRefused as refused:
        joins = whole[: len(before)] != before
        assert joins or "give candidates as token ids" in str(refused)
        return
    assert [*before, *found] == whole


def test_ordinary_candidates_are_never_refused(tokenizer: CountingTokenizer) -> None:
    encode = tokenizer.tokenizer.encode
    for prompt in ("Is it good?\nAnswer:", "<|im_start|>assistant\n", "One two", "Hi"):
        for candidate in ["Yes", "No"] if prompt.endswith("\n") else [" Yes", " No"]:
            found = tokenizer.after().tokenize(encode(prompt), candidate)
            assert [*encode(prompt), *found] == encode(prompt + candidate)


def test_prompts_that_end_alike_are_tokenised_once(tokenizer: CountingTokenizer) -> None:
    after, encode = tokenizer.after(), tokenizer.tokenizer.encode
    ending = " Is it good? Please say so. Say it in one word.\nAnswer:"
    first = after.tokenize(encode("One" + ending), " Yes")
    count = tokenizer.count
    assert after.tokenize(encode("Another" + ending), " Yes") == first
    assert after.tokenize(encode("Another" + ending), [5]) == [5]
    assert tokenizer.count == count
