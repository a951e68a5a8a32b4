"""Start the engines of a Mixture-of-Agents of three models, and write questions' scripts.

Each model has one engine, a PD pair, or two engines that its agents take in turns (data
parallelism), with the plugin and as stock SGLang. Answers of engines on modelled GPUs mean nothing
and have no end of their own. So their lengths and similarities are taken from recorded answers to
one question, and their confidences are drawn.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import anyio

from flashmoa.engine import EngineClient
from flashmoa.engine.wire import Delta
from flashmoa.errors import EngineError
from flashmoa.moa import Limits, Model
from flashmoa.observe import CallFinished, Event
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import RESUME, Option, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Report
from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Prefills
from flashmoa_bench.recorded import SIZES, RecordedQuestion, load_recorded
from flashmoa_bench.workflows.agents import GUIDE, PAPER


@dataclass(frozen=True, slots=True)
class AgentScript:
    """One agent's answer.

    Attributes:
        draw: index of its recorded answer, among the answers of its model's size.
        confidence: geometric mean of its tokens' probabilities.
    """

    size: str
    draw: int
    tokens: int
    confidence: float


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """How scripts are made.

    Attributes:
        longest: largest number of tokens of an answer, after scaling.
        equal: tokens of every answer; ``None`` for the recorded lengths.
        later_tokens: tokens of every answer after the first layer; ``None`` for recorded lengths.
        last_tokens: tokens of the last agent's answer; ``None`` for ``later_tokens``.
    """

    scale: float = 1.0
    longest: int = 1024
    equal: int | None = None
    later_tokens: int | None = None
    last_tokens: int | None = None
    seed: int = 0

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> ScriptOptions:
        """Return the options of a command line that has :data:`RIG_OPTIONS`."""
        return cls(**{each.name: getattr(arguments, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class QuestionScript:
    """A question, and its answers' lengths and confidences.

    Attributes:
        prompt: tokens of the question.
        agents: the agents by name, ``LAYER.PLACE``, both counted from 1.
    """

    question: RecordedQuestion
    prompt: int
    agents: Mapping[str, AgentScript] = field(default_factory=dict[str, AgentScript])

    def similarity(self, one: str, other: str) -> float:
        """Return the similarity of two agents' answers, in [0, 1]."""
        first, last = self.agents[one], self.agents[other]
        return self.question.similarity((first.size, first.draw), (last.size, last.draw))


def write_script(
    question: RecordedQuestion, layers: Sequence[Sequence[str]], options: ScriptOptions
) -> QuestionScript:
    """Return the script of a question.

    An agent's answer has the length of a recorded answer of its size: a size's first proposer
    stands for the first model of that size, and so on. Aggregators' answers are not recorded; they
    get lengths of their size. Confidences depend only on question, agent's name and seed.

    Args:
        layers: the size of each agent, by layer.
    """
    mean, concentration = 0.85, 50.0  # The standard deviation is 0.05.
    agents: dict[str, AgentScript] = {}
    for layer, sizes in enumerate(layers):
        # Each layer begins with another draw, so that it does not repeat the previous layer.
        counts: dict[str, int] = dict.fromkeys(SIZES, layer)
        for place, size in enumerate(sizes):
            name = f"{layer + 1}.{place + 1}"
            tokens = options.equal or round(question.length(size, counts[size]) * options.scale)
            if layer:
                tokens = options.later_tokens or tokens
            if layer == len(layers) - 1:
                tokens = options.last_tokens or tokens
            tokens = max(1, min(tokens, options.longest))
            dice = random.Random(f"{options.seed} {question.number} {name}")
            confidence = dice.betavariate(mean * concentration, (1 - mean) * concentration)
            agents[name] = AgentScript(size, counts[size], tokens, confidence)
            counts[size] += 1
    return QuestionScript(question, max(1, round(question.prompt * options.scale)), agents)


# A parameter of chat completions that tells our client which agent asks. Engines ignore it.
AGENT = "user"


