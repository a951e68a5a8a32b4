"""Compute what staircases and debates take by the cost tables of their GPUs, without engines."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import replace

from flashmoa.moa import Steps
from flashmoa.moa.settings import CHARACTERS_PER_TOKEN
from flashmoa_bench.moa.computed import CHAT, INSTRUCTION, name_engines
from flashmoa_bench.moa.least_times import LEFT, PlannedAgent, StepTimes, least_times
from flashmoa_bench.moa.rig import GpuUse, Serving
from flashmoa_bench.moa.script import QuestionScript
from flashmoa_bench.moa.staircase_ways import ROUNDS, StaircaseAnswer, StaircaseWay


def plan_staircase(
    way: StaircaseWay, script: QuestionScript, serving: Serving, characters: float
) -> list[list[PlannedAgent]]:
    """Return the requests of a question by agent, the aggregator's last.

    A debater's answers have the same length in every round, as on the rig.

    Args:
        characters: mean length of a token, as chunks are cut by characters.
    """
    proposers, [aggregator] = way.sizes
    layers = [proposers] * (ROUNDS if way.kind == "debate" else 1) + [[aggregator]]
    agents: list[list[PlannedAgent]] = []
    reads: dict[str, int] = {}
    for layer, sizes in enumerate(layers, 1):
        written: dict[str, int] = {}
        for place, engine in enumerate(name_engines(sizes, serving), 1):
            name = f"{layer}.{place}"
            tokens = script.agents[f"{1 if layer < len(layers) else 2}.{place}"].tokens
            known = script.prompt + (INSTRUCTION if reads else CHAT)
            whole = PlannedAgent(name, engine, known, tuple(reads), tokens)
            if reads and way.steps is not None:
                agents.append([*_cut(whole, way.steps, max(reads.values()), characters)])
            else:
                agents.append([whole])
            written[name] = tokens
        reads = written
    return agents


def _cut(
    whole: PlannedAgent, steps: Steps, longest: int, characters: float
) -> Generator[PlannedAgent]:
    """Yield the requests that write an agent's answer part by part.

    Args:
        longest: tokens of the longest answer that it reads.
    """
    length, before, continues = 0, 0, ""
    for number, size in enumerate(steps.sizes(), 1):
        length += size
        chunk = math.ceil(length * CHARACTERS_PER_TOKEN / characters)
        left = whole.tokens - before
        if chunk >= longest or size >= left:
            yield replace(whole, tokens=left, chunk=chunk, continues=continues, before=before)
            return
        part = f"{whole.name}.{number}"
        yield replace(
            whole, name=part, tokens=size, chunk=chunk, answer=whole.name, continues=continues,
            before=before,
        )  # fmt: skip
        before, continues = before + size, part


def compute_staircase(
    way: StaircaseWay,
    script: QuestionScript,
    times: Mapping[str, StepTimes],
    serving: Serving,
    characters: float,
) -> StaircaseAnswer:
    """Return what cost tables add up to for a question.

    Args:
        times: times of each size's model.
    """
    engines = {f"{size}{more}": each for size, each in times.items() for more in ("", "_2")}
    agents = plan_staircase(way, script, serving, characters)
    overlap, pair = way.order is not None, serving == "pd"
    spans = least_times(
        [request for requests in agents for request in requests],
        engines, overlap=overlap, pair=pair, mixed=serving == "dp-mixed",
    )  # fmt: skip
    lengths = {requests[-1].name: sum(part.tokens for part in requests) for requests in agents}
    parts = agents[-1]
    prompts = [
        part.known
        + part.before
        + sum(min(lengths[name], part.chunk or lengths[name]) for name in part.reads)
        for part in parts
    ]
    late = [LEFT + part.before for part in parts] if overlap else prompts
    return StaircaseAnswer(
        way.name,
        script.question.number,
        spans[parts[0].name].first,
        spans[parts[-1].name].end,
        lengths[parts[-1].name],
        len(parts),
        sum(prompts),
        sum(late),
        GpuUse(),
    )
