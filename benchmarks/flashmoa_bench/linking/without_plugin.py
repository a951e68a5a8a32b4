"""Measure what links gain on engines without the plugin, and what the plugin adds.

A chain of two agents: B's prompt is a text that is known beforehand, and what A writes. The time
from A's last token to B's first is measured unlinked and linked on stock engines, and linked on
an engine with the plugin; with an engine for each agent, and with one engine for both, where what
is prefilled ahead takes time from A.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, get_args

import anyio
from rich.console import Console

from flashmoa import Workflow
from flashmoa.engine import EngineClient, EngineError
from flashmoa.observe import Event, LinkAdvanced
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import RoundPlayer

Way = Literal["unlinked", "linked", "plugin"]
WAYS: dict[Way, str] = {
    "unlinked": "stock SGLang, unlinked",
    "linked": "stock SGLang, linked: prefilled in a few steps",
    "plugin": "with the plugin, linked",
}
ROLES = (
    Role("writer", plugin=False, core=0),
    Role("stock", plugin=False, arguments=("--enable-cache-report",), core=1),
    Role("flashmoa", plugin=True, arguments=("--enable-cache-report",), core=1),
)
_READ_TOKENS = 8
_WORDS = ("river", "temple", "trail", "valley", "market", "bridge", "garden", "harbour")


@dataclass(frozen=True, slots=True)
class ChainRound:
    """One chain of two agents.

    Attributes:
        handoff: seconds from A's last token to B's first.
        whole: seconds from A's request to B's first token.
        cached, prompt: numbers of B's prompt tokens that were cached, and of all.
        steps: how often the link has sent something.
        text: what both agents wrote.
    """

    handoff: float
    whole: float
    cached: int
    prompt: int
    steps: int
    text: str


@dataclass(frozen=True, slots=True)
class ChainFigures:
    """The medians of one way; ``engines`` is 1 if both agents run on one engine."""

    way: Way
    engines: int
    handoff: float
    whole: float
    cached: float
    prompt: float
    steps: float


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("without_plugin", __doc__, ROLES)
    parser.add_argument("--known", type=positive, default=1500, help="tokens of B's known text")
    parser.add_argument("--written", type=positive, default=300, help="tokens that A writes")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("without_plugin", arguments)
    pool = 8192 + 4 * (arguments.known + arguments.written)
    async with report.connect(ROLES, pool) as engines:
        rows = await _measure(engines.clients, arguments, report.console)
    show(rows, report.console)
    report.save({"rows": rows})


async def _measure(
    engines: Mapping[str, EngineClient], arguments: argparse.Namespace, console: Console
) -> list[ChainFigures]:
    dice = random.Random(arguments.seed)
    task = " ".join(dice.choices(_WORDS, k=10))
    known = await _make_text(engines["stock"], arguments.known, dice)
    ways: tuple[Way, ...] = get_args(Way)
    rows: list[ChainFigures] = []
    async with EngineClient(engines["stock"].url, without_plugin="off") as off:
        readers = {"unlinked": off, "linked": engines["stock"], "plugin": engines["flashmoa"]}
        with RoundPlayer(console, arguments.repeats, 2 * len(ways)) as player:
            for number in (2, 1):

                async def run(way: Way, number: int = number) -> ChainRound:
                    reader = readers[way]
                    writer = engines["writer"] if number == 2 else reader
                    return await _play(writer, reader, task, known, arguments.written)

                # The first requests of an engine take longer than others.
                for way in ways:
                    await run(way)
                rounds = await player.play(ways, run, f"{number} engines:")
                rows += [_summarise(way, number, rounds[way]) for way in ways]
    return rows


async def _make_text(engine: EngineClient, tokens: int, dice: random.Random) -> str:
    words = dice.choices(_WORDS, k=tokens)
    (whole,) = await engine.tokenize([" ".join(words)])
    return " ".join(words[: tokens * tokens // len(whole)])


async def _play(
    writer: EngineClient, reader: EngineClient, task: str, known: str, written: int
) -> ChainRound:
    """Play a chain on empty caches."""
    for engine in (writer, reader):
        await engine.flush_cache()
    events: list[Event] = []
    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    async with Workflow(writer, listener=events.append) as flow:
        ask = [{"role": "user", "content": task}]
        plan = flow.ask(ask, name="A", max_tokens=written, **sampling)
        read = [{"role": "user", "content": f"{known}\n{plan}\nShorten this."}]
        short = flow.ask(read, engine=reader, name="B", max_tokens=_READ_TOKENS, **sampling)
        text = await plan + await short
    a, b = calls(events)
    if a.finished is None or b.first_token is None or short.usage is None:
        raise EngineError("an engine has answered without text or usage")
    return ChainRound(
        handoff=clock.seconds_of(b.first_token - a.finished.at),
        whole=clock.seconds_of(b.first_token - a.started.at),
        cached=short.usage.cached_tokens or 0,
        prompt=short.usage.prompt_tokens,
        steps=sum(isinstance(event, LinkAdvanced) for event in events),
        text=text,
    )


def _summarise(way: Way, engines: int, rounds: Sequence[ChainRound]) -> ChainFigures:
    return ChainFigures(
        way=way,
        engines=engines,
        handoff=median(one.handoff for one in rounds),
        whole=median(one.whole for one in rounds),
        cached=median(one.cached for one in rounds),
        prompt=median(one.prompt for one in rounds),
        steps=median(one.steps for one in rounds),
    )


def show(rows: Sequence[ChainFigures], console: Console) -> None:
    names = ("engines", "way", "A end to B", "unlinked/", "A start to B", "cached", "sent")
    table = make_table("From A's last token to B's first", *names)
    for row in rows:
        unlinked = next(one for one in rows if one.engines == row.engines)
        table.add_row(
            str(row.engines),
            WAYS[row.way],
            f"{row.handoff * 1000:.0f} ms",
            f"{unlinked.handoff / row.handoff:.2f}x",
            f"{row.whole:.2f} s",
            f"{row.cached:.0f} of {row.prompt:.0f}",
            f"{row.steps:.0f}" if row.steps else "",
        )
    console.print(table)
    console.print(
        "unlinked/: the unlinked time over this one. cached: tokens of B's prompt that its request "
        "found computed. sent: how often the link sent more of the prompt.\n"
    )
