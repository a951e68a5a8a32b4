"""Test the pure parts of the benchmarks of links: grids, bounds, summaries."""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from flashmoa_bench.harness.command_line import make_parser
from flashmoa_bench.harness.engines import Role, _given_urls
from flashmoa_bench.harness.report import _to_json
from flashmoa_bench.harness.requests import TimedAnswer
from flashmoa_bench.harness.rounds import gaps, percentile
from flashmoa_bench.link import (
    ablation,
    chunk,
    coding_agents,
    handoff,
    interference,
    shared_engine,
    tools,
)
from flashmoa_bench.link.handoff import LINKED, HandoffCell, summarise_cell, summarise_grid
from flashmoa_bench.link.pipelines import PipelineRound, Workload
from flashmoa_bench.link.shared_engine import DEFAULT_ROWS, ChainRun, Chains
from flashmoa_bench.link.tools import WORKLOADS, AfterTools, workloads
from flashmoa_bench.workflows import agents, schedule
from flashmoa_bench.workflows.benchmark import WorkflowRun

from flashmoa.errors import EngineError

WORKLOAD = Workload(tps=10, prefix=100, upstream=21, concurrency=2)
GRID = argparse.Namespace(full=False, tps=None, prefix=None, upstream=None, concurrency=None)


def make_rounds(
    *seconds: float, floor: float | None = None, computed: int = 0
) -> list[PipelineRound]:
    return [PipelineRound(value, 3.0, computed, floor) for value in seconds]


def make_cell(fcfs: float, lpm: float, linked: float) -> HandoffCell:
    linked_rounds = make_rounds(linked, linked + 1, linked - 1, floor=0.1)
    rounds = {"fcfs": make_rounds(fcfs), "lpm": make_rounds(lpm), LINKED: linked_rounds}
    return summarise_cell(WORKLOAD, rounds)


def test_every_dimension_of_a_grid_can_be_set() -> None:
    assert len(set(handoff.workloads(GRID))) == 24
    assert len(set(handoff.workloads(argparse.Namespace(**{**vars(GRID), "full": True})))) == 240
    given = argparse.Namespace(full=False, tps=[5], prefix=[7, 8], upstream=[9], concurrency=[3])
    assert handoff.workloads(given) == [Workload(5, 7, 9, 3), Workload(5, 8, 9, 3)]


def test_a_workload_counts_shared_tokens_once() -> None:
    assert WORKLOAD.decode_seconds == 2.0
    assert WORKLOAD.unique_tokens == 100 + 2 * (21 + 10)
    assert WORKLOAD.pool_tokens > 2 * (100 + 21 + 10)


def test_the_bound_is_a_phase_without_the_floor() -> None:
    short_prefill = make_cell(fcfs=3.2, lpm=3.0, linked=2.2)
    assert short_prefill.seconds == {"fcfs": 3.2, "lpm": 3.0, LINKED: 2.2}
    assert short_prefill.sequential == 3.0
    assert short_prefill.prefill == pytest.approx(1.0)
    assert short_prefill.bound == pytest.approx(0.9)
    assert short_prefill.hidden_fraction == pytest.approx(0.8 / 0.9)
    assert short_prefill.speedup == pytest.approx({"fcfs": 3.2 / 2.2, "lpm": 3.0 / 2.2})
    short_decode = make_cell(fcfs=9.0, lpm=9.0, linked=7.0)
    assert short_decode.bound == pytest.approx(2.0)
    assert short_decode.hidden_fraction == pytest.approx(1.0)
    nothing_to_hide = make_cell(fcfs=2.05, lpm=2.05, linked=2.05)
    assert nothing_to_hide.hidden_fraction is None
    assert not nothing_to_hide.is_worth_hiding


def test_a_grid_counts_won_and_well_hidden_cells() -> None:
    cells = [make_cell(3.2, 3.0, 2.1), make_cell(3.2, 3.0, 3.1), make_cell(2.15, 2.15, 2.1)]
    total = summarise_grid(cells)
    assert (total.cells, total.won) == (3, {"fcfs": 3, "lpm": 2})
    assert (total.worth_hiding, total.well_hidden) == (2, 1)
    assert total.speedups["lpm"] == pytest.approx((3.0 / 3.1, 2.15 / 2.1, 3.0 / 2.1))


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.99), percentile(values, 0.5)) == (99, 50)
    assert percentile([3.0], 0.99) == percentile([3.0], 0) == 3
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)
    assert gaps([1, 2, 4]) == [1, 2]


