"""The chain of agents, measured: unlinked, warmed, linked (FlashAgents §6.2, Chain)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.observe.timeline import draw, lanes
from flashmoa_bench.rounds import order
from flashmoa_bench.runs import MODES, BuildTeam, Mode, Run, run_once


@dataclass(frozen=True, slots=True)
class Handoff:
    """One transition, medians over runs; seconds and tokens.

    ``hidden_fraction`` is how much of what could have been hidden was: the time saved between
    the upstream's last token and the downstream's first, over ``bound_seconds`` =
    min(T_decode of all upstream agents, T_prefill of the downstream) (FlashAgents Eq. 4).
    """

    agent: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    streamed_tokens: int
    late_tokens: int
    bound_seconds: float | None = None
    hidden_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode of running the chain."""

    mode: Mode
    seconds: float
    ratio: float
    handoffs: tuple[Handoff, ...]


@dataclass(frozen=True, slots=True)
class ChainResult:
    """All modes, and whether they gave the same texts."""

    runs: int
    same_text: bool
    modes: tuple[ModeResult, ...]


async def measure(
    build: BuildTeam,
    clients: Sequence[FlashMoAChatCompletionClient],
    task: str,
    repeats: int,
    console: Console,
) -> list[Run]:
    """Run every mode ``repeats`` times, alternating, after one round that is not counted."""
    plan = order(repeats, MODES)
    runs: list[Run] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("warming up", total=len(plan) + 1)
        await run_once(build, clients, task, "unlinked")
        progress.advance(bar)
        for mode in plan:
            progress.update(bar, description=f"{mode:9}")
            runs.append(await run_once(build, clients, task, mode))
            progress.advance(bar)
    return runs


def summarise(runs: Sequence[Run]) -> ChainResult:
    by_mode = {mode: [run for run in runs if run.mode == mode] for mode in MODES}
    base = by_mode["unlinked"]
    base_seconds = median(run.seconds for run in base)
    results: list[ModeResult] = []
    for mode in MODES:
        group = by_mode[mode]
        seconds = median(run.seconds for run in group)
        count = len(group[0].turns)
        handoffs = tuple(_handoff(group, base, position) for position in range(1, count))
        results.append(ModeResult(mode, seconds, base_seconds / seconds, handoffs))
    same = len({run.texts for run in runs}) == 1
    return ChainResult(len(base), same, tuple(results))


def _handoff(group: Sequence[Run], base: Sequence[Run], position: int) -> Handoff:
    def tokens(name: str) -> int:
        return round(median(_tokens(run, position, name) for run in group))

    seconds = median(run.handoff(position) for run in group)
    prefill = median(run.handoff(position) for run in base)
    decode = median(sum(turn.decode_seconds for turn in run.turns[:position]) for run in base)
    bound = min(decode, prefill)
    saved = prefill - seconds
    # The sequential handoff also holds what no overlap can hide: transport and one token.
    return Handoff(
        agent=group[0].turns[position].agent,
        seconds=seconds,
        prompt_tokens=tokens("prompt_tokens"),
        cached_tokens=tokens("cached_tokens"),
        streamed_tokens=tokens("streamed_tokens"),
        late_tokens=tokens("late_tokens"),
        bound_seconds=bound,
        hidden_fraction=saved / bound if group is not base else None,
    )


def _tokens(run: Run, position: int, name: str) -> int:
    usage = run.turns[position].usage
    return (getattr(usage, name) or 0) if usage is not None else 0


def show(result: ChainResult, runs: Sequence[Run], console: Console) -> None:
    """Print the table and a timeline per mode."""
    table = Table(title=f"Chain, medians of {result.runs} runs", title_justify="left")
    for name in ("mode", "end to end", "speed-up"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for handoff in result.modes[0].handoffs:
        table.add_column(f"→ {handoff.agent}", justify="right")
    for mode in result.modes:
        cells = [f"{handoff.seconds * 1000:.0f} ms" for handoff in mode.handoffs]
        table.add_row(mode.mode, f"{mode.seconds:.2f} s", f"{mode.ratio:.2f}x", *cells)
    console.print(table)
    console.print("→ agent: from its upstream's last token to its own first token\n")
    console.print(_token_table(result))
    console.print(
        "cached: hit in the radix cache; streamed: of these, computed by the link before the "
        "call; late: computed after it. hidden: time saved / bound, bound = min(T_decode of all "
        "upstream agents, T_prefill downstream); above 1 where the known part of the prompt was "
        "prefilled even before the first upstream token, below 0 where a link cost more than it "
        "saved: agents on one engine take time from each other on a CPU, and so does whatever else "
        "runs on its cores.\n"
    )
    for mode in MODES:
        last = next(run for run in reversed(runs) if run.mode == mode)
        console.print(f"[bold]{mode}[/] ({last.seconds:.2f} s)")
        console.print(
            draw(lanes(last.events), min(console.width, 110)), highlight=False, markup=False
        )
        console.print()
    console.print(f"Same text in all {len(runs)} runs: {'yes' if result.same_text else 'NO'}")


def _token_table(result: ChainResult) -> Table:
    table = Table(title="Prompt tokens", title_justify="left")
    table.add_column("mode")
    table.add_column("agent")
    for name in ("prompt", "cached", "streamed", "late", "bound", "hidden"):
        table.add_column(name, justify="right")
    for mode in result.modes:
        for handoff in mode.handoffs:
            hidden = handoff.hidden_fraction
            table.add_row(
                mode.mode,
                handoff.agent,
                str(handoff.prompt_tokens),
                str(handoff.cached_tokens),
                str(handoff.streamed_tokens),
                str(handoff.late_tokens),
                f"{(handoff.bound_seconds or 0) * 1000:.0f} ms",
                "" if hidden is None else f"{hidden:.2f}",
            )
    return table


def save(result: ChainResult, path: Path) -> None:
    """The same as JSON."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    document: dict[str, Any] = {"command": command, **asdict(result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
