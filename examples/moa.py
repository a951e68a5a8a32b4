"""Answer a question by Mixture-of-Agents: nine proposers, three aggregators, one answer.

Then answer it on a staircase of four agents.

Without arguments this starts two tiny models on this machine's CPU. On your own engines:

    python examples/moa.py --engine-a http://HOST:30000 --model-a NAME \\
                           --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from typing import Any

from engines import GUIDE, print_timeline, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa import EngineClient
from flashmoa.moa import MixtureOfAgents, Model, Staircase
from flashmoa.observe import Event

QUESTION = "What should two people who like walking and food do in three days in Nepal?"


async def main() -> None:
    """Ask a tree of thirteen agents, then a staircase of four."""
    arguments = two_engine_parser(__doc__, tokens=48).parse_args()
    console = Console()
    events: list[Event] = []
    async with (
        two_engines(arguments, GUIDE, console) as (url_a, url_b),
        EngineClient(url_a) as engine_a,
        EngineClient(url_b) as engine_b,
    ):
        sampling: dict[str, Any] = {"max_tokens": arguments.tokens, "temperature": 0.7}
        small = Model(engine_a, arguments.model_a, sampling)
        large = Model(engine_b, arguments.model_b, sampling)
        layers = [[small, small, large] * 3, [small, small, large], [large]]
        mixture = MixtureOfAgents(layers, "9-3-1", listener=events.append)
        with console.status("nine, three, one"):
            result = await mixture.answer(QUESTION)
        print_timeline(events, console)
        console.print(f"\n9-3-1: {result.text}", markup=False, highlight=False)
        staircase = Staircase([small, small, small], large)
        staircase_result = await staircase.answer(QUESTION)
    first, whole = staircase_result.time_to_first_token, staircase_result.seconds
    console.print(f"\nA staircase, its first token after {first:.2f} s of {whole:.2f} s:")
    console.print(staircase_result.text, markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
