"""Run a framework's programs unlinked and twice linked, and count the links (:class:`Count`).

    python -m tests.coverage.measure FRAMEWORK URL [COMPOSITION]

runs in the framework's environment, and prints a line of JSON for each program.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from flashmoa.observe import Event, LinkOpened, LinkWaits, Listener
from flashmoa.observe.calls import Call, calls
from flashmoa.observe.summary import LINK_WORDS, link_status, overlaps
from flashmoa.openai import run
from tests.coverage.answers import TEXT_TOKENS, Script, install, scripted

# Runs have different tasks, as a user's would.
_TASKS = {
    "first": "Plan three days in Nepal for two people who like walking and food.",
    "second": "Plan a week in Patan for a family that has never been there.",
}
_task = ""
_program = ""
_GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "nepal.md"


def task() -> str:
    """Return the task of the current run."""
    return _task


def instructions(name: str) -> str:
    """Return an agent's system prompt. From the program's name on, no other program has its KV."""
    return f"{_GUIDE.read_text()[:1500]}\n\nThis is {_program}.\nYou are {name}."


async def look(place: str) -> str:
    """Look at a place."""
    await asyncio.sleep(0.3)
    return f"A fine {place}. " * 20


# Runs a program once, given the engine's URL. Returns the texts that do not depend on timing.
Play = Callable[[str, Listener | None], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class Program:
    """A small program of a framework.

    Attributes:
        composition: how its agents are composed, in the framework's words.
        tools: whether its agents call tools.
        make_script: makes the answers of a run.
        adapter: whether an adapter of FlashMoA links its first run.
    """

    composition: str
    tools: bool
    play: Play
    make_script: Callable[[], Script] = Script
    adapter: bool = False


def learned(composition: str, tools: bool, play: Callable[[str], Any], **more: Any) -> Program:
    """Make a program whose runs are marked by ``flashmoa.openai.run``.

    Args:
        play: a function of the engine's URL. If it is no coroutine function, it runs in a thread.
    """

    async def play_once(url: str, listener: Listener | None) -> Sequence[str]:
        name = f"{composition}, {tools}"
        if not asyncio.iscoroutinefunction(play):

            def play_blocking() -> Sequence[str]:
                if listener is None:
                    return play(url)
                with run(name, listener=listener):
                    return play(url)

            return await asyncio.to_thread(play_blocking)
        if listener is None:
            return await play(url)
        async with run(name, listener=listener):
            return await play(url)

    return Program(composition, tools, play_once, **more)


def team_programs(team: Callable[[str, bool], Any], *rows: tuple[Any, ...]) -> list[Program]:
    """Make programs of agents that share a client, each without and with tools.

    Args:
        team: makes the agents, given the engine's URL and whether they have tools. The program
            closes the team's ``client``.
        rows: composition, a coroutine function of the team, and optionally a function that makes
            the answers, given whether there are tools.
    """

    def program(tools: bool, composition: str, work: Any, script: Any = None) -> Program:
        async def play(url: str) -> Sequence[str]:
            made = team(url, tools)
            async with made.client:
                return await work(made)

        make_script = Script if script is None else partial(script, tools)
        return learned(composition, tools, play, make_script=make_script)

    return [program(tools, *row) for row in rows for tools in (False, True)]


@dataclass
class Count:
    """The links of a run.

    Attributes:
        calls: the names of the calls' agents.
        linkable: number of calls that could be linked: calls that began after another call had
            ended. Before the other calls, no text is written.
        linked: number of linkable calls that found their prompt streams.
        reading: number of linked calls whose prompt has a text that was being written while the
            link was open.
        streamed: number of ``reading`` calls that had KV of such a text when they were sent.
        reasons: why linkable calls are not linked, and why texts were not streamed, in the words
            of the report, each with its count.
    """

    calls: list[str] = field(default_factory=list)
    linkable: int = 0
    linked: int = 0
    reading: int = 0
    streamed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def count(events: Sequence[Event]) -> Count:
    made = calls(events)
    found = Count([call.agent for call in made])
    first_end = min(call.ended.at for call in made if call.ended is not None)
    opened = {event.stream_id: event.at for event in events if isinstance(event, LinkOpened)}
    ahead = overlaps(made)
    reasons = Counter[str]()
    for call in made:
        if call.started.at < first_end:
            continue
        found.linkable += 1
        if (status := link_status(call)) not in ("hit", "no gain"):
            reasons[call.started.unlinked or LINK_WORDS[status]] += 1
            continue
        found.linked += 1
        written = sum(_fresh_tokens(call, made, opened[call.started.stream_id]))
        if written:
            found.reading += 1
            found.streamed += ahead[call.started.call_id].left_tokens < written
    for event in events:
        if isinstance(event, LinkWaits):
            reasons[f"text not streamed: {event.reason}"] += 1
    found.reasons = dict(reasons.most_common())
    return found


def _fresh_tokens(reader: Call, made: Sequence[Call], since: float) -> list[int]:
    """Return the lengths of the answers in a prompt that were being written from ``since`` on."""
    assert reader.prompt is not None
    prompt = json.dumps(reader.prompt.messages)
    return [
        writer.usage.completion_tokens
        for writer in made
        if writer.finished is not None
        and writer.usage is not None
        and writer.usage.completion_tokens == TEXT_TOKENS  # No name that is written by the script.
        and since < writer.finished.at <= reader.started.at
        and (text := writer.finished.text.strip())
        and json.dumps(text)[1:-1] in prompt
    ]


async def measure(framework: str, program: Program, url: str) -> dict[str, Any]:
    """Run a program with two tasks, and with the second one unlinked; return a row of the table."""
    global _task, _program
    _program = f"{framework}: {program.composition}, {program.tools}"
    row: dict[str, Any] = {"composition": program.composition, "tools": program.tools}
    row["adapter"] = program.adapter
    texts: dict[str, Sequence[str]] = {}
    for name in ("first", "second", "unlinked"):
        _task = _TASKS["first" if name == "first" else "second"]
        events: list[Event] = []
        with scripted(program.make_script()):
            listener = None if name == "unlinked" else events.append
            texts[name] = [*await program.play(url, listener)]
        if name != "unlinked":
            row[name] = asdict(count(events))
    row["same"] = texts["second"] == texts["unlinked"] != []
    return row


async def main(framework: str, url: str, only: str = "") -> None:
    install()
    module = importlib.import_module(f"tests.coverage.{framework}")
    for program in module.PROGRAMS:
        if only not in program.composition:
            continue
        try:
            row = await measure(framework, program, url)
        except Exception:
            row = {"composition": program.composition, "tools": program.tools}
            row["error"] = traceback.format_exc()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    # Programs import this module by its name.
    anyio.run(importlib.import_module("tests.coverage.measure").main, *sys.argv[1:])
