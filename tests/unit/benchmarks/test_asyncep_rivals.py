"""Test the computed throughput of AsyncEP's rivals."""

from argparse import Namespace
from functools import cache
from typing import Any

import pytest
from flashmoa_bench.modelled_gpu.expert_parallelism import Division
from flashmoa_bench.modelled_gpu.gpu import Gpu, Model
from flashmoa_bench.prefill.asyncep_modelled import Throughput, check, find_gain
from flashmoa_bench.prefill.rivals import (
    DEEP_EP,
    IDEAL_PP,
    SHORT_PP,
    Rivals,
    forwards,
    makespan,
    tokens_of,
)
from hypothesis import given
from hypothesis import strategies as st


@given(prompt=st.integers(1, 200), tokens=st.integers(1, 200))
def test_forwards_compute_whole_prompts(prompt: int, tokens: int) -> None:
    each = forwards(prompt, tokens)
    compared = sum(
        one.prefills.tokens
        * (one.prefills.cached + one.prefills.tokens / one.prefills.requests / 2)
        for one in each
    )
    count, rest = divmod(tokens_of(each), prompt)
    assert rest == 0 and compared == pytest.approx(count * prompt**2 / 2)
    assert all(one.prefills.tokens <= tokens for one in each)
    assert len(each) == 1 or count == 1


@given(stages=st.integers(1, 8), chunks=st.lists(st.floats(0.1, 9), min_size=1, max_size=30))
def test_a_pipeline_waits_for_stages_and_for_chunks_in_flight(
    stages: int, chunks: list[float]
) -> None:
    found = makespan(chunks, stages)
    # Each stage computes all chunks, and no earlier than the chunk before it.
    assert found >= sum(chunks) + (stages - 1) * min(chunks[0], chunks[-1]) - 1e-9
    assert found <= stages * sum(chunks) + 1e-9
    equal = [chunks[0]] * len(chunks)
    assert makespan(equal, stages) == pytest.approx((len(equal) + stages - 1) * chunks[0])


def test_a_longer_chunk_leaves_bubbles_around_it() -> None:
    # The last chunk enters when the second has left, at 9. With more in flight it would end at 14.
    assert makespan([1, 4, 1, 4], 2) == 17


@cache
def rivals() -> Rivals:
    return Rivals(Gpu.load("h100_sxm"), Model.load("Qwen/Qwen3-30B-A3B"))


def test_pipelines_lose_by_their_bubbles_and_hops_only() -> None:
    alone = rivals().rate(Division.PP, 1, 4096, 8192)
    ideal, pipelined = (
        rivals().rate(way, 8, 32_768, 16_384) or 0 for way in (IDEAL_PP, Division.PP)
    )
    assert alone and 0 < pipelined < ideal < alone
    short, again = (rivals().rate(way, 8, 32_768, 8192) for way in (SHORT_PP, Division.PP))
    assert short is not None and short == again and short < pipelined
    assert rivals().rate(SHORT_PP, 8, 32_768, 16_384) is None


def test_every_way_but_the_pipelines_pays_for_communication() -> None:
    alone = rivals().rate(IDEAL_PP, 1, 4096, 16_384)
    assert alone is not None
    for way in (Division.DP_EP, Division.DP_TP, Division.TP_TP, Division.TP_EP):
        four, eight = (rivals().rate(way, gpus, 4096, 16_384) for gpus in (4, 8))
        assert four and eight and 0 < eight < alone and four < alone
    deep_ep = rivals().rate(DEEP_EP, 8, 4096, 16_384)
    assert deep_ep and deep_ep < alone
    assert rivals().rate(DEEP_EP, 4, 4096, 16_384) is None  # It was measured on eight GPUs.


def test_divisions_without_a_table_have_no_throughput() -> None:
    in_blocks = Rivals(Gpu.load("h100_sxm"), Model.load("Qwen/Qwen3-30B-A3B", "fp8_block"))
    assert in_blocks.rate(Division.TP_TP, 8, 4096, 8192) is None
    a100 = Rivals(Gpu.load("a100_sxm"), Model.load("Qwen/Qwen3-30B-A3B"))
    assert a100.rate(DEEP_EP, 8, 4096, 8192) is None


def test_a_gain_is_over_the_best_rival_that_exists() -> None:
    rates = {
        Division.H2D: 8.05, Division.HYBRID: 8.0, Division.D2D: 7.0, Division.DP_EP: 4.0,
        Division.PP: 5.0, SHORT_PP: 4.5, IDEAL_PP: 10.0,
    }  # fmt: skip
    rows = [Throughput(1024, 8, way, 0, None, rate, None) for way, rate in rates.items()]
    found = find_gain(rows, 1024)
    assert found is not None and (found.way, found.rival) == (Division.HYBRID, Division.PP)
    assert (found.gain, found.over_short, found.over_bound) == (1.6, pytest.approx(8 / 4.5), 0.8)
    assert find_gain(rows, 2048) is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, None),
        ({"device_tp": 2}, "leave --device-tp"),
        ({"device_model": ["a=b"]}, "give one --device-model"),
        ({"device": "own.json"}, "needs a GPU in NVIDIA's tables"),
    ],
)
def test_options_that_do_not_go_with_a_computation(given: dict[str, Any], problem: str) -> None:
    usual = {"device": "h100_sxm", "device_tp": 1, "device_slowdown": 1.0, "device_model": ["a"]}
    found = check(Namespace(**usual | given))
    assert found is None if problem is None else problem in (found or "")
