"""Derive the statistics of ``answers.json`` from published answers.

``python -m flashmoa_bench.recorded.derive --alpaca-eval FOLDER --gsm8k FILE --tokenizer FILE``

The published sets are ``results`` of github.com/tatsu-lab/alpaca_eval, and
``grade_school_math/data/example_model_solutions.jsonl`` of github.com/openai/grade-school-math.
Answers are compared as early exit compares them, by :class:`flashmoa.moa.LocalEmbedder`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio

from flashmoa.moa import LocalEmbedder
from flashmoa.moa.early_exit import frobenius_cosine, to_features
from flashmoa_bench.datasets.files import import_package
from flashmoa_bench.recorded import FILE, RecordedQuestion, pack

# Models of three sizes, three of each, so that several proposers of one size differ.
_ALPACA_MODELS = {
    "small": ("Qwen1.5-7B-Chat", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3.1-8B-Instruct-Turbo"),
    "medium": ("Qwen1.5-14B-Chat", "Mixtral-8x7B-Instruct-v0.1", "Yi-34B-Chat"),
    "large": ("Qwen1.5-72B-Chat", "Meta-Llama-3-70B-Instruct", "Qwen2-72B-Instruct"),
}
_GSM8K_MODELS = {
    "small": ("6b_finetuning",),
    "medium": ("6b_verification",),
    "large": ("175b_finetuning", "175b_verification"),
}
# A question's text, and its answers by size.
_Texts = tuple[str, dict[str, list[str]]]


def main() -> None:
    """Write the statistics of both sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alpaca-eval", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--gsm8k", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="tokenizer.json")
    parser.add_argument("--questions", type=int, default=200, help="of each set, drawn")
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    tokenizers: Any = import_package("tokenizers", "counting tokens", "tokenizers")
    statistics = _Statistics(tokenizers.Tokenizer.from_file(str(arguments.tokenizer)))
    sets = {
        "alpaca_eval": _describe(
            "github.com/tatsu-lab/alpaca_eval, results/MODEL/model_outputs.json (Apache-2.0)",
            _ALPACA_MODELS,
            statistics.of(_read_alpaca_eval(arguments.alpaca_eval), arguments.questions),
        ),
        "gsm8k": _describe(
            "github.com/openai/grade-school-math, example_model_solutions.jsonl (MIT)",
            _GSM8K_MODELS,
            statistics.of(_read_gsm8k(arguments.gsm8k), arguments.questions),
        ),
    }
    head = {
        "tokenizer": arguments.tokenizer.parent.name,
        "similarity": "Frobenius cosine of all-MiniLM-L6-v2's states of tokens, in thousandths",
        "questions": "number in the set, tokens of the question, tokens of each answer, similarity "
        "of each pair of answers (1 and 2, 1 and 3, ..., 2 and 3, ...)",
    }
    arguments.out.write_text(_to_json({**head, "sets": sets}))


def _describe(
    source: str, models: Mapping[str, Sequence[str]], questions: Sequence[RecordedQuestion]
) -> dict[str, Any]:
    return {"source": source, "models": models, "questions": [pack(each) for each in questions]}


def _to_json(document: dict[str, Any]) -> str:
    """Return readable JSON with one line for each question."""
    lines: dict[str, str] = {}
    for name, one in document["sets"].items():
        for number, row in enumerate(one["questions"]):
            lines[f'"{name} {number}"'] = json.dumps(row, separators=(",", ":"))
        one["questions"] = [f"{name} {number}" for number in range(len(one["questions"]))]
    text = json.dumps(document, indent=1)
    for mark, line in lines.items():
        text = text.replace(mark, line, 1)
    return text + "\n"


def _read_alpaca_eval(folder: Path) -> list[_Texts]:
    """Return the questions that all models have answered."""
    by_model: dict[str, dict[str, str]] = {}
    for model in (model for models in _ALPACA_MODELS.values() for model in models):
        rows = json.loads((folder / model / "model_outputs.json").read_text())
        by_model[model] = {row["instruction"]: row["output"] for row in rows}
    first = by_model[_ALPACA_MODELS["small"][0]]
    return [
        (
            question,
            {
                size: [by_model[model].get(question, "") for model in models]
                for size, models in _ALPACA_MODELS.items()
            },
        )
        for question in first
    ]


def _read_gsm8k(file: Path) -> list[_Texts]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        (
            row["question"],
            {
                size: [row[model]["solution"] for model in models]
                for size, models in _GSM8K_MODELS.items()
            },
        )
        for row in rows
    ]


class _Statistics:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._embedder = LocalEmbedder()

    def of(self, texts: Sequence[_Texts], count: int) -> list[RecordedQuestion]:
        """Return the statistics of ``count`` questions; one with an empty answer is left out."""
        complete = [
            number
            for number, (_, answers) in enumerate(texts)
            if all(text.strip() for several in answers.values() for text in several)
        ]
        chosen = sorted(random.Random(0).sample(complete, min(count, len(complete))))
        return [self._question(number, *texts[number]) for number in chosen]

    def _question(
        self, number: int, question: str, answers: dict[str, list[str]]
    ) -> RecordedQuestion:
        flat = [text for several in answers.values() for text in several]
        features = [to_features(anyio.run(self._embedder.embed, text)) for text in flat]
        return RecordedQuestion(
            number,
            self._count(question),
            {size: [self._count(text) for text in several] for size, several in answers.items()},
            {
                (one, other): frobenius_cosine(features[one], features[other])
                for one, other in combinations(range(len(flat)), 2)
            },
        )

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


if __name__ == "__main__":
    main()
