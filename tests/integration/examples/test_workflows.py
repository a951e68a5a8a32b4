"""The programs of examples/ on the session's engines: linked and not, the same answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from flashmoa_bench.duo import greedy
from flashmoa_bench.examples import example
from flashmoa_bench.runs import run_once
from flashmoa_bench.workloads import Duo, Way, play, workloads
from pptx import Presentation

from flashmoa.engine.local import LocalEngine
from flashmoa.errors import FlashMoAError
from flashmoa.linking.link import Ahead
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from flashmoa.workflow import Workflow

pytestmark = pytest.mark.anyio


@pytest.fixture
async def duo(engine: LocalEngine, downstream: LocalEngine) -> AsyncGenerator[Duo]:
    clients = Duo(greedy(engine.url, "small", 8), greedy(downstream.url, "large", 8))
    yield clients
    await clients.close()


async def test_mapreduce(duo: Duo) -> None:
    module = example("mapreduce")
    runs = {
        (mode, sequential): await run_once(
            lambda sequential=sequential: module.build_team(
                duo.small, duo.large, sequential=sequential
            ),
            [duo.small, duo.large],
            module.TASK,
            mode,
        )
        for mode in ("unlinked", "linked")
        for sequential in (False, True)
    }
    said = [{turn.agent: turn.text for turn in run.turns} for run in runs.values()]
    assert all(one == said[0] for one in said) and len(said[0]) == 4
    usage = runs["linked", False].turns[-1].usage
    assert usage is not None and usage.prompt_stream is not None
    assert usage.prompt_stream.status == "hit"


async def test_slides(duo: Duo, tmp_path: Path) -> None:
    module = example("pptagent")
    small, large = duo.small.engine, duo.large.engine
    ways: list[tuple[Ahead, bool]] = [("nothing", False), ("text", False), ("text", True)] * 3
    decks = []
    for ahead, eager in ways:
        # The analyst, who is not linked, may find two characters equally good for a line's end;
        # which one it takes depends on what else is in its batch. Then the next round counts.
        if len([deck for deck in decks if deck.points == decks[0].points]) == 3:
            break
        await duo.flush()
        events: list[Event] = []
        async with Workflow(small, ahead=ahead, listener=events.append) as flow:
            decks.append(await module.present(flow, small, large, topic="for all", eager=eager))
        writers = [call for call in calls(events) if call.agent.startswith("slide")]
        assert len(writers) == module.SLIDES
        hits = [one.usage and one.usage.prompt_stream for one in writers]
        assert all(use.status == "hit" if use else ahead == "nothing" for use in hits)
    same = [deck for deck in decks if deck.points == decks[0].points]
    assert len(same) >= 2 and all(deck == same[0] for deck in same)
    decks[0].save(tmp_path / "slides.pptx")
    slides = Presentation(str(tmp_path / "slides.pptx")).slides
    assert len(slides) == module.SLIDES
    for slide, text, layout in zip(slides, decks[0].slides, decks[0].layouts, strict=True):
        heading, *points = text.splitlines()
        assert slide.slide_layout.name == layout
        assert slide.shapes.title.text == heading.removeprefix("# ")
        assert len(slide.placeholders[1].text_frame.paragraphs) == len(points) == 3


async def test_copies_of_every_workflow_in_every_way(duo: Duo) -> None:
    for workload in workloads():
        ways: list[Way] = ["unlinked", "linked"]
        copies = 1 if workload.name == "pptagent" else 2
        played = [await play(workload, duo, way, copies) for way in ways]
        for one, other in zip(*played, strict=True):
            assert one.texts.keys() == other.texts.keys()
            if one.texts.get("analyst") == other.texts.get("analyst"):
                assert one.texts == other.texts
        assert all(0 < one.response < one.seconds for runs in played for one in runs)


def test_what_an_example_lacks_is_said() -> None:
    with pytest.raises(FlashMoAError, match=r"no examples/unheard\.py"):
        example("unheard")
