"""Measure the gain of links on engines without the plugin, and the plugin's additional gain.

In a chain of two agents, B's prompt is a known text and A's answer. The time from A's last token to
B's first is measured unlinked and linked on stock engines, and linked with the plugin: with an
engine for each agent, and with one engine for both, where prefilling ahead slows A down.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal, get_args

from flashmoa import Workflow
from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.errors import EngineError
from flashmoa.observe import Event, LinkAdvanced
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import RoundPlayer

Way = Literal["unlinked", "linked", "plugin"]
WAYS: tuple[Way, ...] = get_args(Way)
ROLES = (
    Role("writer", plugin=False, core=0),
    Role("stock", plugin=False, arguments=("--enable-cache-report",), core=1),
    Role("flashmoa", plugin=True, arguments=("--enable-cache-report",), core=1),
)
_WORDS = ("river", "temple", "trail", "valley", "market", "bridge", "garden", "harbour")


@dataclass(frozen=True, slots=True)
class ChainRound:
    """One chain of two agents: its times in seconds, B's prompt, the link's steps and the texts."""

    handoff: float
    whole: float
    cached: int
    prompt: int
    steps: int
    text: str


@dataclass(frozen=True, slots=True)
class ChainFigures:
    """One way's medians; with one engine, both agents run on it."""

    engines: Annotated[int, Column("engines")]
    way: Annotated[Way, Column("way")]
    handoff: Annotated[float, Column("A end to B", "{:.0f} ms", 1000)]
    speedup: Annotated[float, Column("unlinked/", "{:.2f}x")]
    whole: Annotated[float, Column("A start to B", "{:.2f} s")]
    cached: Annotated[float, Column("cached", "{:.0f}")]
    prompt: Annotated[float, Column("of", "{:.0f}")]
    steps: Annotated[float, Column("sent", "{:.0f}")]


async def _measure(report: Report) -> None:
    options, dice = report.options, random.Random(report.options.seed)
    rows: list[ChainFigures] = []
    async with report.connect(ROLES, 8192 + 4 * (options.known + options.written)) as engines:
        stock = engines["stock"]
        task = " ".join(dice.choices(_WORDS, k=10))
        words = dice.choices(_WORDS, k=options.known)
        (whole,) = await stock.tokenize([" ".join(words)])
        known = " ".join(words[: options.known * options.known // len(whole)])
        async with EngineClient(
            stock.url, engine_settings=EngineSettings(without_plugin="off")
        ) as off:
            readers = {"unlinked": off, "linked": stock, "plugin": engines["flashmoa"]}
            with RoundPlayer(report.console, options.repeats, 2 * len(WAYS)) as player:
                for number in (2, 1):

                    async def run(way: Way, number: int = number) -> ChainRound:
                        reader = readers[way]
                        writer = engines["writer"] if number == 2 else reader
                        return await _play(writer, reader, task, known, options.written)

                    rounds = await player.play(WAYS, run, f"{number} engines:")
                    base = median(one.handoff for one in rounds["unlinked"])
                    rows += [_summarise(way, number, rounds[way], base) for way in WAYS]
    report.show(
        "From A's last token to B's first",
        rows,
        "unlinked/: the unlinked time over this time. cached: tokens of B's prompt that were "
        "cached when its request came, of all. sent: how often the link sent more of the prompt.",
    )
    report.save({"rows": rows})


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
        short = flow.ask(read, engine=reader, name="B", max_tokens=8, **sampling)
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


def _summarise(
    way: Way, engines: int, rounds: Sequence[ChainRound], unlinked: float
) -> ChainFigures:
    handoff = median(one.handoff for one in rounds)
    return ChainFigures(
        way=way,
        engines=engines,
        handoff=handoff,
        speedup=unlinked / handoff,
        whole=median(one.whole for one in rounds),
        cached=median(one.cached for one in rounds),
        prompt=median(one.prompt for one in rounds),
        steps=median(one.steps for one in rounds),
    )


main = command(
    "without_plugin",
    __doc__,
    _measure,
    ROLES,
    Option("--known", positive, 1500, "tokens of B's known text"),
    Option("--written", positive, 300, "tokens that A writes"),
)
