"""Start the engines of a Mixture-of-Agents of three models, and ask one question with them.

Each model has one engine, a PD pair, or two engines that its agents take in turns (data
parallelism); each of them with the plugin, and as stock SGLang.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from flashmoa.engine import EngineClient
from flashmoa.moa import Limits, Model
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.modelled_gpus import counted_since, overrun_share, read_device
from flashmoa_bench.harness.report import Report
from flashmoa_bench.moa.replay import AGENT, RecordedEngine
from flashmoa_bench.moa.script import QuestionScript
from flashmoa_bench.recorded import SIZES
from flashmoa_bench.workflows.agents import GUIDE, PAPER

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
        names: names by which the engines serve their models, by size.
        reporting: URLs of the engines that report cached tokens.
        words: words of one token each.
    """

    engines: Mapping[str, Sequence[RecordedEngine]]
    own: Mapping[str, EngineClient]
    names: Mapping[str, str]
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
                models[-1].append(Model(engine, self.names[size], sampling, limits=_LIMITS))
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
async def connect_rig(
    report: Report, arguments: argparse.Namespace, *, plugin: bool, stock: bool
) -> AsyncGenerator[Rig]:
    """Connect to the engines with the plugin, the stock ones, or both; start them without URLs.

    Exceptions are those of :meth:`Report.connect`.
    """
    roles = make_roles(arguments.serving, plugin=plugin, stock=stock)
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
        names = {size: getattr(arguments, f"{size}_model") for size in SIZES}
        yield Rig(by_size, own, names, _find_reporting(report, engines), _words())


def _find_reporting(report: Report, engines: Engines) -> set[str]:
    """Return the URLs of engines, or of the pairs, that report cached tokens."""
    reports = {name for name, each in report.engines.items() if each.get("enable_cache_report")}
    return {
        client.url
        for name, client in engines.clients.items()
        if name in reports or f"{name}_prefill" in reports
    }


def _words() -> list[str]:
    """Return words, each with a space before it, that are one token or a little more."""
    return sorted(set(re.findall(r" [a-z]{3,8}(?= )", GUIDE.read_text())))
