"""Ask one question on a rig in several ways: all-to-all, trees, overlap, early exit, widths."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from flashmoa.moa import AggregationPrompt, EarlyExit, MixtureOfAgents, Result, Topology
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.critical_path import decoding_seconds
from flashmoa_bench.moa.rig import (
    GpuUse,
    PromptListener,
    PromptTokens,
    ReplayedEmbedder,
    Rig,
    compare_devices,
    group_by_layer,
)
from flashmoa_bench.moa.script import QuestionScript
from flashmoa_bench.recorded import SIZES

# The way that others are compared with. The papers' figures (Faster-MoA, arXiv 2512.18126, §5.3)
# are over it, too: reductions of at most some 62, 76 and 90 %, on six H200.
BASE = "all-to-all"
Exit = Literal["", "undecided", "ours", "published"]


@dataclass(frozen=True, slots=True)
class LatencyWay:
    """A way to answer.

    Attributes:
        sizes: size of each agent's model, by layer.
        plugin: whether it runs on the engines with the plugin, and prompts overlap.
        early_exit: its rule; ``undecided`` decides and never leaves.
        paper: Faster-MoA's latency over all-to-all's; ``None`` if the paper does not have it.
    """

    name: str
    topology: str
    sizes: Sequence[Sequence[str]]
    plugin: bool
    early_exit: Exit = ""
    paper: float | None = None

    def policy(self, policy: EarlyExit) -> EarlyExit | None:
        """Return this way's policy, given that of the command line; ``None`` for none."""
        if self.early_exit == "published":
            return EarlyExit.as_published(policy.embedder, policy.seed)
        if self.early_exit == "undecided":  # Q stays below 1, so that this never leaves.
            return replace(policy, rule="threshold", threshold=1.0)
        return policy if self.early_exit else None

    @property
    def clusters(self) -> list[list[str]]:
        """Return the names of the agents that are read together, by cluster."""
        topology = Topology.parse(self.topology)
        return [
            [f"{layer}.{place + 1}" for place in reads]
            for layer, agents in enumerate(topology.layers[1:], 1)
            for reads in sorted(set(agents))
        ]


def make_ways(second: str = "mixed") -> list[LatencyWay]:
    """Return the ways that can be measured.

    Args:
        second: models of the second layer: ``mixed`` for all sizes in turn, or one size.
    """
    root = SIZES[-1]
    dense = (_in_turn("mixed", 9), _in_turn(second, 9), [root])
    tree = (_in_turn("mixed", 9), _in_turn(second, 3), [root])
    return [
        LatencyWay(BASE, "9x9x1", dense, plugin=False),
        LatencyWay("tree", "9-3-1", tree, plugin=False, paper=0.38),
        LatencyWay("tree + overlap", "9-3-1", tree, plugin=True, paper=0.24),
        LatencyWay("undecided", "9-3-1", tree, plugin=True, early_exit="undecided"),
        LatencyWay("full", "9-3-1", tree, plugin=True, early_exit="ours"),
        LatencyWay(
            "as published",
            "9-3-1",
            tree,
            plugin=True,
            early_exit="published",
            paper=0.10,
        ),
    ]


def _in_turn(sizes: str, count: int) -> list[str]:
    return [SIZES[place % 3] if sizes == "mixed" else sizes for place in range(count)]


