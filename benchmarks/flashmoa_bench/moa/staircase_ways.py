"""Ask one question on a rig by a staircase or a debate, or by waiting for whole answers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flashmoa.linking.link import Ahead
from flashmoa.moa import AggregationPrompt, Debate, MixtureOfAgents, Staircase, Steps
from flashmoa.moa.prompts import Order
from flashmoa_bench.harness import clock
from flashmoa_bench.moa.prompt_tokens import PromptListener
from flashmoa_bench.moa.rig import GpuUse, Rig, compare_devices
from flashmoa_bench.moa.script import QuestionScript
from flashmoa_bench.recorded import SIZES

# Of a debate.
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class StaircaseWay:
    """A way to answer.

    Attributes:
        kind: ``mixture``: proposers and an aggregator; ``debate``: two rounds and an aggregator.
        proposers: number of proposers, or of debaters.
        order: order of the chunks; ``None``: whole answers are waited for, on stock SGLang.
        first: length of the first chunk, in tokens of four characters.
    """

    kind: str
    proposers: int
    order: Order | None = None
    first: int = 0

    @property
    def name(self) -> str:
        form = "whole answers" if self.order is None else f"{self.order}, {self.first}"
        return f"{self.kind} of {self.proposers}: {form}"

    @property
    def base(self) -> str:
        """Return the name of the way that this one is compared with."""
        return StaircaseWay(self.kind, self.proposers).name

    @property
    def steps(self) -> Steps | None:
        """Return the settings of the staircase; ``None``: whole answers are waited for."""
        return None if self.order is None else Steps(self.first, order=self.order)

    @property
    def sizes(self) -> list[list[str]]:
        """Return the sizes of the agents' models, by layer: small, medium and large in turn."""
        return [[SIZES[place % 3] for place in range(self.proposers)], [SIZES[-1]]]


@dataclass(frozen=True, slots=True)
class StaircaseAnswer:
    """What one question took in one way; times in seconds of the modelled GPUs.

    Attributes:
        tokens: number of tokens that the aggregator wrote.
        rounds: number of requests in which it wrote them.
        prompt, late: prompt tokens of all its requests, and those that were computed after the
            requests came.
    """

    way: str
    question: int
    first_token: float
    seconds: float
    tokens: int
    rounds: int
    prompt: float
    late: float | None
    gpus: GpuUse


async def ask(rig: Rig, way: StaircaseWay, script: QuestionScript, seed: int) -> StaircaseAnswer:
    """Answer a question in one way, on empty caches.

    Raises: MixtureFailed if there is no answer.
    """
    await rig.flush()
    before = await rig.read_devices()
    prompts = PromptListener(rig.reporting)
    system = _make_system(rig, way, script, prompts)
    first_token: float | None = None
    began = time.time()
    async with system.answering(rig.question(script, seed)) as run:
        async for _ in run:
            first_token = first_token or time.time()
        result = await run.result()
    ended = time.time()
    last = max(prompts.by_agent)
    total = prompts.by_agent[last]
    writer = next(agent for agent in result.agents if agent.name == last)
    return StaircaseAnswer(
        way.name,
        script.question.number,
        clock.seconds_of((first_token or ended) - began),
        clock.seconds_of(ended - began),
        writer.usage.completion_tokens if writer.usage is not None else 0,
        max(1, len(writer.steps)),
        total.prompt,
        total.late,
        compare_devices(before, await rig.read_devices()),
    )


def _make_system(
    rig: Rig, way: StaircaseWay, script: QuestionScript, listener: PromptListener
) -> MixtureOfAgents | Staircase | Debate:
    plugin = way.order is not None
    proposers, [aggregator] = rig.models(script, way.sizes, plugin=plugin)
    ahead: Ahead = "text" if plugin else "nothing"
    prompt = AggregationPrompt("question-first")
    if way.kind == "debate":
        return Debate(
            proposers, ROUNDS, aggregator, staircase=way.steps, ahead=ahead, listener=listener
        )
    if way.steps is None:
        return MixtureOfAgents(
            [proposers, [aggregator]], prompt=prompt, ahead=ahead, listener=listener
        )
    return Staircase(
        proposers,
        aggregator,
        prompt=prompt,
        steps=way.steps,
        ahead=ahead,
        listener=listener,
    )
