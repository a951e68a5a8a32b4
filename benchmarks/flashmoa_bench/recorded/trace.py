"""Write recorded coding agents as a trace that others' benchmarks replay.

``python -m flashmoa_bench.recorded.trace TOKENIZER_FOLDER FILE`` writes a file for ``--dataset-name
agentic-trace`` of ``sglang.benchmark.serving``: first prompts and tools' results, in random
words, with the recorded lengths. The engine writes the answers. With ``--aiperf``, the file is for
``--custom-dataset-type multi_turn`` of NVIDIA's AIPerf, and has the tools' times, too: the engine
writes answers of the recorded lengths, and each answer calls a tool.
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from flashmoa_bench.link.coding_agents import (
    AGENTS_OPTIONS,
    AROUND,
    calling_a_tool,
    chosen_agents,
    longest_answer,
)
from flashmoa_bench.recorded import RecordedTurn, load_agents

# A word with the space before it, as byte-level and SentencePiece vocabularies spell it.
_WORD = re.compile(r"[Ġ▁]([a-z]{2,12})")


def conversation(
    turns: Sequence[RecordedTurn], words: Sequence[str], dice: random.Random
) -> list[dict[str, Any]]:
    """Return an agent's turns: the text that each adds, with one token for each word."""
    added = [turns[0].prompt, *(turn.result for turn in turns[:-1])]
    texts = [" ".join(dice.choices(words, k=max(1, tokens))) for tokens in added]
    return [
        {"messages": [{"role": "user", "content": text}], "prompt_tokens": turn.prompt}
        for turn, text in zip(turns, texts, strict=True)
    ]


def session(
    name: str, turns: Sequence[RecordedTurn], words: Sequence[str], dice: random.Random
) -> dict[str, Any]:
    """Return an agent as a line of AIPerf's file; see :func:`conversation`."""
    first, *others = turns
    # The chat template adds the other tokens.
    first = replace(first, prompt=first.prompt - AROUND.prompt)
    shorter = [replace(turn, result=turn.result - AROUND.result) for turn in (first, *others)]
    delays = [0.0, *(turn.gap * 1000 for turn in turns)]
    rows = [
        {
            "text": added["messages"][0]["content"],
            "delay": delay,
            "output_length": longest_answer(turn.answer),
            "extra": calling_a_tool(turn.answer),
        }
        for turn, added, delay in zip(
            shorter, conversation(shorter, words, dice), delays, strict=False
        )
    ]
    return {"session_id": name, "turns": rows}


def single_tokens(vocabulary: Iterable[str]) -> list[str]:
    """Return the words that are one token each after a space."""
    return sorted(match[1] for token in vocabulary if (match := _WORD.fullmatch(token)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the trace of ``--agents`` agents, each in words of its own."""
    from tokenizers import Tokenizer

    parser = ArgumentParser(description=__doc__, prog="flashmoa_bench.recorded.trace")
    parser.add_argument("tokenizer", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("file", type=Path, help="the trace to write")
    parser.add_argument("--aiperf", action="store_true", help="write a file for AIPerf")
    about = "multiplies the tools' times, for a modelled GPU that is slowed down"
    parser.add_argument("--slowdown", type=float, default=1.0, help=about)
    for option in AGENTS_OPTIONS:
        option.add_to(parser)
    parser.set_defaults(agents=24)
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    words = single_tokens(tokenizer.get_vocab())
    dice = random.Random(0)
    if options.aiperf:
        agents = [
            [replace(turn, gap=turn.gap * options.slowdown) for turn in turns]
            for turns in chosen_agents(options)
        ]
        lines = [
            session(f"agent-{number}", turns, words, dice) for number, turns in enumerate(agents)
        ]
        options.file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return
    recorded = islice(cycle(load_agents()), options.agents)
    conversations = [conversation(turns, words, dice) for turns in recorded]
    options.file.write_text(json.dumps({"conversations": conversations}))


if __name__ == "__main__":
    main()