@dataclass(frozen=True, slots=True)
class LatencyAnswer:
    """What one question took in one way; times in seconds of the modelled GPUs.

    Attributes:
        question: the question's number in its set.
        least: what the agents on the critical path decode; no linking can be faster.
        layers: time from the question to the end of each layer's last answer that was used.
        second: mean time of the second layer's agents, from the end of what they read to their own.
        written: tokens of all answers, estimated for agents that were cancelled.
        prompts: prompt tokens by layer, without those of cancelled agents.
        asked, left: number of agents that were asked and of those left out, by layer and size.
        decisions: answers that were complete, Q, whether the others were left out, and seconds.
        deciding: time by which decisions delayed the answer; ``None`` without early exit.
    """

    way: str
    question: int
    seconds: float
    first_token: float
    least: float
    layers: Sequence[float]
    second: float
    written: int
    prompts: Mapping[str, Mapping[str, float | None]]
    asked: Mapping[str, int]
    left: Mapping[str, int]
    decisions: Sequence[tuple[int, float, bool, float]]
    deciding: float | None
    gpus: GpuUse

    @property
    def computed(self) -> float | None:
        """Return the tokens that engines computed: of prompts, and of answers."""
        counts = [prompt[kind] for prompt in self.prompts.values() for kind in ("streamed", "late")]
        known = [count for count in counts if count is not None]
        return sum(known) + self.written if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks questions on a rig.

    Attributes:
        early_exit: the command line's policy; each question has an embedder and a seed of its own.
        embedding: seconds that the embedding model takes for so many tokens.
        seed: of the questions' texts.
    """

    rig: Rig
    early_exit: Mapping[str, Any]
    embedding: Callable[[int], float]
    seed: int

    async def ask(self, way: LatencyWay, script: QuestionScript) -> LatencyAnswer:
        """Answer a question in one way, on empty caches.

        Raises: MixtureFailed if there is no answer.
        """
        await self.rig.flush()
        before = await self.rig.read_devices()
        events: list[Event] = []
        prompts = PromptListener(self.rig.reporting)
        embedder = ReplayedEmbedder(script, way.clusters, self.embedding)

        def listen(event: Event) -> None:
            events.append(event)
            prompts(event)
            embedder(event)

        seed = self.seed + script.question.number
        mixture = MixtureOfAgents(
            self.rig.models(script, way.sizes, plugin=way.plugin),
            way.topology,
            prompt=AggregationPrompt("question-first"),
            early_exit=way.policy(EarlyExit(embedder, seed=seed, **self.early_exit)),
            ahead="text" if way.plugin else "nothing",
            listener=listen,
        )
        began = time.time()
        result = await mixture.answer(self.rig.question(script, self.seed))
        ended = time.time()
        gpus = compare_devices(before, await self.rig.read_devices())
        least = decoding_seconds(calls(events), began)
        answer = _describe(way, script, result, began, ended)
        return LatencyAnswer(
            **answer,
            least=clock.seconds_of(least),
            prompts={
                f"{layer}": asdict(PromptTokens.total(agents))
                for layer, agents in group_by_layer(prompts.by_agent).items()
            },
            gpus=gpus,
        )


def _describe(
    way: LatencyWay, script: QuestionScript, result: Result, began: float, ended: float
) -> dict[str, Any]:
    """Return the fields of an answer that its result has."""
    sizes = {
        (agent.layer, agent.place): f"{agent.layer + 1} {way.sizes[agent.layer][agent.place]}"
        for agent in result.agents
    }
    ends = [
        max(agent.finished or 0.0 for agent in layer if agent.status == "used")
        for layer in result.layers
    ]
    left = [agent for agent in result.agents if agent.status == "left out"]
    return {
        "way": way.name,
        "question": script.question.number,
        "seconds": clock.seconds_of(ended - began),
        "first_token": clock.seconds_of((result.final.first_token or ended) - began),
        "layers": [clock.seconds_of(end - began) for end in ends],
        "second": clock.seconds_of(_second_layer_seconds(way, result)),
        "written": result.spending.completion_tokens,
        "asked": dict(Counter(sizes.values())),
        "left": dict(Counter(sizes[agent.layer, agent.place] for agent in left)),
        "decisions": [
            (each.answers, each.quality.score, each.left, clock.seconds_of(each.seconds))
            for each in result.decisions
        ],
        "deciding": clock.seconds_of(result.deciding) if way.early_exit else None,
    }


def _second_layer_seconds(way: LatencyWay, result: Result) -> float:
    """Return the mean time of the second layer's agents, after the end of what they read."""
    reads = Topology.parse(way.topology).layers[1]
    spans: list[float] = []
    for agent in result.layers[1]:
        read = [result.layers[0][place] for place in reads[agent.place]]
        ready = [one.finished for one in read if one.status == "used" and one.finished is not None]
        if agent.finished is not None and agent.status == "used" and ready:
            spans.append(agent.finished - max(ready))
    return fmean(spans) if spans else 0.0
