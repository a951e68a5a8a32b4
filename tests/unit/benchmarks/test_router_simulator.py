"""Test the simulated engines and their mix of requests, on cases that can be computed by hand."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
from flashmoa_bench.prefill.mix import TABLE_2, MixRequest, mix
from flashmoa_bench.routing import benchmark, live, load, simulation
from flashmoa_bench.routing.engines import Cache, Machine, best_hit_rate, replay
from flashmoa_bench.routing.mixes import LONGEST, MIXES, Mix
from flashmoa_bench.routing.simulation import least_seconds, longest_seconds

from flashmoa.router.blocks import token_blocks
from flashmoa.router.flops import TokenCount
from flashmoa.router.policies import RoundRobin
from flashmoa.router.prefix_aware import PrefixAware


def ten_tokens_a_second(prompts: tuple[tuple[int, int], ...]) -> float:
    """Return the seconds of a forward, which takes a second at least."""
    return max(1.0, sum(new for _cached, new in prompts) / 10)


MACHINE = Machine(TokenCount(), ten_tokens_a_second, batch_tokens=100, cache_blocks=1000)


def make_request(name: str, *parts: tuple[int, int]) -> MixRequest:
    """Make a request whose prompt repeats each token: ``parts`` are (token, repetitions)."""
    return MixRequest(
        name, "", token_blocks([token for token, count in parts for _ in range(count)])
    )


def make_engines(count: int, machine: Machine = MACHINE) -> dict[str, Machine]:
    return {f"e{number}": machine for number in range(count)}


SIBLINGS = [make_request("a", (1, 32), (2, 8)), make_request("b", (1, 32), (3, 8))]


def test_siblings_in_one_forward_compute_their_prefix_once() -> None:
    outcome = replay(SIBLINGS, RoundRobin(), make_engines(1), concurrency=2)
    assert (outcome.tokens, outcome.cached, outcome.waits) == (80, 32, [4.8, 4.8])
    assert (outcome.seconds, outcome.steps, outcome.imbalance) == (4.8, 1, 1.0)
    assert (outcome.throughput, outcome.hit_rate) == (pytest.approx(80 / 4.8), 0.4)
    assert best_hit_rate(one.blocks for one in SIBLINGS) == 0.4


def test_siblings_on_two_engines_compute_their_prefix_twice() -> None:
    outcome = replay(SIBLINGS, RoundRobin(), make_engines(2), concurrency=2)
    assert (outcome.cached, outcome.seconds, outcome.steps) == (0, 4.0, 2)


def test_a_long_prompt_is_chunked_into_forwards() -> None:
    machine = Machine(TokenCount(), ten_tokens_a_second, batch_tokens=16, cache_blocks=1000)
    outcome = replay(
        [make_request("a", (1, 40))], RoundRobin(), make_engines(1, machine), concurrency=1
    )
    # The forwards take 1.6 s, 1.6 s, and 1 s for the last 8 tokens.
    assert (outcome.steps, outcome.seconds) == (3, pytest.approx(4.2))


@pytest.mark.parametrize(("blocks", "cached"), [(2, 0), (4, 31)])
def test_a_cache_that_is_too_small_loses_the_prefix(blocks: int, cached: int) -> None:
    machine = Machine(TokenCount(), ten_tokens_a_second, batch_tokens=100, cache_blocks=blocks)
    asks = [make_request("a", (1, 32)), make_request("b", (2, 32)), make_request("c", (1, 32))]
    assert replay(asks, RoundRobin(), make_engines(1, machine), concurrency=1).cached == cached


def test_the_cache_evicts_ends_of_the_least_recently_used_prompt_first() -> None:
    cache = Cache(4)
    assert cache.use([1, 2]) == [] and cache.use([3, 4]) == []
    assert cache.use([1, 5]) == [2]
    assert cache.match([1, 2]) == 1 and cache.match([3, 4]) == 2


def test_prefix_aware_routing_keeps_prefixes_together_under_a_queue() -> None:
    documents = [
        make_request(f"{document}-{number}", (document, 160), (100 + number, 16))
        for number in range(8)
        for document in range(4)
    ]
    policies = {"ours": PrefixAware(), "paper": PrefixAware(patience=0), "turn": RoundRobin()}
    hits = {
        name: replay(documents, policy, make_engines(3), saturation=200, concurrency=12).hit_rate
        for name, policy in policies.items()
    }
    best = best_hit_rate(one.blocks for one in documents)
    assert hits["ours"] == pytest.approx(best, abs=0.06)
    assert hits["ours"] > hits["paper"] and hits["ours"] > hits["turn"]


@pytest.mark.parametrize("dataset", TABLE_2, ids=lambda one: one.name)
def test_lengths_have_the_papers_range_and_mean(dataset: object) -> None:
    assert isinstance(dataset, type(TABLE_2[0]))
    dice = random.Random(0)
    lengths = [dataset.length(dice) for _ in range(20_000)]
    assert dataset.shortest <= min(lengths) and max(lengths) <= dataset.longest
    assert sum(lengths) / len(lengths) == pytest.approx(dataset.tokens / dataset.requests, rel=0.05)


def test_the_mix_has_each_datasets_share_and_is_the_same_for_a_seed() -> None:
    asks = mix(0.01, 0.05, 3)
    assert len(asks) == 738 and asks == mix(0.01, 0.05, 3) != mix(0.01, 0.05, 4)
    assert sum(one.dataset == "MMLU" for one in asks) == 240
    assert len({one.name for one in asks}) == len(asks)


def test_the_next_forward_is_built_when_one_begins() -> None:
    """The third request is sent when the first is answered, too late for the second forward."""
    asks = [make_request(name, (number, 60)) for number, name in enumerate("abc")]
    machine = Machine(TokenCount(), ten_tokens_a_second, batch_tokens=60, cache_blocks=1000)
    outcome = replay(asks, RoundRobin(), make_engines(1, machine), concurrency=2)
    assert (outcome.steps, list(outcome.waits)) == (3, [6.0, 12.0, 12.0])


def test_bounds_are_one_engine_that_forgets_nothing_and_the_longest_prompt() -> None:
    documents = [make_request(f"{n}-{m}", (n, 96), (9, m)) for m in (10, 20) for n in (1, 2)]
    assert least_seconds(documents, MACHINE) == (96 * 2 + 10 + 20 + 10 + 20 + 6 * 2 - 12) / 10
    assert longest_seconds(documents, MACHINE) == 10 + 1.6


@pytest.mark.parametrize("mix", MIXES.values(), ids=lambda one: one.name)
def test_mixes_fit_the_model_and_are_the_same_for_a_seed(mix: Mix) -> None:
    asks = mix.prompts(3, share=0.05)
    assert asks == mix.prompts(3, share=0.05) != mix.prompts(4, share=0.05)
    assert max(len(one.tokens) for one in asks) <= LONGEST
    assert len({one.name for one in asks}) == len(asks)


def test_mixes_have_what_they_say() -> None:
    long = MIXES["long-documents"].prompts(0)
    assert len(long) == 800 and min(len(one.tokens) for one in long) >= 8000
    assert len({one.tokens[:4000].tobytes() for one in long}) == 100
    table = MIXES["table-2"].prompts(0)
    documents = {one.tokens[:4000].tobytes() for one in table if len(one.tokens) > 4000}
    assert len(table) == 11_070 and len(documents) >= 50
    hot = [one for one in MIXES["hot-prefix"].prompts(0) if one.dataset == "hot"]
    assert len(hot) == 4000 and len({one.tokens[:6000].tobytes() for one in hot}) == 1


def test_the_benchmark_ranks_policies_and_saves_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "router.json"
    arguments = ["--mixes", "table-2", "--share", "0.3", "--seeds", "0", "1", "--engines", "4"]
    assert benchmark.main([*arguments, "--json", str(path)]) == 0
    runs = json.loads(path.read_text())["results"]["runs"]
    assert len(runs) == 2 * len(simulation.POLICIES)
    ours = {run["seed"]: run for run in runs if run["policy"] == simulation.OURS}
    for run in runs:
        assert run["gain"] <= ours[run["seed"]]["gain"] * 1.02
        assert run["share"] <= 1 and run["duplicates"] >= ours[run["seed"]]["duplicates"] * 0.95
        assert run["gain"] == 1.0 or run["policy"] != simulation.IN_TURN
    shown = capsys.readouterr().out
    assert all(name.split(",")[0] in shown for name in simulation.POLICIES)


def test_a_live_round_has_requests_about_documents_and_others() -> None:
    options = argparse.Namespace(documents=2, siblings=3, others=4, words=50)
    texts = live.make_prompts(options, 0)
    assert len(texts) == 10 and texts == live.make_prompts(options, 0) != live.make_prompts(
        options, 1
    )
    starts = [text[:300] for text in texts]
    assert sorted(starts.count(start) for start in set(starts)) == [1, 1, 1, 1, 3, 3]


def test_requests_pass_through_real_routers_to_stub_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load.json"
    arguments = ["--routers", "2", "--connections", "4", "--seconds", "1", "--json", str(path)]
    assert load.main(arguments) == 0
    results = json.loads(path.read_text())["results"]
    assert results["requests_per_second"] > 0 and results["cpu_ms_per_request"] > 0
    assert "requests/s" in capsys.readouterr().out


def test_a_running_router_is_given_as_name_and_url() -> None:
    assert live._parse_named_url("ours=http://a:1/") == ("ours", "http://a:1")
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=URL"):
        live._parse_named_url("http://a:1")


def test_running_routers_need_the_engines_urls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--router", "ours=http://a:1"])
    assert "both --engine URL and --router NAME=URL" in capsys.readouterr().err
    given = ["--engine", "http://b:1", "--router", "ours=http://a:1"]
    assert benchmark.parse(given).concurrency == 16
    assert benchmark.parse([]).concurrency == 64
