"""Run a team in several modes, and compare them in tables, timelines and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from autogen_agentchat.base import TaskResult
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import CancellationToken
from engines import print_timeline
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.link.link import Ahead
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
    arguments: argparse.Namespace, urls: Sequence[str], tokens: int, *, real: bool = False
) -> AsyncGenerator[tuple[FlashMoAChatCompletionClient, FlashMoAChatCompletionClient]]:
    """Yield clients of :func:`~engines.two_engines`, whose runs can be compared token for token.

    Answers are made at temperature 0. They have at most ``tokens`` tokens. Answers of tiny models
    have exactly ``tokens`` tokens.
    """
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": tokens}
    # Small models repeat themselves. For a repetition_penalty, SGLang would compile a kernel first.
    settings |= {"frequency_penalty": 0.3} if real else {"extra_body": {"ignore_eos": True}}
    small = FlashMoAChatCompletionClient(model=arguments.model_a, base_url=urls[0], **settings)
    large = FlashMoAChatCompletionClient(model=arguments.model_b, base_url=urls[1], **settings)
    try:
        yield small, large
    finally:
        # The time for the comparison may be over.
        with anyio.CancelScope(shield=True):
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
        """The agents' calls, in the order of their starts."""
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


def choose_size(
    first: Run, modes: int, rounds: int, tokens: int, seconds: float
) -> tuple[int, int]:
    """Return how many rounds and how many tokens of an answer fit into ``seconds``.

    More rounds come before more tokens.

    Args:
        first: a run with ``tokens``. Later runs are expected to take no longer.
        modes: number of runs in a round.

    Returns: at most ``rounds`` and ``tokens``; no rounds if one round with short answers is too
        long.
    """
    # Decoding answers with fewer tokens would hide hardly any prefill.
    fewest = min(tokens, 8)
    for fewer in range(rounds, 0, -1):
        for shorter in range(tokens, fewest - 1, -1):
            saved = 0.0
            for call in first.calls:
                written = (call.usage and call.usage.completion_tokens) or tokens
                decode = call.finished.at - first_token(call)
                saved += decode * max(0, 1 - shorter / written)
            if fewer * modes * (first.seconds - saved) <= seconds:
                return fewer, shorter
    return 0, fewest


