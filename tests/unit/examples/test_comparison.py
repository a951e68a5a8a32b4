"""Test what the demo says of its runs, and how many it takes."""

import asyncio
import importlib
import json
import re
from argparse import Namespace
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flashmoa.engine import PromptUsage
from flashmoa.observe import Event
from tests.conftest import ROOT
from tests.unit.events import answered

NOISE = "no difference that this machine's noise lets us see"
ONE_ROUND = "one round proves nothing beyond equal texts"
AGENTS = ("planner", "local", "language", "summary")

times = st.floats(0.01, 1000)
rounds_of_times = st.lists(times, min_size=1, max_size=5)


@pytest.fixture(scope="module", autouse=True)
def _examples() -> Generator[None]:
    """Add the folder of the examples to the path, since they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield


@pytest.fixture(scope="module")
def comparison(_examples: None) -> Any:
    return importlib.import_module("comparison")


def make_run(
    mode: str = "unlinked",
    prefill: float = 2.5,
    decode: float = 2.0,
    written: int = 40,
    text: str = "words",
    *,
    has_tokens: bool = True,
) -> Any:
    """A run of four agents, whose answers take equally long."""
    events: list[Event] = []
    usage, seconds = PromptUsage(prompt_tokens=900, completion_tokens=written), prefill + decode
    for number, agent in enumerate(AGENTS):
        at = 1000.0 + number * seconds
        token = at + prefill if has_tokens else None
        events += answered(agent, at, token, at + seconds, text=text, usage=usage)
    run = importlib.import_module("comparison").Run
    return run(mode, len(AGENTS) * seconds, tuple(events))


@pytest.mark.parametrize(
    ("linked", "other", "said"),
    [
        ([11.2, 11.0, 11.1], [16.6, 16.5, 16.9], "33% less time"),
        ([20.1, 20.0, 20.3], [16.6, 16.5, 16.9], "linked was SLOWER, it took 21% more time"),
        # The spread stands beside each median.
        (
            [13.2, 12.9, 13.8],
            [13.1, 12.8, 13.5],
            f"linked took 13.20 s (12.90 to 13.80), unlinked 13.10 s (12.80 to 13.50): {NOISE}",
        ),
        ([11.0, 11.1, 18.0], [16.6, 16.5, 16.9], NOISE),
        ([11.0, 12.0], [12.0, 13.0], NOISE),
        ([11.0], [16.5], ONE_ROUND),
        ([20.0], [16.5], ONE_ROUND),
    ],
)
def test_what_is_said_of_two_modes(
    linked: list[float], other: list[float], said: str, comparison: Any
) -> None:
    found = comparison.compare("linked", linked, "unlinked", other)
    assert found.endswith(f": {said}") or found == said


@given(rounds_of_times, rounds_of_times, times, st.randoms())
def test_what_is_said_depends_on_the_times_only(
    comparison: Any, seconds: list[float], others: list[float], more: float, random: Any
) -> None:
    said = comparison.compare("linked", seconds, "warmed", others)
    assert "-" not in said
    assert "%" not in said or len(re.findall(r"s \([\d.]+ to [\d.]+\)", said)) == 2
    # Another round leaves noise as noise.
    again = comparison.compare("linked", [*seconds, more], "warmed", others)
    assert not said.endswith(NOISE) or again.endswith(NOISE)
    for each in (seconds, others):
        random.shuffle(each)
    assert comparison.compare("linked", seconds, "warmed", others) == said
    # Swapped modes swap the finding.
    end = said.partition(": ")[2]
    swapped = comparison.compare("warmed", others, "linked", seconds).partition(": ")[2]
    assert ("less time" in end) == ("SLOWER" in swapped)
    assert ("SLOWER" in end) == ("less time" in swapped)
    assert (end in (NOISE, ONE_ROUND)) == (end == swapped)


def size(comparison: Any, run: Any, seconds: float, rounds: int = 3, tokens: int = 40) -> Any:
    return comparison.choose_size(run, 3, rounds, tokens, seconds=seconds)


def test_a_slow_machine_takes_fewer_rounds(comparison: Any) -> None:
    """With 63 s a run, the machine once took 12 minutes."""
    assert size(comparison, make_run(), seconds=200) == (3, 40)
    rounds, tokens = size(comparison, make_run(prefill=7.75, decode=8), seconds=0.9 * (240 - 63))
    assert rounds == 1 and 8 <= tokens < 40
    assert size(comparison, make_run(prefill=20, decode=20), seconds=80)[0] == 0
    # A run of 10 tokens takes 18 s. Only fewer than 10 tokens take less time.
    run = make_run(written=10)
    assert size(comparison, run, seconds=54, rounds=1) == (1, 40)
    assert size(comparison, run, seconds=53, rounds=1)[1] < 10


@given(
    prefill=st.floats(0, 30),
    decode=st.floats(0, 30),
    rounds=st.integers(1, 5),
    tokens=st.integers(1, 60),
    seconds=st.floats(0, 300),
)
def test_what_is_chosen_fits_and_no_more_would(
    comparison: Any, prefill: float, decode: float, rounds: int, tokens: int, seconds: float
) -> None:
    run = make_run(prefill=prefill, decode=decode, written=tokens)
    slack = 1e-6 * (1 + seconds)

    def takes(rounds: int, shorter: int) -> float:
        return rounds * 3 * len(AGENTS) * (prefill + decode * shorter / tokens)

    chosen, shorter = size(comparison, run, seconds, rounds, tokens)
    fewest = min(8, tokens)
    assert 0 <= chosen <= rounds and fewest <= shorter <= tokens
    assert takes(chosen, shorter) <= seconds + slack
    assert chosen == rounds or takes(chosen + 1, fewest) > seconds - slack
    assert chosen == 0 or shorter == tokens or takes(chosen, shorter + 1) > seconds - slack


@pytest.fixture
def measured(comparison: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each run of ``measure``, whose ninth run does not end."""
    taken: list[int] = []

    @asynccontextmanager
    async def two_clients(_arguments: Any, _urls: Any, tokens: int, **_: Any) -> AsyncGenerator:
        yield (tokens, tokens)

    async def run_once(_team: Any, clients: Sequence[int], _task: str, mode: str, _: Any) -> Any:
        taken.append(clients[0])
        if len(taken) == 9:
            await anyio.sleep_forever()
        return make_run(mode, prefill=0.01, decode=0.03)

    monkeypatch.setattr(comparison, "two_clients", two_clients)
    monkeypatch.setattr(comparison, "run_once", run_once)
    return taken


