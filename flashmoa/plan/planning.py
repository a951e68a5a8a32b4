"""Plan a team: run it on modelled engines in turn unlinked and linked (``plan``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from flashmoa.engine.modelled_gpus import check_keeps_up, counted_since
from flashmoa.plan.engines import EngineSpec, make_tokenizer, modelled_engines
from flashmoa.plan.errors import PlanError
from flashmoa.plan.placement import answer_lengths, check_names, place
from flashmoa.plan.result import PlanResult, summarise
from flashmoa.plan.runs import WAYS, Round, TeamRunner, find_difference, limit_turns
from flashmoa.plan.team_file import TeamFile
from flashmoa.plan.team_members import Caller, find_callers

SLOWDOWN_OPTION = "--slowdown"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a user asks for.

    Args:
        task: the team's task; ``None`` for that of the file.
        gpus, models, tensor_parallel: one for all engines, or one for each.
        engines: number of engines; ``None`` for one for each address in the file.
        pinned: numbers of engines, from 0, of agents that the user places.
        include: agents that are linked on request; see :func:`flashmoa.autogen.link`.
        tokens, tokens_by_agent: length of answers; without, ``max_tokens`` of the clients.
        tokenizer: folder of the model's tokenizer; ``None`` to make one from the prompts.
        cache: folder for tokenizers that are made.
    """

    file: TeamFile
    cache: Path
    task: str | None = None
    gpus: Sequence[str] = ("h200_sxm",)
    models: Sequence[str] = ("Qwen/Qwen3-32B",)
    tensor_parallel: Sequence[int] = (1,)
    slowdown: float = 1.0
    engines: int | None = None
    pinned: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens: int | None = None
    tokens_by_agent: Mapping[str, int] = field(default_factory=dict[str, int])
    max_turns: int | None = None
    include: Sequence[str] = ()
    copies: int = 1
    rounds: int = 3
    tokenizer: Path | None = None


async def plan(options: PlanOptions, progress: Callable[[str], None]) -> PlanResult:
    """Run the team unlinked and linked, round after round, and summarise.

    Args:
        progress: called with a short message when a step begins.

    Raises:
        PlanError: if the team or the engines that are asked for cannot be planned, or an answer
            was not the same in all runs.
        EngineError: if an engine does not start, or this machine is too slow for the GPUs.
    """
    progress(f"loading {options.file.path}")
    setup = await _prepare(options)
    tokenizer = options.tokenizer
    if tokenizer is None:
        progress("making a tokenizer from the team's prompts")
        tokenizer = await anyio.to_thread.run_sync(make_tokenizer, setup.texts, options.cache)
    specs = list(setup.engines.values())
    async with modelled_engines(specs, tokenizer, progress) as engines:
        runner = TeamRunner(
            options.file,
            setup.task,
            {name: engine.client for name, engine in zip(setup.engines, engines, strict=True)},
            setup.placement,
            setup.lengths,
            options.max_turns,
            options.include,
        )
        steps = {name: engine.step for name, engine in zip(setup.engines, engines, strict=True)}
        rounds = await _play(runner, options, progress)
    if problem := find_difference(rounds):
        raise PlanError(problem)
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

    task: str
    texts: Sequence[str]
    engines: Mapping[str, EngineSpec]
    gpus: Mapping[str, str]
    placement: Mapping[str, str]
    lengths: Mapping[str, int]


async def _prepare(options: PlanOptions) -> _Setup:
    """Load the team, and check that it can be run on the engines. Raises: PlanError."""
    loaded = await options.file.load()
    limit_turns(loaded.team, options.max_turns)
    task = options.task or loaded.task
    if task is None:
        raise PlanError(f"{options.file.path} has no text named TASK; give --task TEXT")
    callers = find_callers(loaded.team)
    addresses = {caller.name: caller.address for caller in callers}
    check_names(options.include, addresses, "--include")
    placement = place(addresses, options.engines, options.pinned)
    configured = {caller.name: caller.max_tokens for caller in callers}
    lengths = answer_lengths(configured, options.tokens, options.tokens_by_agent)
    specs = _make_specs(options, options.engines or len(set(addresses.values())))
    names = [f"engine {number}" for number in range(1, len(specs) + 1)]
    described = {
        spec: await anyio.to_thread.run_sync(spec.describe) for spec in dict.fromkeys(specs)
    }
    return _Setup(
        task=task,
        texts=[task, options.file.path.read_text(), *_system_texts(callers)],
        engines=dict(zip(names, specs, strict=True)),
        gpus={name: described[spec] for name, spec in zip(names, specs, strict=True)},
        placement={agent: names[number] for agent, number in placement.items()},
        lengths=lengths,
    )


async def _play(
    runner: TeamRunner, options: PlanOptions, progress: Callable[[str], None]
) -> list[Round]:
    """Play rounds of both ways. Raises: EngineError if this machine was too slow for the GPUs."""
    for way in WAYS:
        progress(f"warming up, {way}")
        await runner.play(way, options.copies)
    before = await runner.read_devices()
    rounds: list[Round] = []
    for number in range(options.rounds):
        # Each round begins with the other way, so that changes of the machine affect both alike.
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            progress(f"round {number + 1} of {options.rounds}, {way}")
            rounds.append(await runner.play(way, options.copies))
    after = await runner.read_devices()
    counted = {
        name.removeprefix("engine "): counted_since(before[name], after[name]) for name in before
    }
    check_keeps_up(counted, SLOWDOWN_OPTION)
    return rounds


def _make_specs(options: PlanOptions, count: int) -> list[EngineSpec]:
    gpus = _for_each(options.gpus, count, "--gpu")
    models = _for_each(options.models, count, "--model")
    divided = _for_each(options.tensor_parallel, count, "--tp")
    return [
        EngineSpec(gpu, model, tensor_parallel, options.slowdown)
        for gpu, model, tensor_parallel in zip(gpus, models, divided, strict=True)
    ]


def _for_each(values: Sequence[Any], count: int, option: str) -> list[Any]:
    """Return a value for each engine.

    Raises: PlanError if there is neither one value nor as many as engines.
    """
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise PlanError(
            f"{option} is given {len(values)} times, for {count} engines; give it once, or once "
            "for each engine"
        )
    return list(values)


def _system_texts(callers: Sequence[Caller]) -> list[str]:
    """Return the system prompts that can be read from the agents."""
    messages = [
        message
        for caller in callers
        for holder in caller.holders
        for message in getattr(holder.owner, "_system_messages", ())
    ]
    return [str(message.content) for message in messages]
