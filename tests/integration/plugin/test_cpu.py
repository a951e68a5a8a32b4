"""Engines on the CPU platform compute what the model computes with Hugging Face's code."""

from pathlib import Path
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from tests.integration.support import Words, generate


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[Any, Any]:
    from flashmoa_sglang.sglang import torchvision_ops

    torchvision_ops.allow_mismatched_build()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded, AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("length", [1, 7, 130, 900])
async def test_greedy_tokens_equal_hugging_face(
    client: EngineClient, words: Words, reference: tuple[Any, Any], length: int
) -> None:
    import torch

    loaded, tokenizer = reference
    text = words(length, 900 + length)
    ids = tokenizer.encode(text)
    out = loaded.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    expected = tokenizer.decode(out[0][len(ids) :])
    await client.flush_cache()
    cold, _ = await generate(client, text, 24)
    warm, usage = await generate(client, text, 24)
    assert cold == warm == expected
    assert usage.cached_tokens == length - 1
