"""Hold a debate of three agents in two rounds; then again on a staircase.

Without arguments this starts two tiny models on this machine's CPU. On your own engines:

    python examples/debate.py --engine-a http://HOST:30000 --model-a NAME \\
                              --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from typing import Any

from engines import GUIDE, print_timeline, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa import EngineClient
from flashmoa.moa import Debate, Model, Steps
from flashmoa.observe import Event

QUESTION = (
    "Two people walk for three days, six hours a day, at four kilometres an hour, and take a bus "
    "for another 35 km. How many kilometres is that?"
)


async def main() -> None:
    """Hold the debate round by round, then on a staircase."""
    arguments = two_engine_parser(__doc__, tokens=96).parse_args()
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
        debate = Debate([small, small, large], 2, large, listener=events.append)
        with console.status("two rounds"):
            result = await debate.answer(QUESTION)
        print_timeline(events, console)
        staircase = Debate([small, small, large], 2, large, staircase=Steps())
        with console.status("two rounds on a staircase"):
            staircase_result = await staircase.answer(QUESTION)
    for name, each in (("", result), (" on a staircase", staircase_result)):
        began = each.time_to_first_token
        console.print(f"\nThe answer{name} began after {began:.2f} s:")
        console.print(each.text, markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