def test_ablation_rows_have_the_papers_figures() -> None:
    workload = Workload(50, 2000, 200, 8)
    unique = workload.unique_tokens
    measured = {
        "baseline": make_rounds(10, 12, 11, computed=3 * unique),
        "batched": make_rounds(12, computed=4 * unique),
        "streaming": make_rounds(6, computed=2 * unique),
        "full": make_rounds(5, floor=0.2, computed=unique),
    }
    row = ablation.summarise_row(workload, measured)
    assert row.seconds == {"baseline": 11, "batched": 12, "streaming": 6, "full": 5}
    assert row.duplicates == {"baseline": 3, "batched": 4, "streaming": 2, "full": 1}
    assert row.speedup == pytest.approx({"baseline": 2.2, "batched": 2.4})
    assert row.paper == {"baseline": 10.10, "streaming": 5.32, "full": 4.20}
    assert ablation.summarise_row(Workload(50, 2000, 30, 8), measured).paper is None


def test_chunks_are_compared_with_a_single_pass() -> None:
    measured: dict[int, Sequence[Sequence[float]]] = {
        4: [[1.0, 1.0, 0.5], [2.0, 3.0, 0.5], [2.0, 4.0, 1.0]],
        10: [[2.0], [3.0], [4.0]],
    }
    small, single = chunk.summarise(measured, 10)
    assert small.seconds == (2.0, 3.0, 0.5)
    assert (small.total, small.over_single_pass) == (5.5, pytest.approx(5.5 / 3))
    # The last full chunk, not the shorter rest.
    assert small.last_over_first == pytest.approx(1.5)
    assert (single.over_single_pass, single.last_over_first) == (1.0, None)


def test_schedules_are_compared_with_fcfs() -> None:
    def played(*seconds: float) -> list[WorkflowRun]:
        return [WorkflowRun(each, 1.0, each / 2, {}) for each in seconds]

    rounds = {
        "fcfs": [played(2.0, 4.0), played(6.0, 8.0)],
        "linked + sjf": [played(1.0, 2.0), played(3.0, 4.0)],
    }
    fcfs, both = schedule.summarise("chain", 10, rounds)
    assert (fcfs.seconds, fcfs.p95, fcfs.of_fcfs, fcfs.paper) == (5, 8, 1, "")
    assert (both.seconds, both.p95, both.of_fcfs, both.p95_of_fcfs) == (2.5, 4, 0.5, 0.5)
    assert both.paper == "0.63"
    # The critical path decodes fastest in the second way.
    assert fcfs.bound == both.bound == 1.25 / 5


def test_answers_are_not_as_long_as_told() -> None:
    lengths = schedule.earlier_lengths(100, seed=0)
    assert lengths == schedule.earlier_lengths(100, seed=0) != schedule.earlier_lengths(100, seed=1)
    assert all(50 <= tokens <= 150 for tokens in lengths.values())
    by_change: Any = {(name, change): change for name in lengths for change in schedule.CHANGES}
    unused: Any = None
    clients = schedule.ProfiledClients(unused, unused, by_change)
    changes = [clients.of(agent, copy) for agent in agents.TRAVEL_AGENTS for copy in range(10)]
    assert changes == [clients.of(a, copy) for a in agents.TRAVEL_AGENTS for copy in range(10)]
    assert set(changes) == {0.7, 1.3}


def test_a_strangers_figures_are_over_all_rounds() -> None:
    one = TimedAnswer(ids=[1, 2, 3], times=[5.0, 6.0, 8.0])
    other = TimedAnswer(ids=[1, 2], times=[1.0, 2.0])
    rounds = [
        interference.LoadRound([one], [4.0], [7.0]),
        interference.LoadRound([one, other], [4.0, 2.0], [9.0]),
    ]
    busy = {"stock": rounds, "linked": [*rounds, *rounds[:1]]}
    alone = [interference.LoadRound([one], [4.0], [])]
    found, linked, idle = interference.summarise({**busy, "alone": alone})
    # The time from one answer to the next is no gap.
    assert (found.gap, found.longest_gap) == (1.0, 2.0)
    assert (found.completion, found.answers) == (4.0, 3)
    assert (found.pipeline, found.pipeline_p99) == (8.0, 9.0)
    assert set(found.of_stock.values()) == {1.0}
    assert linked.of_stock["answer"] == 3.5 / (10 / 3) and idle.pipeline is None
    assert "pipeline" not in idle.of_stock


def test_pipelines_arrive_evenly_and_fit_the_pool() -> None:
    load = interference.Load(pipelines=9, prefix=100, upstream=200, tokens=16)
    pipelines = load.make_pipelines(random.Random(0), 3.0)
    assert [pipeline.started for pipeline in pipelines[:3]] == [3.0, 3.5, 4.0]
    assert pipelines[0].prefix != pipelines[1].prefix
    assert load.pool_tokens >= 8 * (100 + 200 + 10 + 32) + 16


