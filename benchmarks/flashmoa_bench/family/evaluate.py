"""Evaluate how well the family answers and combines answers, on questions held out from training.

``python -m flashmoa_bench.family.evaluate`` measures every size through transformers: accuracy per
grade, alone and as an aggregator, and whether right answers are more confident than wrong ones.
With ``--engine``, SGLang answers some of the questions, too, and the answers are compared.
"""

# torch is not fully typed.
# pyright: basic

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch
from rich.console import Console

from flashmoa.engine.local import local_engines
from flashmoa.moa.prompts import conversation
from flashmoa_bench.family import AGGREGATOR, SIZES, model_folder
from flashmoa_bench.family.inference import MAX_TOKENS, FamilyModel, Reply, staircase_answers
from flashmoa_bench.family.prompts import AGGREGATION, ORDERS, add_titles
from flashmoa_bench.family.questions import (
    GRADES,
    MODULUS,
    OPERANDS,
    Question,
    final_answer,
    is_right,
    line_errors,
    questions,
)

_DRAWS = 3
# Questions of each grade that SGLang answers, too.
_COMPARED = 7
# Sizes of a first chunk: as published, and as in flashmoa bench moa, for short answers.
_FIRST_CHUNKS = (8, 2)

Scores = dict[str, float]
Texts = Sequence[str]


def make_questions(seed: int, count: int) -> list[Question]:
    """Return ``count`` held-out questions of every grade."""
    return [q for grade in GRADES for q in islice(questions(seed, grade, held_out=True), count)]


def accuracy(asked: Sequence[Question], texts: Texts) -> Scores:
    """Return the share of right answers per grade, and of all."""
    right, number = Counter[str](), Counter[str]()
    for question, text in zip(asked, texts, strict=True):
        for name in (question.grade, "all"):
            number[name] += 1
            right[name] += is_right(question, text)
    return {name: round(right[name] / number[name], 3) for name in (*GRADES, "all")}


def line_error_shares(asked: Sequence[Question], texts: Texts) -> Scores:
    """Return the share of wrong lines by operator, and the share of these that are a carry off."""
    errors: dict[str, list[int]] = {operator: [] for operator in OPERANDS}
    for question, text in zip(asked, texts, strict=True):
        for operator, error in line_errors(question, text):
            errors[operator].append(error)
    wrong = [error for each in errors.values() for error in each if error]
    carried = sum(error in (10, MODULUS - 10) for error in wrong) / max(1, len(wrong))
    shares = {name: sum(map(bool, each)) / max(1, len(each)) for name, each in errors.items()}
    return {name: round(share, 3) for name, share in {**shares, "by a carry": carried}.items()}


def confidence_auc(asked: Sequence[Question], replies: Sequence[Reply]) -> float | None:
    """Return how often a right answer is more confident than a wrong one (AUC).

    ``None`` unless there are answers of both kinds.
    """
    confidences: dict[bool, list[float]] = {True: [], False: []}
    for question, reply in zip(asked, replies, strict=True):
        confidences[is_right(question, reply.text)].append(reply.confidence)
    right, wrong = torch.tensor(confidences[True])[:, None], torch.tensor(confidences[False])
    if not len(right) or not len(wrong):
        return None
    return round(((right > wrong) + (right == wrong) / 2).mean().item(), 3)


def majority_answer(texts: Texts) -> str:
    """Return an answer with the result of most texts; in a draw, with the first such result."""
    results = Counter(result for text in texts if (result := final_answer(text)))
    return f"Answer: {results.most_common(1)[0][0]}" if results else ""


def evaluate(
    models: dict[str, FamilyModel], asked: Sequence[Question], temperature: float
) -> dict[str, Any]:
    """Evaluate every size alone, and the aggregator on all sizes' answers at ``temperature``."""
    prompts = [conversation(question.text) for question in asked]
    alone = {size: model.answer(prompts) for size, model in models.items()}
    drawn = _draw_answers(models, asked, temperature)
    three, nine = _group_by_question(drawn)
    return {
        "alone": {size: accuracy(asked, _texts(replies)) for size, replies in alone.items()},
        "alone, drawn": {size: accuracy(asked, draws[0]) for size, draws in drawn.items()},
        "wrong lines, drawn": {
            size: line_error_shares(asked, draws[0]) for size, draws in drawn.items()
        },
        "AUC of confidence": {
            size: confidence_auc(asked, replies) for size, replies in alone.items()
        },
        "majority of 3": accuracy(asked, [majority_answer(texts) for texts in three]),
        "majority of 9": accuracy(asked, [majority_answer(texts) for texts in nine]),
        "aggregator": evaluate_aggregator(models[AGGREGATOR], asked, three, nine),
    }


