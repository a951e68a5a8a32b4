"""Test that a candidate's tokens are those of the text after its context, for any tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flashmoa_sglang.cpu import torchvision_ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashmoa.scoring import CandidateRefused
from flashmoa.scoring.candidates import CandidateTokenizer

torchvision_ops.allow_mismatched_build()

from transformers import AutoTokenizer  # noqa: E402

from tests.unit.plugin.test_token_buffer import byte_level_with_pattern, sentencepiece_like  # noqa: E402

pytestmark = pytest.mark.anyio

PIECES = [
    " the", " Nepal", "al", " lake", "Answer:", "\n", "\n\n", " ", "  ", ".", "12", "3", "é", "中",
    "<|im_start|>", "assistant", "🙂", "Yes", "No", "A", "'s", "\t",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join)
candidates = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)


class TokenizingEngine:
    """An engine that only tokenises, and counts the requests to do so."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.count = 0

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        self.count += 1
        encode = self.tokenizer.encode
        return [encode(one, add_special_tokens=add_special_tokens) for one in texts]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


def real(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(
    scope="module",
    params=[real, lambda _: byte_level_with_pattern(), lambda _: sentencepiece_like()],
    ids=["served", "llama 3", "llama 2"],
)
def engine(request: pytest.FixtureRequest, model: Path) -> TokenizingEngine:
    make: Callable[[Path], Any] = request.param
    return TokenizingEngine(make(model))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(context=texts, candidate=candidates)
async def test_candidate_is_tokenised_as_after_its_context_or_refused(
    engine: TokenizingEngine, context: str, candidate: str
) -> None:
    before = engine.tokenizer.encode(context)
    whole = engine.tokenizer.encode(context + candidate)
    try:
        (found,) = await CandidateTokenizer(engine).tokenize(before, [candidate])
    except CandidateRefused as refused:
        joins = whole[: len(before)] != before
        assert joins or "give candidates as token ids" in str(refused)
        return
    assert [*before, *found] == whole


async def test_ordinary_candidates_are_never_refused(engine: TokenizingEngine) -> None:
    for context in ("Is it good?\nAnswer:", "<|im_start|>assistant\n", "One two", "Hi"):
        before = engine.tokenizer.encode(context)
        given = ["Yes", "No"] if context.endswith("\n") else [" Yes", " No"]
        found = await CandidateTokenizer(engine).tokenize(before, given)
        for candidate, tokens in zip(given, found, strict=True):
            assert [*before, *tokens] == engine.tokenizer.encode(context + candidate)


async def test_contexts_that_end_alike_are_tokenised_once(engine: TokenizingEngine) -> None:
    tokenizer, encode = CandidateTokenizer(engine), engine.tokenizer.encode
    ending = " Is it good? Please say so. Say it in one word.\nAnswer:"
    first = await tokenizer.tokenize(encode("One" + ending), [" Yes", " No"])
    requests = engine.count
    again = await tokenizer.tokenize(encode("Another" + ending), [" No", " Yes", [5]])
    assert engine.count == requests
    assert again == [*reversed(first), [5]]
