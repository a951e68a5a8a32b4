"""The plugin's routes with a fake engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http import bodies  # noqa: E402
from flashmoa_sglang.http.api import Api  # noqa: E402
from flashmoa_sglang.http.bodies import PromptReader  # noqa: E402
from flashmoa_sglang.http.errors import PromptTooLarge  # noqa: E402


def test_a_text_that_is_certainly_too_long_is_refused_by_its_characters() -> None:
    engine: Any = SimpleNamespace(max_prompt_tokens=10, tokenizer=SimpleNamespace(prefix=[]))
    renderer: Any = None
    message = "has 31 characters; this server takes at most 10 tokens"
    with pytest.raises(PromptTooLarge, match=message):
        PromptReader(engine, renderer, 3).tokenize(bodies.Prompt(text="a" * 31))


@pytest.mark.parametrize("packs_items", [False, True])
def test_an_engine_whose_score_route_is_sglangs_does_not_say_that_it_scores(
    packs_items: bool,
) -> None:
    engine: Any = SimpleNamespace(
        role="null",
        packs_items=packs_items,
        has_radix_cache=False,
        tokenizer=None,
        max_prompt_tokens=10,
    )
    table: Any = SimpleNamespace(limits=SimpleNamespace(characters_per_token=3))
    renderer: Any = None
    capabilities = Api(engine, table, renderer)._capabilities()
    assert ("scoring" in capabilities) == (not packs_items)
