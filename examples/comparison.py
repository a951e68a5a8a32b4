"""Run a team in several modes, and compare them in tables, timelines and JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autogen_agentchat.teams import BaseGroupChat
from engines import print_timeline, two_engines
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.linking.link import Ahead
from flashmoa.observe import Event
from flashmoa.observe.calls import Call, calls

_NOTES = (
    "cached: hit in the radix cache; streamed: of these, computed by the link before the call; "
    "late: computed after it. hidden: time saved / bound, bound = min(T_decode of all upstream "
    "agents, T_prefill downstream); above 1 if the known part of the prompt was prefilled even "
    "before the first upstream token, below 0 if what else runs on the cores took more.\n"
)


@asynccontextmanager
async def two_clients(
    arguments: argparse.Namespace, text: Path, console: Console, *, real: bool = False
) -> AsyncGenerator[tuple[FlashMoAChatCompletionClient, FlashMoAChatCompletionClient]]:
    """Yield clients of :func:`~engines.two_engines`, whose runs can be compared token for token.

    Answers are made at temperature 0 and have at most ``--tokens`` tokens, those of tiny models so
    many.
    """
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": arguments.tokens}
    # Small models repeat themselves. For a repetition_penalty, SGLang would compile a kernel first.
    settings |= {"frequency_penalty": 0.3} if real else {"extra_body": {"ignore_eos": True}}
    async with two_engines(arguments, text, console, real=real) as (url_a, url_b):
        small = FlashMoAChatCompletionClient(model=arguments.model_a, base_url=url_a, **settings)
        large = FlashMoAChatCompletionClient(model=arguments.model_b, base_url=url_b, **settings)
        try:
            yield small, large
        finally:
            await small.close()
            await large.close()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a team."""

    mode: str
    seconds: float
    events: tuple[Event, ...]

    @property
    def calls(self) -> list[Call]:
        """The agents' calls, in the order in which they began."""
        return [call for call in calls(self.events) if call.finished is not None]

    @property
    def texts(self) -> list[str]:
        """The agents' answers."""
        return [call.finished.text for call in self.calls]

    def handoff(self, place: int) -> float:
        """Return the seconds from the last token before call ``place`` to its first token."""
        before, call = self.calls[place - 1 : place + 1]
        return first_token(call) - before.finished.at


def first_token(call: Call) -> float:
    """Return when a call's first token came; if it had none, when the call ended."""
    return call.first_token or call.finished.at


async def measure(
    build_team: Callable[[], BaseGroupChat],
    clients: Sequence[FlashMoAChatCompletionClient],
    task: str,
    modes: Mapping[str, Ahead],
    repeats: int,
    console: Console,
) -> list[Run]:
    """Run a new team in every mode, in turns, after a run that is not counted."""
    names = list(modes)
    # Each round starts with a different mode, so that changes of the machine affect all alike.
    plan = [names[(start + i) % len(names)] for start in range(repeats) for i in range(len(names))]
    runs: list[Run] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("warming up", total=len(plan) + 1)
        for mode in [names[0], *plan]:
            runs.append(await run_once(build_team(), clients, task, mode, modes[mode]))
            progress.advance(bar)
            progress.update(bar, description=f"{mode:9}")
    return runs[1:]


async def run_once(
    team: BaseGroupChat,
    clients: Sequence[FlashMoAChatCompletionClient],
    task: str,
    mode: str,
    ahead: Ahead,
) -> Run:
    """Run a team on empty caches; ``ahead`` says what is prefilled before its requests."""
    for client in clients:
        # On a busy machine an engine that has just started may still be busy with itself.
        await client.engine.flush_cache(wait_seconds=300)
    events: list[Event] = []
    async with link(team, ahead=ahead, listener=events.append):
        start = time.perf_counter()
        await team.run(task=task)
        seconds = time.perf_counter() - start
    return Run(mode, seconds, tuple(events))


@dataclass(frozen=True, slots=True)
class Handoff:
    """The figures of one handoff in one mode; medians over the mode's runs.

    Attributes:
        seconds: time from the upstream agent's last token to the downstream agent's first.
        bound_seconds: the most that can be hidden, min(T_decode of all upstream agents, T_prefill
            of the downstream agent), FlashAgents Eq. 4. T_prefill includes transport and one token,
            which no overlap can hide.
        hidden_fraction: seconds saved over ``bound_seconds``; ``None`` in the first mode.
    """

    agent: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    streamed_tokens: int
    late_tokens: int
    bound_seconds: float
    hidden_fraction: float | None