def test_urls_must_be_given_for_all_needed_engines() -> None:
    roles = [
        Role("stock", plugin=False),
        Role("lpm", plugin=False, optional=True),
        Role("flashmoa", plugin=True),
    ]
    parser = make_parser("x", "y", roles)
    assert _given_urls(roles, parser.parse_args([])) == {}
    with pytest.raises(EngineError, match="--flashmoa-url"):
        _given_urls(roles, parser.parse_args(["--stock-url", "http://a:1"]))
    given = parser.parse_args(["--stock-url", "http://a:1", "--flashmoa-url", "http://b:1"])
    assert list(_given_urls(roles, given)) == ["stock", "flashmoa"]


def test_a_report_has_relative_paths() -> None:
    assert _to_json(Path.cwd() / "a.json") == "a.json"
    assert _to_json(str(Path.home() / ".cache" / "model")) == "~/.cache/model"
    assert _to_json("/elsewhere") == "/elsewhere" and _to_json(3) == 3


def test_rows_of_chains_are_read_and_written_alike() -> None:
    assert Chains.read("8:1200/150:2000/60") == Chains(8, (1200, 2000), (150, 60))
    assert [str(Chains.read(row)) for row in DEFAULT_ROWS] == list(DEFAULT_ROWS)


@pytest.mark.parametrize("row", ["8", "8:1/2", "a:1/2:3/4", "0:9/2:9/2", "1:9/5:4/2", "1:9/2:9/0"])
def test_a_row_that_cannot_be_played_is_refused(row: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=row):
        Chains.read(row)


def test_chains_are_compared_with_the_best_stock() -> None:
    def rounds(*seconds: float) -> list[list[ChainRun]]:
        return [[ChainRun(each - 1, 0.5, 7), ChainRun(each + 1, 0.7, 9)] for each in seconds]

    played = {
        "stock": rounds(4, 5, 9), "stock mixed": rounds(4, 4, 4), "linked": rounds(2, 3, 4)
    }  # fmt: skip
    rows = shared_engine.summarise(Chains.read("2:9/2:9/2"), played)
    assert [(row.way, row.seconds, row.of_stock) for row in rows] == [
        ("stock", 5, 1.25), ("stock mixed", 4, 1), ("linked", 3, 0.75),
    ]  # fmt: skip
    assert all(row.gap == pytest.approx(0.6) and row.late == 8 for row in rows)


def test_only_under_pressure_agents_exceed_a_pool() -> None:
    arguments = argparse.Namespace(
        agents=16, prompt=4000, answer=60, calls=4, result=100, long_result=2000, seconds=[1.0, 5.0]
    )
    loads = workloads(arguments)
    assert tuple(loads) == WORKLOADS
    pool = 16 * loads["pressure"].context / 2
    assert loads["pressure"].context == 4000 + 4 * 160 + 60
    tokens = {name: load.agents * load.context for name, load in loads.items()}
    assert [name for name in WORKLOADS if tokens[name] > pool] == ["pressure"]


def test_tools_are_compared_with_stock_sglangs() -> None:
    def played(*rounds: list[float], late: int) -> list[list[AfterTools]]:
        return [[AfterTools(seconds, 100, late) for seconds in each] for each in rounds]

    stock = played([1, 2, 9], [4, 4, 4], [3, 3, 3], late=90)
    linked = played([1, 1, 1], [1, 1, 3], [2, 2, 2], late=10)
    rows = tools.summarise("pressure", {"stock": stock, "linked": linked}, computed=0.9, bound=0.1)
    assert [(row.way, row.median, row.of_stock, row.p90) for row in rows] == [
        ("stock", 3, 1, 4),
        ("linked", 1, pytest.approx(1 / 3), 2),
    ]
    assert [(row.kept, row.late) for row in rows] == [(0, 90), (1, 10)]
    assert all((row.computed, row.bound) == (0.9, 0.1) for row in rows)


def test_a_found_return_has_95_percent_cached() -> None:
    found = [coding_agents.Return(0.1, 1000, cached) for cached in (950, 949, 1020)]
    slow = [coding_agents.Return(0.4, 1000, 0)]
    replay = coding_agents.Replay
    replays = {"stock": [replay(slow, 9.0, 2000)], "held": [replay(found, 3, 2000)]}
    stock, held = coding_agents.summarise(replays)
    assert (stock.found, stock.of_stock, stock.seconds) == (0, 1, 9)
    assert held.found == pytest.approx(2 / 3) and held.of_stock == pytest.approx(0.25)


def test_short_and_long_coding_agents_are_chosen() -> None:
    options = argparse.Namespace(agents=3, turns=10, scale=2.0)
    chosen = coding_agents.chosen_agents(options)
    assert [len(turns) for turns in chosen] == [10, 10, 10]
    assert chosen[0] == coding_agents.chosen_agents(options)[0] != chosen[1]
    one = argparse.Namespace(agents=24, turns=1000, scale=1.0)
    whole = coding_agents.chosen_agents(one)
    assert list(map(len, whole)) == sorted(map(len, whole)) and len(whole[0]) < len(whole[-1])
