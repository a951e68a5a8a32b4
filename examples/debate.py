"""Multi-agent debate: three debaters, three rounds, and a vote; then on a staircase.

Without arguments this starts two tiny models on this machine's CPU. On your own engines:

    python examples/debate.py --engine-a http://HOST:30000 --model-a NAME \\
                              --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

import re
from typing import Any

from engines import GUIDE, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa import EngineClient
from flashmoa.moa import Debate, Model, Steps
from flashmoa.observe import Event
from flashmoa.observe.timeline import draw, lanes

QUESTION = (
    "Two people walk for three days, six hours a day, at four kilometres an hour, and take a bus "
    "for another 35 km. How many kilometres is that? End with the number."
)


def last_number(answer: str) -> str | None:
    """Return what an answer comes to."""
    found = re.findall(r"\d+", answer)
    return found[-1] if found else None


async def main() -> None:
    """Hold the debate round by round, then on a staircase."""
    arguments = two_engine_parser(__doc__, tokens=96).parse_args()
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
        debate = Debate([one, one, other], 3, last_number, listener=events.append)
        with console.status("three rounds"):
            result = await debate.answer(QUESTION)
        console.print(draw(lanes(events), min(console.width, 110)), markup=False, highlight=False)
        staircase = Debate([one, one, other], 3, last_number, staircase=Steps())
        with console.status("three rounds on a staircase"):
            climbed = await staircase.answer(QUESTION)
    for name, one_result in (("", result), (" on a staircase", climbed)):
        assert one_result.vote is not None and one_result.time_to_first_token is not None
        ballots = ", ".join(ballot or "nothing" for ballot in one_result.vote.ballots)
        began = one_result.time_to_first_token
        console.print(f"\nThe last round{name} began after {began:.2f} s and came to {ballots}:")
        console.print(one_result.text, markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
