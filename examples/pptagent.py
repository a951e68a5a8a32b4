"""Turn a paper into slides, linked: one outline, twelve writers at once, a .pptx at the end.

An analyst on engine A reads a paper and writes an outline of twelve slides. Twelve writers on
engine B, which share their instructions and the paper, write a slide each, while a designer on
engine A chooses the slides' layouts. (FlashAgents §6.3; there the analyst and the designer are
vision models.) The program uses the plain API, without an agent framework. Engine B prefills the
paper once, while the analyst still reads it, and each point of the outline while it is written.

Without arguments this starts two tiny models on this machine's CPU. On your own engines:

    python examples/pptagent.py --engine-a http://HOST:30000 --model-a NAME \\
                                --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import PAPER, print_timeline, run_program, two_engine_parser, two_engines
from pptx import Presentation
from rich.console import Console

from flashmoa import Answer, EngineClient, Text, Workflow
from flashmoa.observe import Event

SLIDES = 12
LAYOUTS = ("Title and Content", "Section Header", "Content with Caption")

ANALYST = f"You read papers and outline talks. The outline has {SLIDES} lines, one for each slide."
WRITER = "You write slides of a talk about the paper above: a heading, then three points."
DESIGNER = f"You choose the layout of each slide of a talk: {', '.join(LAYOUTS)}."

# Regular expressions that even an untrained model's answers match.
_NUMBER = re.compile(r"\d+\. ")
_LINE = r"[^\x00-\x1f]{12,40}"
_OUTLINE = "".join(rf"{number}\. {_LINE}\n" for number in range(1, SLIDES + 1))
_SLIDE = rf"# [^\x00-\x1f]{{10,30}}\n(- {_LINE}\n){{3}}"
_CHOICES = "".join(rf"{number}\. ({'|'.join(LAYOUTS)})\n" for number in range(1, SLIDES + 1))


@dataclass(frozen=True, slots=True)
class Deck:
    """The points of an outline, with the text and the layout of a slide for each."""

    points: tuple[str, ...]
    slides: tuple[str, ...]
    layouts: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Write the talk as a PowerPoint file."""
        presentation = Presentation()
        layouts = {layout.name: layout for layout in presentation.slide_layouts}
        for text, layout in zip(self.slides, self.layouts, strict=True):
            heading, *points = text.splitlines()
            slide = presentation.slides.add_slide(layouts[layout])
            slide.shapes.title.text = heading.removeprefix("# ")
            body = slide.placeholders[1].text_frame
            body.text = "\n".join(point.removeprefix("- ") for point in points)
        presentation.save(str(path))


async def present(
    flow: Workflow, analyst: EngineClient, writer: EngineClient, *, topic: str
) -> Deck:
    """Write a talk about the paper."""
    paper = PAPER.read_text()
    outline = flow.ask(
        _make_messages(f"{paper}\n\n{ANALYST}", f"Outline a talk {topic}."),
        engine=analyst,
        name="analyst",
        **_make_sampling(_OUTLINE, 900),
    )
    points = [flow.text(f"point {number}") for number in range(1, SLIDES + 1)]
    slides = [
        flow.ask(
            _make_messages(f"{paper}\n\n{WRITER}", f"Write the slide about this point: {point}"),
            engine=writer,
            name=f"slide {number}",
            **_make_sampling(_SLIDE, 300),
        )
        for number, point in enumerate(points, 1)
    ]
    layouts = flow.ask(
        _make_messages(DESIGNER, f"The outline:\n{outline}"),
        engine=analyst,
        name="designer",
        **_make_sampling(_CHOICES, 400),
    )
    await _split(outline, points)
    return Deck(
        points=tuple([await point for point in points]),
        slides=tuple([await slide for slide in slides]),
        layouts=tuple(line.split(". ", 1)[1] for line in (await layouts).splitlines()),
    )


def _make_messages(system: str, task: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": task}]


def _make_sampling(pattern: str, tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "regex": pattern}


async def _split(outline: Answer, points: Sequence[Text]) -> None:
    """Write each line of the outline, without its number, into its point as it arrives."""
    remaining, line = iter(points), ""
    point = next(remaining)
    async for piece in outline:
        *complete_lines, line = (line + piece).split("\n")
        for complete_line in complete_lines:
            _write_rest(point, complete_line)
            point = next(remaining, point)
        _write_rest(point, line)
    for point in points:
        point.close()


def _write_rest(point: Text, line: str) -> None:
    """Write the part of the outline's line, without its number, that ``point`` does not have."""
    number = _NUMBER.match(line)
    if number is not None:
        point.write(line[number.end() :].removeprefix(point.written))


async def main() -> None:
    """Write the slides, print the timeline and save the file."""
    parser = two_engine_parser(__doc__, tokens=0)
    parser.add_argument("--out", type=Path, default=Path("slides.pptx"))
    arguments = parser.parse_args()
    console = Console()
    events: list[Event] = []
    async with (
        two_engines(arguments, PAPER, console) as (url_a, url_b),
        EngineClient(url_a) as small,
        EngineClient(url_b) as large,
        Workflow(small, listener=events.append) as flow,
    ):
        with console.status("writing slides"):
            deck = await present(flow, small, large, topic="for engineers")
    print_timeline(events, console)
    deck.save(arguments.out)
    console.print(f"{len(deck.slides)} slides: {arguments.out}")


if __name__ == "__main__":
    run_program(main)