def evaluate_aggregator(
    model: FamilyModel, asked: Sequence[Question], three: Sequence[Texts], nine: Sequence[Texts]
) -> dict[str, Scores]:
    """Return an aggregator's accuracy on three and nine answers, and on a staircase with nine."""
    scores = dict[str, Scores]()
    for name, answers in (("3 answers", three), ("9 answers", nine)):
        for layout, prompt in AGGREGATION.items():
            prompts = [
                prompt.messages(question.text, add_titles(prompt, texts))
                for question, texts in zip(asked, answers, strict=True)
            ]
            scores[f"{name}, {layout}"] = accuracy(asked, _texts(model.answer(prompts)))
    for order in ORDERS:
        scores[f"9 answers, staircase, {order}"] = accuracy(
            asked, staircase_answers(model, asked, nine, order)
        )
    return scores


def evaluate_staircases(
    models: dict[str, FamilyModel], asked: Sequence[Question], temperature: float
) -> dict[str, Scores]:
    """Return the accuracy on a staircase with three and nine answers, by first chunk and order."""
    scores = dict[str, Scores]()
    for answers in _group_by_question(_draw_answers(models, asked, temperature)):
        for first in _FIRST_CHUNKS:
            for order in ORDERS:
                name = f"{len(answers[0])} answers, first chunk {first}, {order}"
                replies = staircase_answers(models[AGGREGATOR], asked, answers, order, first)
                scores[name] = accuracy(asked, replies)
    return scores


def _draw_answers(
    models: dict[str, FamilyModel], asked: Sequence[Question], temperature: float
) -> dict[str, list[list[str]]]:
    """Return several answers of every size to every question: by size, draw and question."""
    prompts = [conversation(question.text) for question in asked]
    return {
        size: [_texts(model.answer(prompts, temperature)) for _ in range(_DRAWS)]
        for size, model in models.items()
    }


def _group_by_question(drawn: dict[str, list[list[str]]]) -> tuple[list[Texts], list[Texts]]:
    """Return the first draws of every size, and all draws, by question."""
    three = zip(*(draws[0] for draws in drawn.values()), strict=True)
    nine = zip(*(draw for draws in drawn.values() for draw in draws), strict=True)
    return list(three), list(nine)


def _texts(replies: Sequence[Reply]) -> list[str]:
    return [reply.text for reply in replies]


async def count_same_in_engine(
    folder: Path, asked: Sequence[Question], replies: Sequence[Reply]
) -> int:
    """Count the answers that an SGLang engine on this machine gives in the same words."""
    async with local_engines() as engines, httpx.AsyncClient(timeout=120) as client:
        engine = await engines.start(folder, core=0, arguments=["--max-total-tokens", "8192"])
        same = 0
        for question, expected in zip(asked, replies, strict=True):
            body = {
                "model": "family",
                "messages": conversation(question.text),
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            response = await client.post(f"{engine.url}/v1/chat/completions", json=body)
            choice = response.raise_for_status().json()["choices"][0]
            same += choice["message"]["content"] == expected.text
        return same


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, help="a folder with a folder per size")
    parser.add_argument("--count", type=int, default=200, help="questions of each grade")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--staircases", action="store_true", help="evaluate staircases by their first chunk only"
    )
    parser.add_argument("--engine", action="store_true", help="compare with SGLang, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    root: Path | None = arguments.models
    folders = {size: root / size if root else model_folder(size) for size in SIZES}
    models = {size: FamilyModel(folder) for size, folder in folders.items() if folder.exists()}
    asked = make_questions(arguments.seed, arguments.count)
    measure = evaluate_staircases if arguments.staircases else evaluate
    report: dict[str, Any] = {
        "questions of each grade": arguments.count,
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        **measure(models, asked, arguments.temperature),
    }
    if arguments.engine:
        some = make_questions(arguments.seed, _COMPARED)
        prompts = [conversation(question.text) for question in some]
        report[f"of {len(some)} the same in SGLang"] = {
            size: anyio.run(count_same_in_engine, folders[size], some, model.answer(prompts))
            for size, model in models.items()
        }
    Console().print_json(data=report)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
