"""Plan a team: run it on modelled engines in turn unlinked and linked (``plan``)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import local_engines, tiny_model
from flashmoa_bench.harness.engines import wait_for_costs
from flashmoa_bench.harness.modelled_gpus import check_keeps_up, counted_since, environment_of
from flashmoa_bench.plan.result import PlanResult, summarise
from flashmoa_bench.plan.runs import WAYS, Round, TeamRunner, find_difference, limit_turns
from flashmoa_bench.plan.team import Caller, PlanError, TeamFile, find_callers

# An engine makes its KV pool as it starts, which is checked before.
_CHECK = """
from types import SimpleNamespace
from flashmoa_sglang.modelled_gpu.gpu import modelled_gpu
gpu = modelled_gpu()
gpu.size_engine(SimpleNamespace(mem_fraction_static=None, max_total_tokens=None))
print(gpu.name)
"""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Describes the GPUs of an engine, the model whose times are taken, and their slowdown."""

    gpu: str
    model: str
    tensor_parallel: int
    slowdown: float

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self.gpu, self.model, self.tensor_parallel, self.slowdown)

    def describe(self) -> str:
        """Return the name that an engine of this kind gives its modelled GPU.

        Raises: PlanError with the reason if there can be no such engine here.
        """
        # In a process of its own, since the plugin reads its options from the environment.
        process = subprocess.run(
            [sys.executable, "-c", _CHECK],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        if not process.returncode:
            return process.stdout.strip()
        reason = process.stderr.strip().rpartition("\n")[2].removeprefix("ValueError: ")
        # The plan's options have the names of the engine's, without the prefix.
        reason = reason.replace("--flashmoa-device-", "--").replace("--flashmoa-device", "--gpu")
        if find_spec("aiconfigurator_core") is None:
            reason = (
                "the GPUs' times need aiconfigurator-core, which is not installed (pip install "
                f"'./server_patches[device]'), or data sheets and models of your own: {reason}"
            )
        raise PlanError(reason)


def make_tokenizer(texts: Sequence[str], cache: Path) -> Path:
    """Return a folder with a tokenizer that is trained on these texts; it is kept in ``cache``.

    Raises: EngineError if it cannot be made; OSError if the cache cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="flashmoa-plan-") as folder:
        corpus = Path(folder) / "prompts.txt"
        corpus.write_text("\n".join(texts), encoding="utf-8")
        # Of the smallest of the tiny models only the tokenizer is used.
        return tiny_model("test", [corpus], cache)


@asynccontextmanager
async def modelled_engines(
    specs: Sequence[EngineSpec], tokenizer: Path, progress: Callable[[str], None]
) -> AsyncGenerator[list[tuple[EngineClient, float]]]:
    """Start an engine of each kind in ``specs``; leaving the context ends all.

    Yields: the engines, each with the seconds of a decode step of one request.

    Raises: EngineError if an engine does not start.
    """
    progress("importing SGLang, once for all engines")
    async with AsyncExitStack() as stack:
        starter = await stack.enter_async_context(local_engines())
        progress(f"starting {len(specs)} modelled engines")
        engines = [
            await starter.start(
                f"hash:{tokenizer}",
                arguments=["--enable-cache-report"],
                environment=spec.environment,
                wait=False,
            )
            for spec in specs
        ]
        running: list[tuple[EngineClient, float]] = []
        for engine, spec in zip(engines, specs, strict=True):
            await engine.wait_until_ready()
            client = await stack.enter_async_context(EngineClient(engine.url))
            costs = (await wait_for_costs(client)).costs
            if costs is None:
                raise EngineError(f"{client.url} does not say what its forwards cost")
            # The engine reports what its GPU would take without the slowdown.
            running.append((client, costs.decode_step * spec.slowdown))
        yield running


async def plan(options: argparse.Namespace, progress: Callable[[str], None]) -> PlanResult:
    """Run the team unlinked and linked, round after round, and summarise.

    Args:
        options: the command line.
        progress: called with a short message when a step begins.

    Raises:
        PlanError: if the team or the engines that are asked for cannot be planned, or an answer
            was not the same in all runs.
        EngineError: if an engine does not start, or this machine is too slow for the GPUs.
    """
    progress(f"loading {options.file}")
    setup = await _prepare(options)
    tokenizer: Path | None = options.tokenizer
    if tokenizer is None:
        progress("making a tokenizer from the team's prompts")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "flashmoa" / "plan"
        tokenizer = await anyio.to_thread.run_sync(make_tokenizer, setup.texts, folder)
    specs = list(setup.engines.values())
    async with modelled_engines(specs, tokenizer, progress) as started:
        engines = dict(zip(setup.engines, started, strict=True))
        runner = TeamRunner(
            setup.file,
            setup.task,
            {name: client for name, (client, _step) in engines.items()},
            setup.placement,
            setup.lengths,
            options.max_turns,
            options.include,
        )
        rounds = await _play(runner, options, progress)
    if problem := find_difference(rounds):
        raise PlanError(problem)
    steps = {name: step for name, (_client, step) in engines.items()}
    return summarise(rounds, setup.gpus, steps, setup.placement)


@dataclass(frozen=True, slots=True)
class _Setup:
    """What is known before engines are started.

    Attributes:
        texts: texts to train a tokenizer on.
        engines, gpus: each engine's kind, and what it will call its GPU, by the engine's name.
        placement: the name of each agent's engine.
        lengths: how many tokens each agent writes.
    """

    file: TeamFile
    task: str
    texts: Sequence[str]
    engines: Mapping[str, EngineSpec]
    gpus: Mapping[str, str]
    placement: Mapping[str, str]
    lengths: Mapping[str, int]


async def _prepare(options: argparse.Namespace) -> _Setup:
    """Load the team, and check that it can be run on the engines. Raises: PlanError."""
    file = TeamFile(options.file, options.team)
    loaded = await file.load()
    limit_turns(loaded.team, options.max_turns)
    task = options.task or loaded.task
    if task is None:
        raise PlanError(f"{file.path} has no text named TASK; give --task TEXT")
    callers = find_callers(loaded.team)
    addresses = {caller.name: caller.address for caller in callers}
    _check_names(options.include, addresses, "--include")
    placement = place(addresses, options.engines, dict(options.place))
    configured = {caller.name: caller.max_tokens for caller in callers}
    lengths = answer_lengths(configured, dict(options.output_tokens))
    specs = _make_specs(options, options.engines or len(set(addresses.values())))
    names = [f"engine {number}" for number in range(1, len(specs) + 1)]
    described = {
        spec: await anyio.to_thread.run_sync(spec.describe) for spec in dict.fromkeys(specs)
    }
    return _Setup(
        file=file,
        task=task,
        texts=[task, file.path.read_text(), *_system_texts(callers)],
        engines=dict(zip(names, specs, strict=True)),
        gpus={name: described[spec] for name, spec in zip(names, specs, strict=True)},
        placement={agent: names[number] for agent, number in placement.items()},
        lengths=lengths,
    )


def place(
    addresses: Mapping[str, tuple[str, str]], engines: int | None, places: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of each agent's engine, from 0.

    Args:
        addresses: what each agent's client is configured for, in the team's order.
        engines: number of engines; ``None`` for one for each different address. If it is that
            number, each address is an engine, in the order of its first agent. Otherwise agents
            are spread in turn.
        places: engines, from 1, of agents that the user has placed.

    Raises: PlanError if ``places`` names an agent or an engine that there is not.
    """
    different = list(dict.fromkeys(addresses.values()))
    count = engines or len(different)
    if count == len(different):
        placed = {agent: different.index(address) for agent, address in addresses.items()}
    else:
        placed = {agent: number % count for number, agent in enumerate(addresses)}
    _check_names(places, addresses, "--place")
    for agent, engine in places.items():
        if engine > count:
            raise PlanError(
                f"--place {agent}={engine}: the engines are 1 to {count}; give one of them, or "
                f"--engines {engine}"
            )
        placed[agent] = engine - 1
    return placed


def answer_lengths(
    configured: Mapping[str, int | None], given: Mapping[str | None, int]
) -> dict[str, int]:
    """Return how many tokens each agent writes.

    Args:
        configured: ``max_tokens`` of each agent's client.
        given: the numbers that the user gave by agent; ``None``: for all that have none.

    Raises: PlanError if an agent has no number, or ``given`` names an unknown one.
    """
    _check_names([agent for agent in given if agent is not None], configured, "--output-tokens")
    lengths: dict[str, int] = {}
    for agent, limit in configured.items():
        tokens = given.get(agent) or given.get(None) or limit
        if not tokens:
            raise PlanError(
                f"the client of {agent} has no max_tokens, and a modelled engine never ends an "
                "answer by itself; give --output-tokens N, for all agents, or "
                f"--output-tokens {agent}=N"
            )
        lengths[agent] = tokens
    return lengths


def _check_names(names: Iterable[str], agents: Iterable[str], option: str) -> None:
    known = list(agents)
    for name in names:
        if name not in known:
            raise PlanError(f"{option} names {name!r}; agents that call a model: {known}")


async def _play(
    runner: TeamRunner, options: argparse.Namespace, progress: Callable[[str], None]
) -> list[Round]:
    """Play rounds of both ways. Raises: EngineError if this machine was too slow for the GPUs."""
    for way in WAYS:
        progress(f"warming up, {way}")
        await runner.play(way, options.concurrency)
    before = await runner.read_devices()
    rounds: list[Round] = []
    for number in range(options.rounds):
        # Each round begins with the other way, so that changes of the machine affect both alike.
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            progress(f"round {number + 1} of {options.rounds}, {way}")
            rounds.append(await runner.play(way, options.concurrency))
    after = await runner.read_devices()
    counted = {
        name.removeprefix("engine "): counted_since(before[name], after[name]) for name in before
    }
    check_keeps_up(counted, "--slowdown")
    return rounds


def _make_specs(options: argparse.Namespace, count: int) -> list[EngineSpec]:
    given: dict[str, Sequence[Any]] = {
        "--gpu": options.gpu or ["h200_sxm"],
        "--model": options.model or ["Qwen/Qwen3-32B"],
        "--tp": options.tp or [1],
    }
    for option, values in given.items():
        if len(values) not in (1, count):
            raise PlanError(
                f"{option} is given {len(values)} times, for {count} engines; give it once, or "
                "once for each engine"
            )
    gpus, models, divided = (list(values) * (count // len(values)) for values in given.values())
    return [
        EngineSpec(gpu, model, tensor_parallel, options.slowdown)
        for gpu, model, tensor_parallel in zip(gpus, models, divided, strict=True)
    ]


def _system_texts(callers: Sequence[Caller]) -> list[str]:
    return [
        str(message.content)
        for caller in callers
        for owner, _attribute in caller.holders
        for message in getattr(owner, "_system_messages", ())
    ]
