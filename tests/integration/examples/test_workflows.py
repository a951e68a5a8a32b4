"""Test that the programs of examples/ and the measured workflows are the same linked."""

import importlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from flashmoa_bench.workflows.agents import REVIEW, SLIDES, mapreduce, slides
from flashmoa_bench.workflows.benchmark import (
    Clients,
    WorkflowWay,
    agent_workflows,
    greedy_client,
    play,
)
from pptx import Presentation

from flashmoa.engine.local import LocalEngine
from flashmoa.link.link import Ahead
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from flashmoa.workflow import Workflow
from tests.conftest import ROOT
from tests.integration.frameworks.autogen.runs import run_once
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the folder of the examples to the path, since they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture
async def clients(engine: LocalEngine, downstream: LocalEngine) -> AsyncGenerator[Clients]:
    pair = Clients(greedy_client(engine.url, "small", 8), greedy_client(downstream.url, "large", 8))
    yield pair
    await pair.close()


async def test_the_chain_example_is_the_same_in_every_mode(
    clients: Clients, tmp_path: Path
) -> None:
    example: Any = importlib.import_module("chain")
    comparison: Any = importlib.import_module("comparison")
    both = [clients.small, clients.large]
    runs = [
        await comparison.run_once(example.build_team(*both), both, example.TASK, mode, ahead)
        for mode, ahead in example.MODES.items()
    ]
    assert all(run.texts == runs[0].texts for run in runs)
    compared = comparison.Comparison(runs)
    compared.save(tmp_path / "chain.json")
    assert compared.sentences()[0].startswith("linked took")
    assert '"same_text": true' in (tmp_path / "chain.json").read_text()
    usage = runs[-1].calls[-1].usage
    assert usage.prompt_stream.status == "hit"


def demo_arguments(clients: Clients, tmp_path: Path, *more: str) -> list[str]:
    engines = ["--engine-a", clients.small.engine.url, "--engine-b", clients.large.engine.url]
    return ["chain.py", *engines, "--json", str(tmp_path / "chain.json"), *more]


async def test_the_demo_compares_as_many_rounds_as_it_says(
    clients: Clients,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example: Any = importlib.import_module("chain")
    arguments = demo_arguments(clients, tmp_path, "--tokens", "8", "--repeats", "2")
    monkeypatch.setattr("sys.argv", arguments)
    await example.main()
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 rounds, with 8 of 8 tokens of an answer, should fit into 4 minutes" in printed
    assert "Same text in all 6 runs: yes" in printed
    results = json.loads((tmp_path / "chain.json").read_text())
    assert [len(mode["every_seconds"]) for mode in results["modes"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("first", "minutes"), [("unlinked", "0"), ("unlinked", "0.01"), ("linked", "0.01")]
)
async def test_a_demo_whose_time_is_over_ends_and_leaves_idle_engines(
    first: str, minutes: str, clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 0.6 s no engine writes four answers of a thousand tokens."""
    example: Any = importlib.import_module("chain")
    monkeypatch.setattr(example, "MODES", {first: example.MODES[first]})
    arguments = demo_arguments(clients, tmp_path, "--tokens", "1000", "--minutes", minutes)
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match=r"Not one round .* give more --minutes"):
        await example.main()
    for client in (clients.small, clients.large):
        await wait_until_idle(client.engine)


async def test_the_mapreduce_example_is_the_same_linked(clients: Clients) -> None:
    example: Any = importlib.import_module("mapreduce")
    both = [clients.small, clients.large]
    runs = [
        await example.run_once(example.build_team(*both), both, example.TASK, mode, ahead)
        for mode, ahead in {"unlinked": "nothing", "linked": "text"}.items()
    ]
    said = [{call.agent: call.finished.text for call in run.calls} for run in runs]
    assert said[0] == said[1] and len(said[0]) == 4


async def test_measured_mapreduce_is_the_same_parallel_and_sequential(clients: Clients) -> None:
    runs = {
        (mode, sequential): await run_once(
            lambda sequential=sequential: mapreduce(
                lambda agent: clients.of(agent, 0), sequential=sequential
            ),
            [clients.small, clients.large],
            REVIEW,
            mode,
        )
        for mode in ("unlinked", "linked")
        for sequential in (False, True)
    }
    said = [{call.agent: call.text for call in run.calls} for run in runs.values()]
    assert all(one == said[0] for one in said) and len(said[0]) == 4
    usage = runs["linked", False].calls[-1].usage
    assert usage is not None and usage.prompt_stream is not None
    assert usage.prompt_stream.status == "hit"


async def test_measured_slides_are_the_same_in_every_way(clients: Clients) -> None:
    small, large = clients.small.engine, clients.large.engine
    ways: list[tuple[Ahead, bool]] = [("nothing", False), ("text", False), ("text", True)] * 3
    talks: list[tuple[str, list[str]]] = []
    for ahead, eager in ways:
        # Two characters may be equally likely at the end of a line of the analyst, who is not
        # linked; the batch then decides between them. In that case the next round counts.
        if len([talk for talk in talks if talk[0] == talks[0][0]]) == 3:
            break
        await clients.flush()
        events: list[Event] = []
        async with Workflow(small, ahead=ahead, listener=events.append) as flow:
            texts = await slides(flow, small, large, topic="for all", eager=eager)
        made = calls(events)
        (outline,) = [one.finished.text for one in made if one.agent == "analyst" and one.finished]
        talks.append((outline, texts))
        writers = [call for call in made if call.agent.startswith("slide")]
        assert len(writers) == len(texts) == SLIDES
        hits = [one.usage and one.usage.prompt_stream for one in writers]
        assert all(use.status == "hit" if use else ahead == "nothing" for use in hits)
    same = [talk for talk in talks if talk[0] == talks[0][0]]
    assert len(same) >= 2 and all(talk == same[0] for talk in same)


async def test_the_slides_example_writes_a_file(clients: Clients, tmp_path: Path) -> None:
    example: Any = importlib.import_module("pptagent")
    small, large = clients.small.engine, clients.large.engine
    async with Workflow(small) as flow:
        deck = await example.present(flow, small, large, topic="for all")
    deck.save(tmp_path / "slides.pptx")
    slides = Presentation(str(tmp_path / "slides.pptx")).slides
    assert len(slides) == len(deck.points) == example.SLIDES
    for slide, text, layout in zip(slides, deck.slides, deck.layouts, strict=True):
        heading, *points = text.splitlines()
        assert slide.slide_layout.name == layout
        assert slide.shapes.title.text == heading.removeprefix("# ")
        body: Any = slide.placeholders[1]
        assert len(body.text_frame.paragraphs) == len(points) == 3


async def test_copies_of_measured_workflows_are_the_same_linked(clients: Clients) -> None:
    for workflow in agent_workflows():
        ways: list[WorkflowWay] = ["unlinked", "linked"]
        copies = 1 if workflow.name == "pptagent" else 2
        played = [await play(workflow, clients, way, copies) for way in ways]
        for one, other in zip(*played, strict=True):
            assert one.texts.keys() == other.texts.keys()
            if one.texts.get("analyst") == other.texts.get("analyst"):
                assert one.texts == other.texts
        assert all(0 < one.response < one.seconds for runs in played for one in runs)