class RecordedEngine(EngineClient):
    """An engine that replaces log-probabilities of answers by recorded confidences, by agent."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.confidences: Mapping[str, float] = {}

    @asynccontextmanager
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_stream_id: str | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        """Stream a chat completion as :meth:`EngineClient.chat` does."""
        asked = super().chat(messages, prompt_stream_id=prompt_stream_id, **parameters)
        async with asked as deltas:
            yield self._replace(deltas, self.confidences.get(parameters.get(AGENT, "")))

    async def _replace(
        self, deltas: AsyncGenerator[Delta], confidence: float | None
    ) -> AsyncGenerator[Delta]:
        async for delta in deltas:
            if delta.logprobs and confidence is not None:
                logprobs = [math.log(confidence)] * len(delta.logprobs)
                delta = delta.model_copy(update={"logprobs": logprobs})
            yield delta


class ReplayedEmbedder:
    """Returns the recorded similarities of a question's answers.

    It is also a listener: the question's events say which agent wrote a text.

    Args:
        seconds: the embedding model's seconds for texts, by the number of their tokens. It takes
            one request at a time.
    """

    def __init__(self, script: QuestionScript, seconds: Seconds) -> None:
        self._script = script
        self._seconds = seconds
        self._agents: dict[str, str] = {}
        self._one_at_a_time = anyio.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished):
            self._agents[event.text] = event.agent

    async def compare(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the answers' similarities, after the seconds of their embedding."""
        agents = [self._agents[text] for text in texts]
        async with self._one_at_a_time:
            tokens = sum(self._script.agents[agent].tokens for agent in agents)
            await clock.sleep(self._seconds(tokens))
        return [
            [1.0 if one == other else self._script.similarity(one, other) for other in agents]
            for one in agents
        ]


# From a number of tokens to the seconds of a model for them.
Seconds = Callable[[int], float]


def forward_seconds(
    gpu_name: str, model: str, tensor_parallel: int = 1, weights: str = "bfloat16"
) -> Callable[[Forward], float]:
    """Return a modelled GPU's time for a forward.

    Raises: EngineError if there are no times for this GPU and model.
    """
    try:
        return MeasuredTables(gpu_name, model, tensor_parallel, weights).seconds
    except (ImportError, ValueError) as error:
        raise EngineError(f"no times of {model} on {gpu_name}: {error}") from error


def prefill_seconds(*where: Any) -> Seconds:
    """Return a modelled GPU's time for a prefill, by its tokens; see :func:`forward_seconds`."""
    seconds = forward_seconds(*where)
    return lambda tokens: seconds(Forward(Prefills.of([(0, tokens)])))


Serving = Literal["single", "pd", "dp", "dp-mixed"]
SERVINGS: dict[Serving, str] = {
    "single": "one GPU for each model",
    "pd": "a prefill and a decode GPU for each model (PD pair)",
    "dp": "two GPUs for each model, which its agents take in turns",
    "dp-mixed": "the same, with mixed chunks on stock SGLang, too (--enable-mixed-chunk)",
}
# Engines that are slowed down may take minutes.
_LIMITS = Limits(first_token_seconds=None, stall_seconds=None)
_STOCK = "stock_"


def make_roles(serving: Serving, *, plugin: bool, stock: bool) -> list[Role]:
    """Return the roles of the engines, with the plugin, without it, or both."""
    count = 2 if serving.startswith("dp") else 1
    roles: list[Role] = []
    for prefix in ([""] if plugin else []) + ([_STOCK] if stock else []):
        mixed = serving == "dp-mixed" and prefix == _STOCK
        roles += [
            Role(
                f"{prefix}{size}{'' if number == 1 else f'_{number}'}",
                plugin=not prefix,
                arguments=("--enable-mixed-chunk",) if mixed else (),
                is_pd_pair=serving == "pd",
            )
            for size in SIZES
            for number in range(1, count + 1)
        ]
    return roles


