"""Test the bytes that ways to divide experts copy and keep, against figures of two models."""

import pytest
from flashmoa_bench.modelled_gpu.expert_parallelism import (
    Division,
    LayerTraffic,
    layer_traffic,
    weight_bytes,
)
from flashmoa_bench.modelled_gpu.gpu import Model

QWEN3_235B = {
    "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B = QWEN3_235B | {
    "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "moe_intermediate_size": 768,
}  # fmt: skip
BF16 = Model("235B", QWEN3_235B)
FP8 = Model("235B", QWEN3_235B, "fp8_block")
SMALL = Model("30B", QWEN3_30B)
TOKENS, GPUS = 16_384, 8


@pytest.mark.parametrize(
    ("division", "large", "small"),
    [
        (Division.DP_DP, 0, 0),
        (Division.DP_TP, 1879, 940),
        (Division.DP_EP, 1879, 940),
        (Division.TP_TP, 470, 235),
        (Division.TP_EP, 470, 235),
        (Division.PP, 23, 22),
        (Division.D2D, 4228, 1057),
        (Division.H2D, 0, 0),
        (Division.HYBRID, 2114, 528),
        (Division.PAPERS_HYBRID, 4228, 1057),
    ],
)
def test_megabytes_from_other_gpus(division: Division, large: float, small: float) -> None:
    for model, expected in ((BF16, large), (SMALL, small)):
        found = layer_traffic(division, model, GPUS, TOKENS).peers
        assert found / 1e6 == pytest.approx(expected, abs=0.6)
    # Alone, a GPU receives nothing from others.
    assert layer_traffic(division, BF16, 1, TOKENS).peers == 0


@pytest.mark.parametrize(
    ("division", "part"),
    [(Division.H2D, 1), (Division.HYBRID, 0.75), (Division.PAPERS_HYBRID, 1 / 8)],
)
def test_only_offloading_copies_from_the_host(division: Division, part: float) -> None:
    found = layer_traffic(division, BF16, GPUS, TOKENS, on_device=0.25).host
    assert found == pytest.approx(part * 4.8318e9, rel=1e-4)
    offloading = {Division.H2D, Division.HYBRID, Division.PAPERS_HYBRID}
    for other in set(Division) - offloading:
        assert layer_traffic(other, BF16, GPUS, TOKENS).host == 0


def test_hybrid_lies_between_both_channels() -> None:
    everything = layer_traffic(Division.HYBRID, BF16, GPUS, TOKENS, on_device=1.0)
    assert everything == layer_traffic(Division.D2D, BF16, GPUS, TOKENS)
    nothing = layer_traffic(Division.HYBRID, BF16, GPUS, TOKENS, on_device=0.0)
    assert (
        nothing == layer_traffic(Division.H2D, BF16, GPUS, TOKENS) == LayerTraffic(0.0, 4831838208)
    )


@pytest.mark.parametrize(("model", "tokens"), [(BF16, 36_864), (FP8, 18_432), (SMALL, 18_432)])
def test_weights_are_fewer_bytes_above_the_break_even(model: Model, tokens: int) -> None:
    """AsyncEP is faster from far fewer tokens on: its copies overlap with the computation."""
    copied, sent = (
        layer_traffic(division, model, GPUS, tokens).peers
        for division in (Division.D2D, Division.DP_EP)
    )
    assert copied == sent


@pytest.mark.parametrize(
    ("division", "bf16", "fp8"),
    [
        (Division.DP_DP, 470.1, 236.3),
        (Division.DP_TP, 72.7, 37.6),
        (Division.DP_EP, 72.7, 37.6),
        (Division.TP_TP, 58.8, 29.5),
        (Division.TP_EP, 58.8, 29.5),
        (Division.PP, 58.8, 29.5),
        (Division.D2D, 86.6, 44.5),
        (Division.H2D, 30.4, 16.4),
        (Division.HYBRID, 58.5, 30.5),
        (Division.PAPERS_HYBRID, 32.2, 17.3),
    ],
)
def test_gigabytes_of_weights(division: Division, bf16: float, fp8: float) -> None:
    for model, expected in ((BF16, bf16), (FP8, fp8)):
        assert weight_bytes(division, model, GPUS) / 1e9 == pytest.approx(expected, abs=0.06)


def test_a_layers_experts_and_kv_have_the_models_sizes() -> None:
    assert [model.expert_bytes for model in (BF16, FP8, SMALL)] == [
        4_831_838_208, 2_415_919_104, 1_207_959_552
    ]  # fmt: skip
    assert [model.kv_bytes_per_token for model in (BF16, SMALL)] == [192_512, 98_304]
