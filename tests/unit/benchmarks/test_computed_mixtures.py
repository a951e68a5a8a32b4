"""Mixtures by tables of forward times agree with sums by hand."""

from dataclasses import replace

import pytest
from flashmoa_bench.moa.computed import ComputedMixture
from flashmoa_bench.moa.latency import make_ways
from flashmoa_bench.moa.rig import QuestionScript, ReplayedEmbedder, ScriptOptions, write_script
from flashmoa_bench.modelled_gpu.gpu import Forward
from flashmoa_bench.recorded import SIZES, load_recorded
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa import EarlyExit, Topology

QUESTIONS = load_recorded()["alpaca_eval"].questions
WAYS = {way.name: way for way in make_ways()}


def decodes_only(forward: Forward) -> float:
    """A GPU whose steps take a second each, and whose prefills take no time."""
    return float(forward.decodes > 0)


def prefills_only(forward: Forward) -> float:
    """A GPU that computes a token of a prompt a second."""
    return float(forward.prefills.tokens)


def run(
    script: QuestionScript,
    way: str,
    seconds: object = decodes_only,
    policy: EarlyExit | None = None,
) -> ComputedMixture:
    gpus = dict.fromkeys(SIZES, seconds)
    made = WAYS[way]
    mixture = ComputedMixture(
        script, made.topology, made.sizes, gpus,  # type: ignore[arg-type]
        overlaps=made.plugin, early_exit=policy,
    )  # fmt: skip
    mixture.run()
    return mixture


@given(st.sampled_from(QUESTIONS), st.sampled_from(["all-to-all", "tree"]))
def test_a_step_of_constant_time_makes_layers_as_long_as_their_longest_chain(
    question: object, way: str
) -> None:
    script = write_script(question, WAYS[way].sizes, ScriptOptions(longest=300))  # type: ignore[arg-type]
    lengths = [
        [script.agents[f"{layer}.{place}"].tokens for place, _ in enumerate(row, 1)]
        for layer, row in enumerate(WAYS[way].sizes, 1)
    ]
    ends: list[list[int]] = [lengths[0]]
    for row, reads in zip(lengths[1:], Topology.parse(WAYS[way].topology).layers[1:], strict=True):
        ends.append(
            [length + max(ends[-1][place] for place in each)
             for length, each in zip(row, reads, strict=True)]
        )  # fmt: skip
    mixture = run(script, way)
    # An engine that writes learns up to 16 steps later that a prompt has come.
    assert ends[-1][0] <= mixture.final.end <= ends[-1][0] + 32
    assert mixture.decoding_seconds() == pytest.approx(ends[-1][0], abs=32)
    assert not mixture.left_out()


def test_overlap_leaves_little_of_a_prompt_for_later() -> None:
    script = write_script(QUESTIONS[0], WAYS["tree"].sizes, ScriptOptions(equal=1000))
    # Answers that end together are copied one after the other.
    lengths = {"2.1": 1000, "2.2": 2000, "2.3": 3000}
    agents = {
        name: replace(agent, tokens=lengths.get(name, agent.tokens))
        for name, agent in script.agents.items()
    }
    script = QuestionScript(script.question, 10, agents)

    def last_prefill(way: str) -> float:
        mixture = run(script, way, lambda forward: prefills_only(forward) + 100 * forward.decodes)
        return mixture.final.first - mixture.begun(mixture.final)

    assert last_prefill("tree") == 10 + 6000
    assert last_prefill("tree + overlap") < 256


def test_answers_that_suffice_leave_out_the_others() -> None:
    script = write_script(QUESTIONS[0], WAYS["full"].sizes, ScriptOptions())
    policy = EarlyExit(ReplayedEmbedder(script, lambda _: 0), rule="threshold", threshold=0)
    mixture = run(script, "full", policy=policy)
    # Two of three answers suffice for each reader.
    assert sum(mixture.left_out().values()) == 4
    assert [sum(one.is_left_out for one in layer) for layer in mixture.layers] == [3, 1, 0]
    assert mixture.final.end < run(script, "full").final.end
