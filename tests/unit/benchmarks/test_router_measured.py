"""Test the pure parts of ``flashmoa bench router-measured``, and the mixes of requests."""

import argparse
import random
from dataclasses import replace

import pytest
from flashmoa_bench.harness.routers import OUR_CASCADE, OURS
from flashmoa_bench.prefill.mix import LONGEST, MIXES, TABLE_2, Dataset, Mix
from flashmoa_bench.routing.measured import MeasuredCell, make_roles, summarise

from flashmoa.cli.router import _make_parser

OPTIONS = argparse.Namespace(
    mix="table-2",
    share=0.02,
    engines=3,
    concurrency=64,
    device="h200_sxm",
    device_slowdown=20.0,
    forward=4096,
    saturation=3000,
)


def test_each_engine_publishes_at_its_own_port() -> None:
    roles = make_roles(OPTIONS)
    assert [role.core for role in roles] == [0, 1, 0]
    assert len({role.arguments[-1] for role in roles}) == 3
    for role in roles:
        given = dict(zip(role.arguments[::2], role.arguments[1::2], strict=True))
        assert given["--chunked-prefill-size"] == given["--max-prefill-tokens"] == "4096"
        assert given["--flashmoa-saturation"] == "3000"
        assert float(given["--flashmoa-saturation-wait"]) == 20 * 0.2


def test_routers_are_compared_by_seed() -> None:
    in_turn = MeasuredCell("round_robin", 0, 4.0, 1000, 500, 250, 0.5, 1.0)
    other_seed = replace(in_turn, seed=1, seconds=8.0)
    ours = [replace(in_turn, router=OURS, seed=seed, seconds=2.0) for seed in (0, 1, 2)]
    first, last = summarise([*ours, in_turn, other_seed], ["round_robin", OURS])
    assert (first.router, first.gain, first.seeds) == ("round_robin", 1.0, 2)
    # The third seed has nothing to be compared with.
    assert (last.router, last.gain, last.least, last.most) == (OURS, 3.0, 2.0, 4.0)
    # A resumed run shows all routers that were measured before, too.
    alone, before = summarise([in_turn, *ours], [OURS])
    assert (alone.router, alone.gain, before.router) == (OURS, 1.0, "round_robin")


def test_the_papers_rule_is_an_option_of_our_router() -> None:
    parsed = _make_parser().parse_args(OUR_CASCADE.removeprefix(OURS).split())
    assert parsed.patience == 0


@pytest.mark.parametrize("dataset", TABLE_2, ids=lambda one: one.name)
def test_lengths_have_the_papers_range_and_mean(dataset: Dataset) -> None:
    dice = random.Random(0)
    lengths = [dataset.length(dice) for _ in range(20_000)]
    assert dataset.shortest <= min(lengths) and max(lengths) <= dataset.longest
    assert sum(lengths) / len(lengths) == pytest.approx(dataset.tokens / dataset.requests, rel=0.05)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_mix_fits_the_model_and_has_a_seed(mix: Mix) -> None:
    asks = mix.prompts(3, share=0.05)
    assert asks == mix.prompts(3, share=0.05) != mix.prompts(4, share=0.05)
    assert max(len(one.tokens) for one in asks) <= LONGEST
    assert len({one.name for one in asks}) == len(asks)


def test_mixes_have_what_they_say() -> None:
    long = MIXES["long-documents"].prompts(0)
    assert len(long) == 800 and min(len(one.tokens) for one in long) >= 8000
    assert len({one.tokens[:4000].tobytes() for one in long}) == 100
    mixed = sorted(len(one.tokens) for one in MIXES["mixed-documents"].prompts(0))
    assert mixed[0] < 300 and mixed[-1] > 25_000 and mixed[len(mixed) // 2] < 4_000
    assert sum(mixed[len(mixed) * 4 // 5 :]) > sum(mixed) / 2
    part = Mix(TABLE_2, scale=0.01).prompts(3)
    assert len(part) == 738 and sum(one.dataset == "MMLU" for one in part) == 240
    table = MIXES["table-2"].prompts(0)
    documents = {one.tokens[:4000].tobytes() for one in table if len(one.tokens) > 4000}
    assert len(table) == 11_070 and len(documents) >= 50
    hot = [one for one in MIXES["hot-prefix"].prompts(0) if one.dataset == "hot"]
    assert len(hot) == 4000 and len({one.tokens[:6000].tobytes() for one in hot}) == 1
