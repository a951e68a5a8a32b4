"""Test the ways of ``flashmoa bench moa-latency``, and the figures that it makes of answers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from io import StringIO
from typing import cast

import pytest
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.moa.latency import show, summarise
from flashmoa_bench.moa.latency_ways import LatencyAnswer, make_ways
from flashmoa_bench.moa.least_times import compute, plan
from flashmoa_bench.moa.rig import GpuUse, compare_devices, make_roles
from flashmoa_bench.moa.script import ScriptOptions, write_script
from flashmoa_bench.recorded import RecordedQuestion
from rich.console import Console

from flashmoa.moa import EarlyExit, Embedder

WAYS = {way.name: way for way in make_ways()}
QUESTION = RecordedQuestion(7, 30, {"small": [10], "medium": [20], "large": [40]}, {(0, 1): 1.0})
ANSWER = LatencyAnswer(
    "all-to-all",
    question=7,
    seconds=10.0,
    first_token=8.0,
    least=9.0,
    layers=[3.0, 7.0, 10.0],
    second=4.0,
    written=400,
    prompts={"1": {"prompt": 90, "streamed": 0, "cached": 60, "late": 30}},
    asked={"1 small": 3, "1 large": 3},
    left={},
    decisions=[],
    deciding=None,
    gpus=GpuUse(20.0, 0.0),
)


class Steps:
    """A second for each new token, and for each step."""

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        return float(sum(new for _, new in prompts))

    def decode(self, requests: int, context: int) -> float:
        return 1.0


def test_every_cluster_of_a_tree_has_every_size() -> None:
    tree = WAYS["tree"]
    assert [len(layer) for layer in tree.sizes] == [9, 3, 1]
    first = tree.sizes[0]
    assert [first[3 * n : 3 * n + 3] for n in range(3)] == [["small", "medium", "large"]] * 3
    assert tree.sizes[1] == ["small", "medium", "large"] and tree.sizes[2] == ["large"]
    assert tree.clusters[0] == ["1.1", "1.2", "1.3"] and tree.clusters[-1] == ["2.1", "2.2", "2.3"]
    large = {way.name: way for way in make_ways("large")}["all-to-all"]
    assert large.sizes[1] == ["large"] * 9


def test_ways_have_the_early_exit_that_they_are_named_after() -> None:
    policy = EarlyExit(cast("Embedder", None), tau=0.9, seed=3)
    assert WAYS["tree + overlap"].policy(policy) is None
    assert WAYS["full"].policy(policy) == policy
    undecided, published = (WAYS[name].policy(policy) for name in ("undecided", "as published"))
    assert undecided is not None and undecided.threshold == 1.0
    assert published is not None and published.diagonal and published.tau == 0.7


@pytest.mark.parametrize(
    ("serving", "names"),
    [("pd", ["small", "medium", "large"]), ("dp", ["small", "small_2", "medium", "medium_2"])],
)
def test_each_model_has_a_pair_or_as_many_engines(serving: str, names: list[str]) -> None:
    roles = make_roles(serving, plugin=True, stock=True)  # pyright: ignore[reportArgumentType]
    assert [role.name for role in roles][: len(names)] == names
    assert all(role.is_pd_pair == (serving == "pd") for role in roles)
    assert {role.plugin for role in roles if role.name.startswith("stock_")} == {False}


def test_what_gpus_did_is_without_the_slowdown_and_the_worst_overrun_counts() -> None:
    def reading(seconds: float, overrun: float) -> dict[str, float]:
        counts = {"forwards": 0, "overruns": 0, "overrun_seconds": overrun, "starved_seconds": 0}
        return {"slowdown": 2.0, "device_seconds": seconds, **counts}

    before = {"one": reading(1.0, 0.5), "two": reading(0.0, 0.0)}
    after = {"one": reading(5.0, 0.5), "two": reading(10.0, 1.0)}
    assert compare_devices(before, after) == GpuUse(7.0, 0.1)
    assert compare_devices({}, {}) == GpuUse()


def test_figures_are_compared_question_by_question_with_all_to_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = replace(
        ANSWER,
        way="full",
        seconds=5.0,
        second=1.0,
        left={"1 large": 2},
        decisions=[(2, 0.8, True, 0.02)],
        deciding=0.1,
        gpus=GpuUse(9.0, 0.2),
    )
    answers = [ANSWER, quick, replace(quick, question=8, seconds=7.0)]
    computed = {("all-to-all", 7): 8.0}
    base, full = summarise(list(WAYS.values()), answers, computed)
    assert (base.relative, base.of_least, base.of_computed) == (1.0, 0.9, 0.8)
    assert base.computed == 430 and base.deciding is None and base.overran == 0
    assert (full.questions, full.seconds, full.relative) == (2, 6.0, 0.5)
    assert full.relative_second == 0.25 and full.left == {"1 large": pytest.approx(2 / 3)}
    assert full.deciding == pytest.approx((0.1 / 5 + 0.1 / 7) / 2) and full.overran == 2
    show([base, full], Report("moa_latency", argparse.Namespace(json=None)))
    shown = capsys.readouterr().out
    assert "-50%" in shown and "full: 2 answers in which a GPU was too late" in shown
    assert "67%" in shown and "20 ms" in shown


def test_a_count_that_an_engine_does_not_report_stays_unknown() -> None:
    unknown = {"1": {"prompt": 90.0, "streamed": 0.0, "cached": None, "late": None}}
    [row] = summarise([WAYS["all-to-all"]], [replace(ANSWER, prompts=unknown)], {})
    assert row.computed is None and row.prompts["1"]["late"] is None


def test_data_parallel_engines_take_turns_in_a_plan() -> None:
    script = write_script(QUESTION, WAYS["tree"].sizes, ScriptOptions())
    agents = {agent.name: agent for agent in plan(WAYS["tree"], script, "dp")}
    assert agents["1.4"].engine == "small_2" and agents["1.7"].engine == "small"
    assert agents["2.2"].reads == ("1.4", "1.5", "1.6") and agents["2.2"].suffice is None


def test_cost_tables_leave_out_whom_early_exit_leaves_behind() -> None:
    names = ("all-to-all", "tree", "tree + overlap", "full", "undecided")
    ways = [WAYS[name] for name in names]
    alike = replace(QUESTION, similarities=dict.fromkeys([(0, 1), (0, 2), (1, 2)], 0.7))
    scripts = {way.name: [write_script(alike, way.sizes, ScriptOptions())] for way in ways}
    times = dict.fromkeys(("small", "medium", "large"), Steps())
    policy = {"rule": "threshold", "threshold": 0.6}
    rows = compute(ways, scripts, times, "pd", policy)
    dense, tree, overlap, leaving, undecided = (row.seconds for row in rows)
    assert dense > tree > overlap > leaving and undecided == overlap
    assert rows[3].left == {"1 large": 1.0, "2 large": 1.0} and not rows[4].left
    # In the end, a second layer's agent has only what it writes and the end of its prompt.
    assert rows[1].second > rows[2].second
    # Answers that are too different never suffice.
    scripts = {
        name: [
            replace(
                each, question=replace(alike, similarities=dict.fromkeys(alike.similarities, 0.1))
            )
            for each in of
        ]
        for name, of in scripts.items()
    }
    [different] = compute([WAYS["full"]], scripts, times, "pd", policy)
    assert different.seconds == overlap and not different.left
    printed = StringIO()
    Console(width=140, file=printed).print(make_table("", rows))
    assert "2 large left out" in printed.getvalue()
