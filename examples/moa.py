"""Mixture-of-Agents: nine proposers, three aggregators, one answer; or a staircase.

Without arguments this starts two tiny models on this machine's CPU. On your own engines:

    python examples/moa.py --engine-a http://HOST:30000 --model-a NAME \\
                           --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from typing import Any

from engines import GUIDE, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa import EngineClient
from flashmoa.moa import AggregationPrompt, MixtureOfAgents, Model, Staircase
from flashmoa.observe import Event
from flashmoa.observe.timeline import draw, lanes

QUESTION = "What should two people who like walking and food do in three days in Nepal?"
PROMPT = AggregationPrompt("question-first")


async def main() -> None:
    """Ask a tree of thirteen agents, then a staircase of four."""
    arguments = two_engine_parser(__doc__, tokens=48).parse_args()
    console = Console()
    events: list[Event] = []
    async with (
        two_engines(arguments, GUIDE, console) as (url_a, url_b),
        EngineClient(url_a) as small,
        EngineClient(url_b) as large,
    ):
        sampling: dict[str, Any] = {"max_tokens": arguments.tokens, "temperature": 0.7}
        one = Model(small, arguments.model_a, sampling)
        other = Model(large, arguments.model_b, sampling)
        layers = [[one, one, other] * 3, [one, one, other], [other]]
        mixture = MixtureOfAgents(layers, "9-3-1", prompt=PROMPT, listener=events.append)
        with console.status("nine, three, one"):
            result = await mixture.answer(QUESTION)
        console.print(draw(lanes(events), min(console.width, 110)), markup=False, highlight=False)
        console.print(f"\n9-3-1: {result.text}", markup=False, highlight=False)
        steps = Staircase([one, one, one], other, prompt=PROMPT)
        climbed = await steps.answer(QUESTION)
    first, whole = climbed.time_to_first_token, climbed.seconds
    console.print(f"\nA staircase, its first token after {first:.2f} s of {whole:.2f} s:")
    console.print(climbed.text, markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