@dataclass(frozen=True, slots=True)
class Rig:
    """The connected engines.

    Attributes:
        engines: engines by size: with the plugin, and stock engines by ``stock_`` and size.
        own: every engine by its name. A PD pair has two engines.
    """

    engines: Mapping[str, Sequence[RecordedEngine]]
    own: Mapping[str, EngineClient]
    words: Sequence[str]

    def models(
        self, script: QuestionScript, layers: Sequence[Sequence[str]], *, plugin: bool
    ) -> list[list[Model]]:
        """Return the agents' models, by layer; ``layers`` has the sizes of the models.

        The models' answers have the lengths of the script.
        """
        confidences = {name: agent.confidence for name, agent in script.agents.items()}
        models: list[list[Model]] = []
        for layer, sizes in enumerate(layers, 1):
            turns = dict.fromkeys(sizes, 0)
            models.append([])
            for place, size in enumerate(sizes, 1):
                engines = self.engines[size if plugin else f"{_STOCK}{size}"]
                engine = engines[turns[size] % len(engines)]
                turns[size] += 1
                engine.confidences = confidences
                name = f"{layer}.{place}"
                sampling = {**sample(script.agents[name].tokens), AGENT: name}
                models[-1].append(Model(engine, sampling=sampling, limits=_LIMITS))
        return models

    def question(self, script: QuestionScript, seed: int) -> str:
        """Return a question of random words with about the script's number of tokens."""
        dice = random.Random(f"{seed} {script.question.number}")
        return "".join(dice.choices(self.words, k=script.prompt)).strip()

    async def flush(self) -> None:
        for engine in self.own.values():
            await engine.flush_cache()


def sample(tokens: int) -> dict[str, Any]:
    """Return sampling parameters of an answer of exactly ``tokens`` tokens."""
    # From their few words, hash models draw a different answer each time at this temperature.
    return {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}


@asynccontextmanager
async def connect_rig(report: Report, *, plugin: bool, stock: bool) -> AsyncGenerator[Rig]:
    """Connect to the engines with the plugin, the stock engines, or both; start them without URLs.

    Exceptions are as for :meth:`Report.connect`.
    """
    roles = make_roles(report.options.serving, plugin=plugin, stock=stock)
    async with (
        # On a CPU, this pool has room for all agents of a question.
        report.connect(roles, 60_000, [GUIDE, PAPER]) as engines,
        AsyncExitStack() as stack,
    ):
        by_size: dict[str, list[RecordedEngine]] = {}
        own: dict[str, EngineClient] = {}
        for name, client in engines.clients.items():
            stem, _, last = name.rpartition("_")
            if last not in ("prefill", "decode"):
                # A client of this class gives answers recorded confidences.
                recorded = await stack.enter_async_context(RecordedEngine(client.url))
                by_size.setdefault(stem if last.isdigit() else name, []).append(recorded)
            if f"{name}_prefill" not in engines:
                own[name] = client
        yield Rig(by_size, own, _words())


def _words() -> list[str]:
    return sorted(set(re.findall(r" [a-z]{3,8}(?= )", GUIDE.read_text())))


# Options of the rig, the questions and the answers.
RIG_OPTIONS = (
    Option(
        "--serving",
        str,
        "single",
        "; ".join(f"{serving}: {about}" for serving, about in SERVINGS.items()),
        choices=tuple(SERVINGS),
    ),
    Option("--answers", str, "alpaca_eval", "recorded answers", choices=tuple(load_recorded())),
    Option("--questions", positive, 4, "number, spread evenly from short answers to long"),
    Option("--scale", float, 1.0, "factor of all lengths"),
    Option("--longest", positive, 1024, "most tokens of an answer"),
    Option("--equal", positive, None, "tokens of every answer, as a control"),
    Option("--later-tokens", positive, None, "of every answer after the first layer's"),
    Option("--last-tokens", positive, None, "of the last agent's answer"),
    RESUME,
)
