"""How ``--flashmoa-asyncep h2d`` divides a GPU's memory, by arithmetic. No GPU has run it yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flashmoa_sglang.asyncep.memory_plan import CONTEXT, ModelSizes, Plan, make_plan
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]
# MiB of memory that nvidia-smi shows.
GPUS = {"H100": 81559, "H200": 143771}
QWEN3_30B: dict[str, Any] = json.loads(
    (ROOT / "examples/models/qwen3-30b-a3b/config.json").read_text()
)
QWEN3_235B = QWEN3_30B | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MODELS = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-30B-A3B-FP8": QWEN3_30B | FP8,
    "Qwen3-235B-A22B": QWEN3_235B,
    "Qwen3-235B-A22B-FP8": QWEN3_235B | FP8,
}


def plan_for(gpu: str, model: str, **given: Any) -> Plan:
    return make_plan(ModelSizes.read(MODELS[model]), GPUS[gpu] << 20, **given)


@pytest.mark.parametrize(
    ("gpu", "model", "forward", "fraction"),
    [
        ("H100", "Qwen3-30B-A3B", 131_072, 0.77),
        ("H100", "Qwen3-30B-A3B-FP8", 131_072, 0.75),
        ("H100", "Qwen3-235B-A22B", 65_536, 0.77),
        ("H100", "Qwen3-235B-A22B-FP8", 65_536, 0.75),
        ("H200", "Qwen3-30B-A3B", 131_072, 0.87),
        ("H200", "Qwen3-30B-A3B-FP8", 131_072, 0.86),
        ("H200", "Qwen3-235B-A22B", 131_072, 0.75),
        ("H200", "Qwen3-235B-A22B-FP8", 131_072, 0.73),
    ],
)
def test_the_longest_forward_that_fits_is_chosen(
    gpu: str, model: str, forward: int, fraction: float
) -> None:
    plan = plan_for(gpu, model)
    assert (plan.slots, plan.forward, plan.fraction) == (2, forward, fraction)


@pytest.mark.parametrize(
    ("model", "parameters", "host"),
    [
        ("Qwen3-30B-A3B", 30.5e9, 57e9),
        ("Qwen3-30B-A3B-FP8", 30.5e9, 28.4e9),
        ("Qwen3-235B-A22B", 235.1e9, 449e9),
        ("Qwen3-235B-A22B-FP8", 235.1e9, 225e9),
    ],
)
def test_the_weights_are_those_of_the_model(model: str, parameters: float, host: float) -> None:
    sizes = ModelSizes.read(MODELS[model])
    embeddings = 2 * sizes.vocabulary * sizes.hidden
    linear = sizes.layers * sizes.expert_bytes + sizes.other_bytes - 2 * embeddings
    counted = linear / (1 if sizes.fp8 else 2) + embeddings
    assert counted == pytest.approx(parameters, rel=0.005)
    assert sizes.copied_bytes == pytest.approx(host, rel=0.01)


@given(free=st.integers(8 << 30, 300 << 30), model=st.sampled_from(list(MODELS)))
def test_a_plan_fits_into_the_memory(free: int, model: str) -> None:
    sizes = ModelSizes.read(MODELS[model])
    try:
        plan = make_plan(sizes, free)
    except ValueError as error:
        assert "do not fit" in str(error)
        return
    kv = plan.pool * sizes.kv_bytes_per_token
    assert CONTEXT + plan.weights + kv + plan.left <= free
    assert plan.left >= 1.5 * plan.peak
    assert plan.pool >= 2 * plan.forward
    assert 0 < plan.fraction < 1


@given(free=st.integers(8 << 30, 300 << 30), more=st.integers(0, 100 << 30))
def test_more_memory_never_shortens_forwards(free: int, more: int) -> None:
    sizes = ModelSizes.read(QWEN3_235B)
    try:
        plan = make_plan(sizes, free)
    except ValueError:
        return
    larger = make_plan(sizes, free + more)
    assert (larger.slots, larger.forward) >= (plan.slots, plan.forward)


def test_a_second_slot_is_given_up_where_two_do_not_fit() -> None:
    sizes = ModelSizes.read(QWEN3_235B)
    plan = make_plan(sizes, 36 << 30)
    assert (plan.slots, plan.forward) == (1, 8_192)


def test_what_the_user_gives_is_kept() -> None:
    plan = plan_for("H200", "Qwen3-30B-A3B", forward=100_000, fraction=0.6, slots=4)
    assert (plan.forward, plan.fraction, plan.slots) == (100_000, 0.6, 4)
    # With less for forwards than the longest one needs, a shorter one is chosen.
    plan = plan_for("H100", "Qwen3-30B-A3B", fraction=0.85)
    assert (plan.forward, plan.fraction) == (65_536, 0.85)
    # A forward as long as the user wants need not leave room for a second one.
    plan = plan_for("H100", "Qwen3-235B-A22B-FP8", forward=131_072)
    assert 131_072 <= plan.pool < 2 * 131_072


@pytest.mark.parametrize(
    ("given_by_user", "problem"),
    [
        (
            {"forward": 1 << 20},
            "forwards of 1048576 tokens do not fit: by --mem-fraction-static 0.0",
        ),
        ({"slots": 40}, "are for weights (199.4 GiB) and KV (2.9 GiB at least)"),
        ({"fraction": 0.99}, "0.8 GiB for the tensors of a forward (4.0 GiB)"),
        ({"fraction": 0.1}, "by --mem-fraction-static 0.1, 7.8 GiB are for weights"),
    ],
)
def test_what_does_not_fit_is_named(given_by_user: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        plan_for("H100", "Qwen3-235B-A22B", **given_by_user)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not known (known: mixtral, "),
        ({"mlp_only_layers": [0]}, "some layers have no experts"),
        ({"decoder_sparse_step": 2}, "some layers have no experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not known"),
    ],
)
def test_models_whose_memory_is_not_known_are_refused(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError) as refused:
        ModelSizes.read(QWEN3_30B | changed)
    assert problem in str(refused.value)


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.json has no hidden_size, moe_intermediate_size"):
        ModelSizes.read({"model_type": "qwen3_moe", "vocab_size": 8})


def test_a_dense_model_has_no_plan() -> None:
    dense = {key: value for key, value in QWEN3_30B.items() if "expert" not in key}
    with pytest.raises(ValueError, match="the model has no experts"):
        make_plan(ModelSizes.read(dense | {"model_type": "qwen3"}), 80 << 30)


def test_the_quantization_of_the_command_line_counts() -> None:
    assert ModelSizes.read(QWEN3_30B, "fp8") == ModelSizes.read(QWEN3_30B | FP8)


def test_the_table_of_the_documentation_is_computed() -> None:
    documented = (ROOT / "docs" / "asyncep.md").read_text().splitlines()
    rows = [row(gpu, model) for gpu in GPUS for model in MODELS]
    assert [line for line in documented if line.startswith(("| H100", "| H200"))] == rows


def test_the_table_of_replicas_in_the_documentation_is_computed() -> None:
    documented = (ROOT / "docs" / "asyncep.md").read_text().splitlines()
    rows = [
        row_of_replicas(model, replicas, on_device)
        for model in ("Qwen3-30B-A3B", "Qwen3-235B-A22B-FP8", "Qwen3-235B-A22B")
        for replicas in (2, 8)
        for on_device in (1.0, 0.5)
    ]
    assert [line for line in documented if line.startswith(("| 2 x", "| 8 x"))] == rows


def row_of_replicas(model: str, replicas: int, on_device: float) -> str:
    sizes = ModelSizes.read(MODELS[model])
    copied = sizes.copied_bytes
    cells: tuple[object, ...] = (
        f"{replicas} x H100",
        model,
        "d2d" if on_device == 1 else "hybrid",
        f"{copied * on_device / replicas / 1e9:.1f} GB",
    )
    try:
        plan = plan_for("H100", model, share=on_device / replicas)
    except ValueError:
        cells += ("does not fit", "", "", "", "")
    else:
        cells += (
            f"{plan.weights / 1e9:.1f} GB",
            f"{copied * (1 - on_device) / 1e9:.0f} GB",
            f"{plan.forward:,}",
            plan.fraction,
            f"{plan.pool // 1000:,},000 tokens",
        )
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |")


def test_a_share_takes_the_place_of_kv() -> None:
    sizes = ModelSizes.read(QWEN3_30B)
    alone, shared = (plan_for("H200", "Qwen3-30B-A3B", share=share) for share in (0.0, 0.5))
    assert shared.weights - alone.weights == sizes.copied_bytes // 2
    assert (shared.forward, shared.fraction) == (alone.forward, alone.fraction)
    kv = (alone.pool - shared.pool) * sizes.kv_bytes_per_token
    assert kv == pytest.approx(sizes.copied_bytes / 2, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_tensor_parallelism_have_all_weights_together(ranks: int) -> None:
    sizes = ModelSizes.read(QWEN3_235B)
    of_rank = sizes.of_rank(ranks)
    assert ranks * of_rank.copied_bytes == sizes.copied_bytes
    # Routers and norms, and with more ranks than heads of KV these, are on each of them.
    assert 0 < ranks * of_rank.other_bytes - sizes.other_bytes < 0.1 * ranks * sizes.other_bytes
    assert of_rank.kv_heads == max(1, 4 // ranks)


def row(gpu: str, model: str) -> str:
    plan = plan_for(gpu, model)
    cells = (
        gpu,
        model,
        plan.slots,
        f"{plan.weights / 1e9:.1f} GB",
        f"{ModelSizes.read(MODELS[model]).copied_bytes / 1e9:.0f} GB",
        f"{plan.forward:,}",
        f"{plan.peak / 2**30:.1f} GiB",
        plan.fraction,
        f"{plan.pool // 1000:,},000 tokens",
    )
    return f"| {' | '.join(map(str, cells))} |"
