"""Plan a team: run it on modelled engines in turn unlinked and linked (``plan``)."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio

from flashmoa.engine import EngineClient
from flashmoa.engine.local import local_engines, tiny_model, wait_for_costs
from flashmoa.errors import EngineError
from flashmoa_bench.harness.modelled_gpus import (
    check_keeps_up,
    counted_since,
    environment_of,
    read_devices,
)
from flashmoa_bench.plan.result import PlanResult, summarise
from flashmoa_bench.plan.runs import WAYS, Round, TeamRunner, find_difference
from flashmoa_bench.plan.team import PlanError, TeamFile, find_callers, limit_turns


async def plan(options: argparse.Namespace, progress: Callable[[str], None]) -> PlanResult:
    """Run the team unlinked and linked, round after round, and summarise.

    Args:
        options: the command line.
        progress: called with a short message when a step begins.

    Raises:
        PlanError: if the team or the engines cannot be planned, or an answer differs between runs.
        EngineError: if an engine does not start, or this machine is too slow for the GPUs.
    """
    progress(f"loading {options.file}")
    file = TeamFile(options.file, options.team)
    loaded = await file.load()
    limit_turns(loaded.team, options.max_turns)
    task = options.task or loaded.task
    if task is None:
        raise PlanError(f"{file.path} has no text named TASK; give --task TEXT")
    callers = find_callers(loaded.team)
    addresses = {caller.name: caller.address for caller in callers}
    _check_names(options.include, addresses, "--include")
    lengths = answer_lengths(
        {caller.name: caller.max_tokens for caller in callers}, dict(options.output_tokens)
    )
    environments = _make_environments(options, options.engines or len(set(addresses.values())))
    tokenizer: Path | None = options.tokenizer
    if tokenizer is None:
        progress("making a tokenizer from the team's prompts")
        held = (owner for caller in callers for owner, _attribute in caller.holders)
        system = [
            str(message.content)
            for owner in held
            for message in getattr(owner, "_system_messages", ())
        ]
        texts = [task, file.path.read_text(), *system]
        tokenizer = await anyio.to_thread.run_sync(make_tokenizer, texts)
    async with modelled_engines(environments, tokenizer, progress) as started:
        engines = {name: client for name, (client, _step) in started.items()}
        names = list(engines)
        placement = {agent: names[number] for agent, number in place(addresses, len(names)).items()}
        runner = TeamRunner(
            file, task, engines, placement, lengths, options.max_turns, options.include
        )
        rounds = await _play(runner, options, progress)
    if problem := find_difference(rounds):
        raise PlanError(problem)
    steps = {name: step for name, (_client, step) in started.items()}
    return summarise(rounds, steps, placement, options.slowdown)


def make_tokenizer(texts: Sequence[str]) -> Path:
    """Return the folder of a tokenizer that is trained on texts; the cache keeps it.

    Raises: EngineError if it cannot be made; OSError if the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with tempfile.TemporaryDirectory(prefix="flashmoa-plan-") as folder:
        corpus = Path(folder) / "prompts.txt"
        corpus.write_text("\n".join(texts), encoding="utf-8")
        # Only the tokenizer of this smallest tiny model is used.
        return tiny_model("test", [corpus], cache / "flashmoa" / "plan")


@asynccontextmanager
async def modelled_engines(
    environments: Sequence[Mapping[str, str]], tokenizer: Path, progress: Callable[[str], None]
) -> AsyncGenerator[dict[str, tuple[EngineClient, float]]]:
    """Start an engine with each environment; leaving the context ends all engines.

    Yields: the engines by name, each with its GPU's seconds for a single request's decode step.

    Raises: EngineError if an engine does not start.
    """
    progress("importing SGLang, once for all engines")
    async with AsyncExitStack() as stack:
        starter = await stack.enter_async_context(local_engines())
        progress(f"starting {len(environments)} modelled engines")
        engines = [
            await starter.start(
                f"hash:{tokenizer}",
                arguments=["--enable-cache-report"],
                environment=environment,
                wait=False,
            )
            for environment in environments
        ]
        running: dict[str, tuple[EngineClient, float]] = {}
        for number, engine in enumerate(engines, 1):
            await engine.wait_until_ready()
            client = await stack.enter_async_context(EngineClient(engine.url))
            costs = (await wait_for_costs(client.url)).costs
            if costs is None:
                raise EngineError(f"{client.url} does not say what its forwards cost")
            running[f"engine {number}"] = client, costs.decode_step
        yield running


def place(addresses: Mapping[str, tuple[str, str]], engines: int) -> dict[str, int]:
    """Return the index of each agent's engine.

    Args:
        addresses: the address of each agent's client, in the team's order.
        engines: number of engines. If it is the number of different addresses, each address is an
            engine, in the order of first agents. Otherwise agents are spread in turn.
    """
    different = list(dict.fromkeys(addresses.values()))
    if engines == len(different):
        return {agent: different.index(address) for agent, address in addresses.items()}
    return {agent: number % engines for number, agent in enumerate(addresses)}


def answer_lengths(
    configured: Mapping[str, int | None], given: Mapping[str | None, int]
) -> dict[str, int]:
    """Return the number of tokens of each agent's answers.

    Args:
        configured: ``max_tokens`` of each agent's client.
        given: the user's numbers by agent; ``None`` stands for all other agents.

    Raises: PlanError if an agent has no number, or ``given`` names an unknown agent.
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


def _make_environments(options: argparse.Namespace, count: int) -> list[dict[str, str]]:
    """Return the environment that gives each engine its GPU's time.

    Raises: PlanError if a GPU or model is unknown, or the model does not fit.
    """
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
    found: list[dict[str, str]] = []
    modelled: Any = import_module("flashmoa_bench.modelled_gpu.gpu")
    for gpu, model, tensor_parallel in zip(gpus, models, divided, strict=True):
        try:
            sheet, shape = modelled.Gpu.load(gpu), modelled.Model.load(model)
            fraction = modelled.memory_fraction(sheet, tensor_parallel)
            modelled.kv_tokens(sheet, shape, tensor_parallel, fraction)
        except ValueError as error:
            raise PlanError(str(error).replace("--flashmoa-device-", "--")) from error
        found.append(environment_of(gpu, model, tensor_parallel, options.slowdown))
    return found


async def _play(
    runner: TeamRunner, options: argparse.Namespace, progress: Callable[[str], None]
) -> list[Round]:
    """Play rounds of both ways. Raises: EngineError if this machine was too slow for the GPUs."""
    for way in WAYS:
        progress(f"warming up, {way}")
        await runner.play(way, options.concurrency)
    before = await read_devices(runner.engines)
    rounds: list[Round] = []
    for number in range(options.rounds):
        # Each round begins with the other way, so that changes of the machine affect both.
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            progress(f"round {number + 1} of {options.rounds}, {way}")
            rounds.append(await runner.play(way, options.concurrency))
    after = await read_devices(runner.engines)
    counted = {
        name.removeprefix("engine "): counted_since(device, after[name])
        for name, device in before.items()
    }
    check_keeps_up(counted, "--slowdown")
    return rounds
