"""Test what the benchmarks of mixtures read, compare and replay."""

import argparse
from dataclasses import replace
from typing import cast

import pytest
from flashmoa_bench.harness.modelled_gpus import worst_overrun
from flashmoa_bench.harness.report import Report
from flashmoa_bench.moa import accuracy, latency
from flashmoa_bench.moa.question_sets import Question
from flashmoa_bench.moa.rig import make_roles

from flashmoa.moa import EarlyExit, Embedder, Topology


def test_ways_are_compared_with_the_large_model() -> None:
    questions = [Question(number, "", f"{number}".__eq__) for number in range(4)]
    texts = {"large": ["0", "1", "5", None], "tree": ["0", "1", "2", "4"]}
    large, tree = accuracy.summarise(questions, texts)
    assert (large.accuracy, large.gain, large.failed) == (0.5, 0.0, 1)
    assert (tree.accuracy, tree.gain, tree.failed) == (0.75, 0.25, 0)
    assert tree.gain_error == pytest.approx(0.25) and tree.error == pytest.approx(0.25)
    assert accuracy.summarise(questions, {"tree": texts["tree"]})[0].gain is None


WAYS = {way.name: way for way in latency.make_ways()}
ANSWER = latency.LatencyAnswer(
    "all-to-all", question=7, seconds=10.0, first_token=8.0, least=9.0, second=4.0, written=400,
    asked={"1 small": 3, "1 large": 3}, left={}, decisions=[], deciding=None,
)  # fmt: skip


def test_every_cluster_of_a_tree_has_every_size() -> None:
    tree, every = WAYS["tree"], ["small", "medium", "large"]
    assert [*tree.sizes] == [every * 3, every, ["large"]]
    assert Topology.parse(tree.topology).layers[1] == ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    large = {way.name: way for way in latency.make_ways("large")}["all-to-all"]
    assert large.sizes[1] == ["large"] * 9


def test_ways_have_the_early_exit_of_their_names() -> None:
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
def test_each_model_has_a_pair_or_several_engines(serving: str, names: list[str]) -> None:
    roles = make_roles(serving, plugin=True, stock=True)  # pyright: ignore[reportArgumentType]
    assert [role.name for role in roles][: len(names)] == names
    assert all(role.is_pd_pair == (serving == "pd") for role in roles)
    assert {role.plugin for role in roles if role.name.startswith("stock_")} == {False}


def test_the_gpu_that_overran_most_counts() -> None:
    def reading(seconds: float, overrun: float) -> dict[str, float]:
        counts = {"forwards": 0, "overruns": 0, "overrun_seconds": overrun, "starved_seconds": 0}
        return {"device_seconds": seconds, **counts}

    before = {"one": reading(1.0, 0.5), "two": reading(0.0, 0.0)}
    after = {"one": reading(5.0, 0.5), "two": reading(10.0, 1.0)}
    assert worst_overrun(before, after) == 0.1
    assert worst_overrun({}, {}) == 0.0


def test_figures_are_compared_by_question(capsys: pytest.CaptureFixture[str]) -> None:
    quick = replace(
        ANSWER, way="full", seconds=5.0, second=1.0, left={"1 large": 2},
        decisions=[(2, 0.8, True, 0.02)], deciding=0.1, overrun=0.2,
    )  # fmt: skip
    answers = [ANSWER, quick, replace(quick, question=8, seconds=7.0)]
    base, full = latency.summarise(list(WAYS.values()), answers)
    assert (base.relative, base.of_least, base.deciding, base.overran) == (1.0, 0.9, None, 0)
    assert (full.questions, full.seconds, full.relative) == (2, 6.0, 0.5)
    assert (full.relative_second, full.overran) == (0.25, 2)
    assert full.left == {"1 large": pytest.approx(2 / 3)}
    assert full.deciding == pytest.approx((0.1 / 5 + 0.1 / 7) / 2)
    latency.show([base, full], Report("moa_latency", argparse.Namespace(json=None)))
    shown = capsys.readouterr().out
    assert "-50%" in shown and "full: 2 answers in which a GPU was too late" in shown
    assert "67%" in shown