async def measure(
    build_team: Callable[..., BaseGroupChat],
    urls: Sequence[str],
    task: str,
    modes: Mapping[str, Ahead],
    arguments: argparse.Namespace,
    console: Console,
) -> list[Run]:
    """Run a new team in every mode, in turns, after a run in the first mode that is not counted.

    The first run shows how many rounds, with how many tokens of an answer, fit into ``--minutes``.
    A round that has not ended when the minutes are over is not counted either.

    Raises: SystemExit if no round has ended.
    """
    names, minutes = list(modes), f"{arguments.minutes:g} minutes"
    runs: list[Run] = []
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(*columns, TimeElapsedColumn(), console=console)
    bar = bars.add_task("first run", total=1 + arguments.repeats * len(names))

    async def run(mode: str, clients: Sequence[FlashMoAChatCompletionClient]) -> Run:
        done = await run_once(build_team(*clients), clients, task, mode, modes[mode])
        bars.advance(bar)
        return done

    with bars, anyio.move_on_after(60 * arguments.minutes) as limit:
        async with two_clients(arguments, urls, arguments.tokens, real=True) as clients:
            first = await run(names[0], clients)
        # Later runs may take longer than the first run.
        left = 0.9 * (limit.deadline - anyio.current_time())
        rounds, tokens = choose_size(
            first, len(names), arguments.repeats, arguments.tokens, seconds=left
        )
        console.print(
            f"The first run took {first.seconds:.1f} s: {rounds} of {arguments.repeats} rounds, "
            f"with {tokens} of {arguments.tokens} tokens of an answer, should fit into {minutes}."
        )
        bars.update(bar, total=1 + rounds * len(names))
        async with two_clients(arguments, urls, tokens, real=True) as clients:
            for _ in range(rounds):
                for mode in names:
                    bars.update(bar, description=mode)
                    runs.append(await run(mode, clients))
                # Each round starts with a different mode: changes of the machine affect all alike.
                names = names[1:] + names[:1]
    if len(runs) < len(names):
        raise SystemExit(
            f"Not one round of {', '.join(modes)} fits into {minutes} on these engines: give more "
            "--minutes, or fewer --tokens."
        )
    return runs[: len(runs) // len(names) * len(names)]


async def run_once(
    team: BaseGroupChat,
    clients: Sequence[FlashMoAChatCompletionClient],
    task: str,
    mode: str,
    ahead: Ahead,
) -> Run:
    """Run a team on empty caches; ``ahead`` names the text that is prefilled ahead of requests."""
    for client in clients:
        # On a busy machine an engine that has just started may still be busy with itself.
        await client.engine.flush_cache(wait_seconds=300)
    events: list[Event] = []
    async with link(team, ahead=ahead, listener=events.append):
        start = time.perf_counter()
        await run_team(team, task)
        seconds = time.perf_counter() - start
    return Run(mode, seconds, tuple(events))


async def run_team(team: BaseGroupChat, task: str) -> TaskResult:
    """Run a team. When this is cancelled, the team ends before this returns.

    A cancelled ``team.run`` returns while AutoGen's runtime still runs, and the runtime fails then.
    A ``CancellationToken`` ends both.
    """
    token = CancellationToken()
    running = asyncio.ensure_future(team.run(task=task, cancellation_token=token))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        token.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([running])
        raise


@dataclass(frozen=True, slots=True)
class Handoff:
    """A handoff's figures in a mode; medians over the mode's runs.

    Attributes:
        seconds: time from the upstream agent's last token to the downstream agent's first.
        bound_seconds: the most that can be hidden, min(T_decode of all upstream agents, T_prefill
            of the downstream agent), FlashAgents Eq. 4. T_prefill includes transport and one token,
            which no overlap can hide.
        hidden_fraction: seconds saved over ``bound_seconds``; ``None`` in the first mode, and if
            nothing can be hidden.
    """

    agent: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    streamed_tokens: int
    late_tokens: int
    bound_seconds: float
    hidden_fraction: float | None


def compare(name: str, seconds: Sequence[float], other: str, other_seconds: Sequence[float]) -> str:
    """Say how long the runs of two modes took, and whether the modes differ.

    Two modes differ if all runs of the first took less time than all runs of the second.
    """
    ratio = median(seconds) / median(other_seconds)
    if min(len(seconds), len(other_seconds)) == 1:
        finding = "one round proves nothing beyond equal texts"
    elif max(seconds) < min(other_seconds):
        finding = f"{1 - ratio:.0%} less time"
    elif min(seconds) > max(other_seconds):
        finding = f"{name} was SLOWER, it took {ratio - 1:.0%} more time"
    else:
        finding = "no difference that this machine's noise lets us see"
    return f"{name} took {_spread(seconds)}, {other} {_spread(other_seconds)}: {finding}"


def _spread(seconds: Sequence[float]) -> str:
    text = f"{median(seconds):.2f} s"
    return f"{text} ({min(seconds):.2f} to {max(seconds):.2f})" if len(seconds) > 1 else text


class Comparison:
    """Compares runs in several modes with the first mode's runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._modes = {run.mode: [each for each in runs if each.mode == run.mode] for run in runs}
        self._base = next(iter(self._modes.values()))
        self.same_text = all(run.texts == runs[0].texts for run in runs)

    def _every_seconds(self, mode: str) -> list[float]:
        return [run.seconds for run in self._modes[mode]]

    def _seconds(self, mode: str) -> float:
        return median(self._every_seconds(mode))

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
            hidden_fraction=(
                None if runs is self._base or not bound else (prefill - seconds) / bound
            ),
        )

    def sentences(self) -> list[str]:
        """Compare the last mode with each other one, and say how much decoding can hide."""
        *others, last = self._modes
        base = self._base[0].mode
        hidden = sum(handoff.bound_seconds for handoff in self._handoffs(base))
        return [
            *(
                f"{compare(last, self._every_seconds(last), each, self._every_seconds(each))}."
                for each in others
            ),
            f"Decoding can hide prefills of {hidden / self._seconds(base):.0%} of the {base} time.",
        ]

    def show(self, console: Console) -> None:
        """Print what the modes' times say, the tables, and a timeline for each mode."""
        for sentence in self.sentences():
            console.print(f"[bold]{sentence[0].upper()}{sentence[1:]}[/]", highlight=False)
        console.print()
        console.print(self._latency_table())
        console.print("→ agent: from its upstream's last token to its own first token\n")
        console.print(self._token_table())
        console.print(_NOTES)
        for mode, runs in self._modes.items():
            console.print(f"[bold]{mode}[/] ({runs[-1].seconds:.2f} s)")
            print_timeline(runs[-1].events, console)
            console.print()
        count = sum(map(len, self._modes.values()))
        console.print(f"Same text in all {count} runs: {'yes' if self.same_text else 'NO'}")

    def _latency_table(self) -> Table:
        table = Table(title=f"Chain, medians; rounds: {len(self._base)}", title_justify="left")
        agents = [handoff.agent for handoff in self._handoffs(self._base[0].mode)]
        for name in ("mode", "end to end", *(f"→ {agent}" for agent in agents)):
            table.add_column(name, justify="left" if name == "mode" else "right")
        for mode in self._modes:
            cells = [f"{handoff.seconds * 1000:.0f} ms" for handoff in self._handoffs(mode)]
            table.add_row(mode, _spread(self._every_seconds(mode)), *cells)
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
                "every_seconds": self._every_seconds(mode),
                "ratio": base / self._seconds(mode),
                "handoffs": [asdict(handoff) for handoff in self._handoffs(mode)],
            }
            for mode in self._modes
        ]
        document = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "runs": len(self._base),
            "same_text": self.same_text,
            "modes": modes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
