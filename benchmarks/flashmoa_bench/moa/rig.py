"""Start the engines of a Mixture-of-Agents of three models, and ask one question with them.

Each model has one engine, a PD pair, or two engines that its agents take in turns (data
parallelism); each of them with the plugin, and as stock SGLang.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import numpy as np

from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.wire import Delta
from flashmoa.moa import Limits, Model
from flashmoa.moa.early_exit import Embedding
from flashmoa.observe import CallFinished, Event
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import RESUME, Option, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.modelled_gpus import counted_since, overrun_share, read_device
from flashmoa_bench.harness.report import Report
from flashmoa_bench.moa.script import QuestionScript, ScriptOptions
from flashmoa_bench.recorded import SIZES, load_recorded
from flashmoa_bench.workflows.agents import GUIDE, PAPER


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Counts prompt tokens: ``prompt = streamed + cached + late``.

    Attributes:
        prompt: all prompt tokens.
        streamed: tokens that the request's own prompt stream computed before the request came.
        cached: tokens that other requests and streams left in the engine's radix cache.
        late: tokens computed after the request came.

    Counts that the engine does not report are ``None``.
    """

    prompt: float
    streamed: float | None
    cached: float | None
    late: float | None

    @classmethod
    def from_usage(cls, usage: PromptUsage, has_cache_report: bool) -> PromptTokens:
        """Return the counts of one request.

        Args:
            has_cache_report: whether its engine runs with ``--enable-cache-report``. With it,
                SGLang omits counts that are 0. Without it, SGLang omits the counts of every
                request that used no prompt stream.
        """
        cached, streamed = usage.cached_tokens, usage.streamed_tokens
        if cached is None and has_cache_report:
            cached = 0
        if streamed is None and usage.prompt_stream is None:
            streamed = 0
        if cached is None or streamed is None:
            return cls(usage.prompt_tokens, streamed, None, None)
        late = usage.prompt_tokens - cached
        return cls(usage.prompt_tokens, streamed, cached - streamed, late)

    @classmethod
    def total(cls, several: Sequence[PromptTokens]) -> PromptTokens:
        """Return the sum of several counts; a count that one of them lacks becomes ``None``."""

        def add(values: Sequence[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return sum(known) if len(known) == len(values) else None

        return cls(
            sum(each.prompt for each in several),
            add([each.streamed for each in several]),
            add([each.cached for each in several]),
            add([each.late for each in several]),
        )


class PromptListener:
    """Collects the prompt tokens of one question's calls, as a listener to their events.

    Args:
        reporting: URLs of the engines that run with ``--enable-cache-report``.
    """

    def __init__(self, reporting: Collection[str]) -> None:
        self._reporting = reporting
        self._calls: dict[str, list[PromptTokens]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished) and event.usage is not None:
            # The rounds of an agent on a staircase are LAYER.PLACE.ROUND.
            agent = ".".join(event.agent.split(".")[:2])
            tokens = PromptTokens.from_usage(event.usage, event.engine in self._reporting)
            self._calls.setdefault(agent, []).append(tokens)

    @property
    def by_agent(self) -> Mapping[str, PromptTokens]:
        """Return the sum over each agent's requests, by ``LAYER.PLACE``, both counted from 1."""
        return {agent: PromptTokens.total(calls) for agent, calls in sorted(self._calls.items())}


def group_by_layer(agents: Mapping[str, PromptTokens]) -> dict[int, list[PromptTokens]]:
    """Return the agents' prompts by their layers, which are counted from 1."""
    layers: dict[int, list[PromptTokens]] = {}
    for agent, prompts in agents.items():
        layers.setdefault(int(agent.split(".")[0]), []).append(prompts)
    return layers


# The parameter of chat completions that tells the engine's client which agent asks. Engines do
# nothing with it.
AGENT = "user"


class RecordedEngine(EngineClient):
    """An engine whose answers' tokens have recorded log-probabilities, where they are asked for.

    Attributes:
        confidences: confidence of an agent's answer, by the agent's name.
    """

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
    """Returns embeddings of one question's answers that are as similar as the recorded answers.

    It is a listener, too: the question's events say whose answer a text is.

    Args:
        clusters: names of the agents whose answers are compared, by cluster. Every agent is in one
            of them.
        seconds: seconds that the embedding model takes for an answer of so many tokens. It takes
            one answer at a time.
    """

    def __init__(
        self,
        script: QuestionScript,
        clusters: Collection[Sequence[str]],
        seconds: Callable[[int], float],
    ) -> None:
        self._script = script
        self._seconds = seconds
        self._rows: dict[str, Embedding] = {}
        self._agents: dict[str, str] = {}
        self._one_at_a_time = anyio.Lock()
        for agents in clusters:
            wanted = [[self._similarity(one, other) for other in agents] for one in agents]
            self._rows |= zip(agents, make_rows(wanted), strict=True)

    def _similarity(self, one: str, other: str) -> float:
        return 1.0 if one == other else self._script.similarity(one, other)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished):
            self._agents[event.text] = event.agent

    async def embed(self, text: str) -> Embedding:
        """Return one row for an answer, after the time that its embedding takes."""
        agent = self._agents[text]
        async with self._one_at_a_time:
            await clock.sleep(self._seconds(self._script.agents[agent].tokens))
        return self._rows[agent]


def make_rows(similarities: Sequence[Sequence[float]]) -> list[Embedding]:
    """Return embeddings of one row each with these Frobenius cosine similarities.

    The Frobenius cosine of two single rows is the square of their cosine. If no rows have exactly
    these similarities, the nearest ones that exist are taken.

    Args:
        similarities: a symmetric matrix with ones on its diagonal.
    """
    cosines = np.sqrt(np.asarray(similarities, dtype=np.float64))
    values, vectors = np.linalg.eigh(cosines)
    rows = vectors * np.sqrt(np.maximum(values, 0.0))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return [row[np.newaxis].astype(np.float32) for row in rows]


Serving = Literal["single", "pd", "dp", "dp-mixed"]
SERVINGS: dict[Serving, str] = {
    "single": "one GPU for each model",
    "pd": "a prefill and a decode GPU for each model (PD pair)",
    "dp": "two GPUs for each model, which its agents take in turns",
    "dp-mixed": "the same, with mixed chunks on stock SGLang, too (--enable-mixed-chunk)",
}
# Without it, SGLang does not report how many prompt tokens were cached.
_CACHE_REPORT = "--enable-cache-report"
# Hash models draw from a few words at this temperature, so that no two answers are the same.
_TEMPERATURE = 1.0
# Slowed down engines may take minutes.
_LIMITS = Limits(first_token_seconds=None, stall_seconds=None)
_STOCK = "stock_"
# Tokens of KV, enough for all agents of a question, of an engine that takes no GPU's time.
_POOL = 60_000


def make_roles(serving: Serving, *, plugin: bool, stock: bool) -> list[Role]:
    """Return the roles of the engines, with the plugin, without it, or both."""
    count = 2 if serving.startswith("dp") else 1
    roles: list[Role] = []
    for prefix in ([""] if plugin else []) + ([_STOCK] if stock else []):
        mixed = serving == "dp-mixed" and prefix == _STOCK
        arguments = (_CACHE_REPORT, *(("--enable-mixed-chunk",) if mixed else ()))
        roles += [
            Role(
                f"{prefix}{size}{'' if number == 1 else f'_{number}'}",
                plugin=not prefix,
                arguments=arguments,
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
        engines: the engines by size: with the plugin, and stock ones by ``stock_`` and size.
        own: every engine by its name. A PD pair has two.
        reporting: URLs of the engines that report cached tokens.
        words: words of one token each.
    """

    engines: Mapping[str, Sequence[RecordedEngine]]
    own: Mapping[str, EngineClient]
    reporting: Collection[str]
    words: Sequence[str]

    def models(
        self, script: QuestionScript, layers: Sequence[Sequence[str]], *, plugin: bool
    ) -> list[list[Model]]:
        """Return the agents' models, whose answers have the lengths of the script.

        Args:
            layers: the size of each agent, by layer.
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
        """Return a question of random words, which has about the script's number of tokens."""
        dice = random.Random(f"{seed} {script.question.number}")
        return "".join(dice.choices(self.words, k=script.prompt)).strip()

    async def flush(self) -> None:
        """Empty every engine's cache."""
        for engine in self.own.values():
            await engine.flush_cache()

    async def read_devices(self) -> dict[str, dict[str, Any]]:
        """Return what the engines say of their modelled GPUs, by the engines' names."""
        read = {name: await read_device(engine.url) for name, engine in self.own.items()}
        return {name: device for name, device in read.items() if device}


def sample(tokens: int) -> dict[str, Any]:
    """Return sampling parameters of an answer of exactly so many tokens."""
    return {"max_tokens": tokens, "ignore_eos": True, "temperature": _TEMPERATURE}


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What modelled GPUs did during a question.

    Attributes:
        seconds: time of all forwards on all GPUs.
        overrun: largest share of a GPU's time by which forwards were computed too late.
    """

    seconds: float = 0.0
    overrun: float = 0.0


def compare_devices(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> GpuUse:
    """Return what GPUs did from one reading to the next."""
    during = [counted_since(before[name], device) for name, device in after.items()]
    return GpuUse(
        sum(each["device_seconds"] / each["slowdown"] for each in during),
        max((overrun_share(each) for each in during), default=0.0),
    )


@asynccontextmanager
async def connect_rig(report: Report, *, plugin: bool, stock: bool) -> AsyncGenerator[Rig]:
    """Connect to the engines with the plugin, the stock ones, or both; start them without URLs.

    Exceptions are those of :meth:`Report.connect`.
    """
    roles = make_roles(report.options.serving, plugin=plugin, stock=stock)
    async with (
        report.connect(roles, _POOL, [GUIDE, PAPER]) as engines,
        AsyncExitStack() as stack,
    ):
        by_size: dict[str, list[RecordedEngine]] = {}
        own: dict[str, EngineClient] = {}
        for name, client in engines.clients.items():
            stem, _, last = name.rpartition("_")
            if last not in ("prefill", "decode"):
                # So that answers have recorded confidences.
                recorded = await stack.enter_async_context(RecordedEngine(client.url))
                by_size.setdefault(stem if last.isdigit() else name, []).append(recorded)
            if f"{name}_prefill" not in engines:
                own[name] = client
        yield Rig(by_size, own, _find_reporting(report, engines), _words())


def _find_reporting(report: Report, engines: Engines) -> set[str]:
    reports = {name for name, each in report.engines.items() if each.get("enable_cache_report")}
    return {
        client.url
        for name, client in engines.clients.items()
        if name in reports or f"{name}_prefill" in reports
    }


def _words() -> list[str]:
    return sorted(set(re.findall(r" [a-z]{3,8}(?= )", GUIDE.read_text())))


# Of the rig, the questions and the answers.
RIG_OPTIONS = (
    Option(
        "--serving",
        str,
        "single",
        "; ".join(f"{serving}: {about}" for serving, about in SERVINGS.items()),
        choices=tuple(SERVINGS),
    ),
    Option("--answers", str, "alpaca_eval", "recorded ones", choices=tuple(load_recorded())),
    Option("--questions", positive, 4, "number, spread evenly from short answers to long"),
    Option("--scale", float, 1.0, "factor of all lengths"),
    Option("--longest", positive, 1024, "most tokens of an answer"),
    Option("--equal", positive, None, "tokens of every answer, as a control"),
    Option("--question-tokens", positive, None, "least and most, drawn evenly", count=2),
    Option("--later-tokens", positive, None, "of every answer after the first layer's"),
    Option("--last-tokens", positive, None, "of the last agent's answer"),
    RESUME,
)


def make_script_options(arguments: argparse.Namespace) -> ScriptOptions:
    """Return how the questions' scripts are made, by the command line."""
    return ScriptOptions(
        scale=arguments.scale,
        longest=arguments.longest,
        equal=arguments.equal,
        prompt=tuple(arguments.question_tokens) if arguments.question_tokens else None,
        later=arguments.later_tokens,
        last=arguments.last_tokens,
        seed=arguments.seed,
    )