class Comparison:
    """Compares runs in several modes with those in the first mode."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._modes = {run.mode: [each for each in runs if each.mode == run.mode] for run in runs}
        self._base = next(iter(self._modes.values()))
        self._same_text = all(run.texts == runs[0].texts for run in runs)

    def _seconds(self, mode: str) -> float:
        return median(run.seconds for run in self._modes[mode])

    def _handoffs(self, mode: str) -> list[Handoff]:
        count = len(self._base[0].calls)
        return [self._handoff(self._modes[mode], place) for place in range(1, count)]

    def _handoff(self, runs: Sequence[Run], place: int) -> Handoff:
        def tokens(name: str) -> int:
            usages = [run.calls[place].usage for run in runs]
            return round(median(getattr(usage, name, None) or 0 for usage in usages))

        seconds = median(run.handoff(place) for run in runs)
        prefill = median(run.handoff(place) for run in self._base)
        decode = median(
            sum(call.finished.at - first_token(call) for call in run.calls[:place])
            for run in self._base
        )
        bound = min(decode, prefill)
        return Handoff(
            agent=runs[0].calls[place].agent,
            seconds=seconds,
            prompt_tokens=tokens("prompt_tokens"),
            cached_tokens=tokens("cached_tokens"),
            streamed_tokens=tokens("streamed_tokens"),
            late_tokens=tokens("late_tokens"),
            bound_seconds=bound,
            hidden_fraction=None if runs is self._base else (prefill - seconds) / bound,
        )

    def sentence(self) -> str:
        """Say how much less time the last mode took than the first, and the bound of that."""
        base, mode = self._base[0].mode, list(self._modes)[-1]
        before, after = self._seconds(base), self._seconds(mode)
        hidden = sum(handoff.bound_seconds for handoff in self._handoffs(base))
        return (
            f"{mode.capitalize()}, the chain took {1 - after / before:.0%} less time than {base}, "
            f"{after:.1f} s instead of {before:.1f} s; at most {hidden / before:.0%} can be hidden,"
            " the prefills behind the decoding before them."
        )

    def show(self, console: Console) -> None:
        """Print the gain, the tables, and a timeline for each mode."""
        console.print(f"[bold]{self.sentence()}[/]\n", highlight=False)
        console.print(self._latency_table())
        console.print("→ agent: from its upstream's last token to its own first token\n")
        console.print(self._token_table())
        console.print(_NOTES)
        for mode, runs in self._modes.items():
            console.print(f"[bold]{mode}[/] ({runs[-1].seconds:.2f} s)")
            print_timeline(runs[-1].events, console)
            console.print()
        count = sum(map(len, self._modes.values()))
        console.print(f"Same text in all {count} runs: {'yes' if self._same_text else 'NO'}")

    def _latency_table(self) -> Table:
        table = Table(title=f"Chain, medians of {len(self._base)} runs", title_justify="left")
        agents = [handoff.agent for handoff in self._handoffs(self._base[0].mode)]
        for name in ("mode", "end to end", "speed-up", *(f"→ {agent}" for agent in agents)):
            table.add_column(name, justify="left" if name == "mode" else "right")
        for mode in self._modes:
            seconds = self._seconds(mode)
            speed_up = self._seconds(self._base[0].mode) / seconds
            cells = [f"{handoff.seconds * 1000:.0f} ms" for handoff in self._handoffs(mode)]
            table.add_row(mode, f"{seconds:.2f} s", f"{speed_up:.2f}x", *cells)
        return table

    def _token_table(self) -> Table:
        table = Table(title="Prompt tokens", title_justify="left")
        for name in ("mode", "agent"):
            table.add_column(name)
        for name in ("prompt", "cached", "streamed", "late", "bound", "hidden"):
            table.add_column(name, justify="right")
        for mode in self._modes:
            for handoff in self._handoffs(mode):
                hidden = handoff.hidden_fraction
                tokens = (handoff.prompt_tokens, handoff.cached_tokens)
                tokens += (handoff.streamed_tokens, handoff.late_tokens)
                table.add_row(
                    mode,
                    handoff.agent,
                    *map(str, tokens),
                    f"{handoff.bound_seconds * 1000:.0f} ms",
                    "" if hidden is None else f"{hidden:.2f}",
                )
        return table

    def save(self, path: Path) -> None:
        """Write the figures as JSON."""
        base = self._seconds(self._base[0].mode)
        modes: list[dict[str, Any]] = [
            {
                "mode": mode,
                "seconds": self._seconds(mode),
                "ratio": base / self._seconds(mode),
                "handoffs": [asdict(handoff) for handoff in self._handoffs(mode)],
            }
            for mode in self._modes
        ]
        document = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "runs": len(self._base),
            "same_text": self._same_text,
            "modes": modes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
