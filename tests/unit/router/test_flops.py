"""Test the cost of prefill work against sums over tokens, and against known models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.flops import Measure, UnknownShape, true_flops
from tests.unit.router.support import FLOPS, MEASURES, blocks, place, policy

QWEN3_8B = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
}
QWEN3_235B = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@given(start=st.integers(0, 40), more=st.integers(0, 40))
def test_flops_are_those_of_each_token_and_each_pair(start: int, more: int) -> None:
    naive = 0
    for token in range(start, start + more):
        naive += 7 + 3 * (token + 1) + 2 * min(token + 1, 5)
    assert FLOPS.work(start, start + more) == naive


@given(measure=MEASURES, cuts=st.lists(st.integers(0, 100_000), min_size=3, max_size=3))
def test_work_adds_up_exactly(measure: Measure, cuts: list[int]) -> None:
    a, b, c = sorted(cuts)
    assert measure.work(a, b) + measure.work(b, c) == measure.work(a, c)
    assert measure.work(c, a) == 0


def test_ten_siblings_cost_one_prefix_and_ten_suffixes() -> None:
    routing = policy(1, FLOPS, None)
    for number in range(10):
        place(routing, str(number), blocks([1] * 100 + [2 + number] * 20))
    assert routing.engines["e0"].load.total == FLOPS.work(0, 100) + 10 * FLOPS.work(100, 120)


def test_flops_of_known_models_are_twice_their_parameters() -> None:
    dense = true_flops(QWEN3_8B)
    # Its model card says 6.95 billion parameters without embeddings.
    assert dense.linear / 2 == pytest.approx(6.95e9, rel=0.002)
    assert dense.pair == 36 * 4 * 32 * 128
    sparse = true_flops({"text_config": QWEN3_235B})
    # 22 billion parameters are active, 1.24 billion of them in the two vocabulary matrices.
    assert sparse.linear / 2 == pytest.approx(22e9 - 1.24e9, rel=0.02)
    windowed = true_flops(
        QWEN3_8B
        | {"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128}
    )
    assert windowed.pair == windowed.window_pair == dense.pair // 2


def test_flops_include_latent_attention_and_shared_experts() -> None:
    config = {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
    }  # fmt: skip
    # 37 billion of DeepSeek-V3's are active, 1.85 billion of them in two vocabulary matrices.
    assert true_flops(config).linear / 2 == pytest.approx(37e9 - 1.85e9, rel=0.04)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers"),
        (QWEN3_8B | {"hidden_size": "big"}, "hidden_size"),
        (QWEN3_8B | {"layer_types": ["linear_attention"] * 36}, "layer_types"),
        ({k: v for k, v in QWEN3_8B.items() if k != "intermediate_size"}, "intermediate_size"),
    ],
)
def test_unknown_shape_names_the_missing_field(config: dict[str, int], message: str) -> None:
    with pytest.raises(UnknownShape, match=message):
        true_flops(config)