async def test_an_unfinished_round_is_not_counted(
    comparison: Any, measured: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """All runs after the first have the same number of tokens, fewer than the first run."""
    arguments = Namespace(tokens=40, repeats=3, minutes=0.02)
    modes = {"unlinked": "nothing", "warmed": "known", "linked": "text"}
    runs = await comparison.measure(
        lambda *_: None, ["", ""], "task", modes, arguments, Console(width=200)
    )
    first, *others = measured
    assert first == 40 and len(set(others)) == 1 and others[0] < 40
    assert f"3 of 3 rounds, with {others[0]} of 40 tokens of an answer" in capsys.readouterr().out
    assert [run.mode for run in runs] == [*modes, "warmed", "linked", "unlinked"]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the demo's ``main``, which finds the given runs measured."""
    example: Any = importlib.import_module("chain")
    engines = ["--engine-a", "http://a", "--engine-b", "http://b"]
    file = tmp_path / "chain.json"
    monkeypatch.setattr("sys.argv", ["chain.py", *engines, "--json", str(file)])

    async def main(runs: list[Any]) -> dict[str, Any]:
        monkeypatch.setattr(example, "measure", AsyncMock(return_value=runs))
        try:
            await example.main()
        finally:
            results = json.loads(file.read_text())
        return results

    return main


async def test_a_slower_linked_demo_succeeds(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    modes = [("unlinked", 2), ("linked", 3)] * 3
    results = await demo([make_run(mode, prefill) for mode, prefill in modes])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Linked took 20.00 s (20.00 to 20.00), unlinked 16.00 s" in printed
    assert "linked was SLOWER, it took 25% more time." in printed
    assert [mode["every_seconds"] for mode in results["modes"]] == [[16] * 3, [20] * 3]


async def test_a_demo_whose_texts_differ_fails(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        await demo([make_run(), make_run("linked", text="other words")])
    assert status.value.code == 1
    assert "Same text in all 2 runs: NO" in capsys.readouterr().out


async def test_answers_in_one_piece_hide_nothing(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    results = await demo([make_run(mode, has_tokens=False) for mode in ("unlinked", "linked")])
    assert [one["hidden_fraction"] for one in results["modes"][1]["handoffs"]] == [None] * 3
    assert "Decoding can hide prefills of 0% of the unlinked time." in capsys.readouterr().out


class Writer(BaseChatAgent):
    """Writes until its token is cancelled."""

    produced_message_types = ()

    def __init__(self) -> None:
        super().__init__("writer", "Writes.")
        self.writes = asyncio.Event()

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Any:
        self.writes.set()
        writing = asyncio.ensure_future(asyncio.Event().wait())
        cancellation_token.link_future(writing)
        await writing

    async def on_reset(self, cancellation_token: Any) -> None:
        pass


async def test_a_cancelled_run_ends_its_team_first(comparison: Any) -> None:
    writer, before = Writer(), asyncio.all_tasks()
    async with anyio.create_task_group() as group:
        group.start_soon(comparison.run_team, RoundRobinGroupChat([writer]), "a task")
        await writer.writes.wait()
        group.cancel_scope.cancel()
    assert asyncio.all_tasks() == before
