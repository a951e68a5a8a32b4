"""Write recorded coding agents as a trace that SGLang's own benchmark replays.

``python -m flashmoa_bench.recorded.trace TOKENIZER_FOLDER FILE`` writes a file for ``--dataset-name
agentic-trace`` of ``sglang.benchmark.serving``: first prompts and tools' results, in random
words, with the recorded lengths. The engine writes the answers.
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

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


def single_tokens(vocabulary: Iterable[str]) -> list[str]:
    """Return the words that are one token each after a space."""
    return sorted(match[1] for token in vocabulary if (match := _WORD.fullmatch(token)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the trace of ``--agents`` agents, each in words of its own."""
    from tokenizers import Tokenizer

    parser = ArgumentParser(description=__doc__, prog="flashmoa_bench.recorded.trace")
    parser.add_argument("tokenizer", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("file", type=Path, help="the trace to write")
    parser.add_argument("--agents", type=int, default=96, help="24 are recorded, and repeated")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    words = single_tokens(tokenizer.get_vocab())
    dice = random.Random(0)
    agents = islice(cycle(load_agents()), options.agents)
    conversations = [conversation(turns, words, dice) for turns in agents]
    options.file.write_text(json.dumps({"conversations": conversations}))


if __name__ == "__main__":
    main()
