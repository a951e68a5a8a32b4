"""How well the family answers and combines answers, on questions held out from its training.

``python -m flashmoa_bench.family.evaluate`` measures every size through transformers: accuracy
per grade, alone and as an aggregator, and whether confidence tells right answers from wrong.
``--engine`` asks SGLang some of the questions, too, and compares what it says.
"""

# torch does not tell all of its types.
# pyright: basic

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch
from rich.console import Console

from flashmoa.engine.local import local_engines
from flashmoa.moa.chunks import CHARACTERS_PER_TOKEN, Schedule
from flashmoa.moa.prompts import Order, conversation, last_words
from flashmoa_bench.family import AGGREGATOR, SIZES, model_folder
from flashmoa_bench.family.inference import FamilyModel, Reply
from flashmoa_bench.family.prompts import AGGREGATION, ORDERS, along, titled
from flashmoa_bench.family.questions import (
    GRADES,
    MODULUS,
    OPERANDS,
    Question,
    final_answer,
    is_right,
    questions,
    slips,
)

_DRAWS = 3
_COMPARED = 7
_LONGEST = 64
# First chunks: as published, and as flashmoa bench moa has for these models' short answers.
_FIRST_CHUNKS = (8, 2)

Scores = dict[str, float]
Texts = Sequence[str]


def questions_of(seed: int, count: int) -> list[Question]:
    """Return ``count`` held-out questions of every grade."""
    return [q for grade in GRADES for q in islice(questions(seed, grade, held_out=True), count)]


def accuracy(asked: Sequence[Question], texts: Sequence[str]) -> Scores:
    """Return the share of right answers per grade, and of all."""
    right, number = Counter[str](), Counter[str]()
    for question, text in zip(asked, texts, strict=True):
        for name in (question.grade, "all"):
            number[name] += 1
            right[name] += is_right(question, text)
    return {name: round(right[name] / number[name], 3) for name in (*GRADES, "all")}


def line_errors(asked: Sequence[Question], texts: Sequence[str]) -> Scores:
    """Return the share of wrong lines by operator, and of these that off by a carry."""
    off: dict[str, list[int]] = {operator: [] for operator in OPERANDS}
    for question, text in zip(asked, texts, strict=True):
        for operator, by in slips(question, text):
            off[operator].append(by)
    wrong = [by for each in off.values() for by in each if by]
    carried = sum(by in (10, MODULUS - 10) for by in wrong) / max(1, len(wrong))
    shares = {name: sum(map(bool, each)) / max(1, len(each)) for name, each in off.items()}
    return {name: round(share, 3) for name, share in {**shares, "by a carry": carried}.items()}


def ranking(asked: Sequence[Question], replies: Sequence[Reply]) -> float | None:
    """Return the AUC: how often a right answer is more confident than a wrong one.

    ``None`` without answers of both kinds.
    """
    sides: dict[bool, list[float]] = {True: [], False: []}
    for question, answer in zip(asked, replies, strict=True):
        sides[is_right(question, answer.text)].append(answer.confidence)
    right, wrong = torch.tensor(sides[True])[:, None], torch.tensor(sides[False])
    if not len(right) or not len(wrong):
        return None
    return round(((right > wrong) + (right == wrong) / 2).mean().item(), 3)


def majority(texts: Sequence[str]) -> str:
    """Return an answer with what most of the texts end with; in a draw, with the first of them."""
    finals = Counter(final for text in texts if (final := final_answer(text)))
    return f"Answer: {finals.most_common(1)[0][0]}" if finals else ""


def evaluate(
    models: dict[str, FamilyModel], asked: Sequence[Question], temperature: float
) -> dict[str, Any]:
    """Evaluate every size alone, and the aggregator on what all of them say at ``temperature``."""
    prompts = [conversation(question.text) for question in asked]
    alone = {size: model.say(prompts) for size, model in models.items()}
    drawn = {
        size: [_texts(model.say(prompts, temperature)) for _ in range(_DRAWS)]
        for size, model in models.items()
    }
    three, nine = _together(drawn)
    return {
        "alone": {size: accuracy(asked, _texts(replies)) for size, replies in alone.items()},
        "alone, drawn": {size: accuracy(asked, draws[0]) for size, draws in drawn.items()},
        "wrong lines, drawn": {size: line_errors(asked, draws[0]) for size, draws in drawn.items()},
        "AUC of confidence": {size: ranking(asked, replies) for size, replies in alone.items()},
        "majority of 3": accuracy(asked, [majority(texts) for texts in three]),
        "majority of 9": accuracy(asked, [majority(texts) for texts in nine]),
        "aggregator": combined(models[AGGREGATOR], asked, three, nine),
    }


def combined(
    model: FamilyModel, asked: Sequence[Question], three: Sequence[Texts], nine: Sequence[Texts]
) -> dict[str, Scores]:
    """Return an aggregator's accuracy on three and nine answers, and on a staircase with nine."""
    scores = dict[str, Scores]()
    for name, answers in (("3 answers", three), ("9 answers", nine)):
        for layout, prompt in AGGREGATION.items():
            prompts = [
                prompt.messages(question.text, titled(prompt, texts))
                for question, texts in zip(asked, answers, strict=True)
            ]
            scores[f"{name}, {layout}"] = accuracy(asked, _texts(model.say(prompts)))
    for order in ORDERS:
        scores[f"9 answers, staircase, {order}"] = accuracy(
            asked, staircase_answers(model, asked, nine, order)
        )
    return scores


def staircase_answers(
    model: FamilyModel,
    asked: Sequence[Question],
    answers: Sequence[Texts],
    order: Order,
    first: int = 8,
    *,
    served: bool = False,
) -> list[str]:
    """Return what an aggregator writes along with answers, in rounds as ``Staircase`` has them.

    Args:
        first: of the chunks, in tokens of ``CHARACTERS_PER_TOKEN``.
        served: begin each interleaved turn with the last words of those before, as ``Staircase``
            does and examples do not.
    """
    prompt = AGGREGATION["question-first"]
    replies: list[list[str]] = [[] for _ in asked]
    turns: list[list[str]] = [[] for _ in asked]
    most = max(len(text) for texts in answers for text in texts)
    for number in count(1):
        sizes = list(islice(Schedule(first), number))
        room = sum(sizes) * CHARACTERS_PER_TOKEN
        before = room - sizes[-1] * CHARACTERS_PER_TOKEN
        if before >= most:
            break
        lasts = [all(len(text) <= room for text in texts) for texts in answers]
        for last in (False, True):
            rows = [
                row
                for row, texts in enumerate(answers)
                # Not over yet: something was still missing in the round before.
                if lasts[row] == last and any(len(text) > before for text in texts)
            ]
            prompts = [
                along(order, prompt, asked[row].text, answers[row], sizes, turns[row])
                for row in rows
            ]
            begun = ["".join(replies[row]) for row in rows]
            if order == "interleaved":
                begun = [last_words(text) if served else "" for text in begun]
            longest = _LONGEST if last else sizes[-1]
            for row, start, one in zip(
                rows, begun, model.say(prompts, 0.0, begun, longest), strict=True
            ):
                replies[row].append(one.text)
                turns[row].append(start + one.text if order == "interleaved" else one.text)
    return ["".join(texts) for texts in replies]


def staircases(
    models: dict[str, FamilyModel], asked: Sequence[Question], temperature: float
) -> dict[str, Scores]:
    """Return the accuracy on a staircase with three and nine answers, by first chunk and order."""
    prompts = [conversation(question.text) for question in asked]
    drawn = {
        size: [_texts(model.say(prompts, temperature)) for _ in range(_DRAWS)]
        for size, model in models.items()
    }
    ways: list[tuple[Order, bool]] = [(order, False) for order in ORDERS]
    ways.append(("interleaved", True))
    scores = dict[str, Scores]()
    for answers in _together(drawn):
        for first in _FIRST_CHUNKS:
            for order, served in ways:
                name = f"{len(answers[0])} answers, first chunk {first}, {order}"
                replies = staircase_answers(
                    models[AGGREGATOR], asked, answers, order, first, served=served
                )
                scores[name + " as served" * served] = accuracy(asked, replies)
    return scores


def _together(drawn: dict[str, list[list[str]]]) -> tuple[list[Texts], list[Texts]]:
    """Return the first draws of every size, and all draws, by question."""
    three = zip(*(draws[0] for draws in drawn.values()), strict=True)
    nine = zip(*(draw for draws in drawn.values() for draw in draws), strict=True)
    return list(three), list(nine)


def _texts(replies: Sequence[Reply]) -> list[str]:
    return [answer.text for answer in replies]


async def same_in_engine(folder: Path, asked: Sequence[Question], replies: Sequence[Reply]) -> int:
    """Count the answers that an SGLang engine on this machine gives word for word."""
    async with local_engines() as engines, httpx.AsyncClient(timeout=120) as client:
        engine = await engines.start(folder, core=0, arguments=["--max-total-tokens", "8192"])
        same = 0
        for question, answer in zip(asked, replies, strict=True):
            body = {
                "model": "family",
                "messages": conversation(question.text),
                "temperature": 0,
                "max_tokens": 64,
            }
            reply = await client.post(f"{engine.url}/v1/chat/completions", json=body)
            reply.raise_for_status()
            same += reply.json()["choices"][0]["message"]["content"] == answer.text
        return same


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, help="a folder with a folder per size")
    parser.add_argument("--count", type=int, default=200, help="questions of each grade")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--staircases", action="store_true", help="only how staircases depend on first chunks"
    )
    parser.add_argument("--engine", action="store_true", help="compare with SGLang, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    given: Path | None = arguments.models
    folders = {size: given / size if given else model_folder(size) for size in SIZES}
    models = {size: FamilyModel(folder) for size, folder in folders.items() if folder.exists()}
    asked = questions_of(arguments.seed, arguments.count)
    measure = staircases if arguments.staircases else evaluate
    report: dict[str, Any] = {
        "questions of each grade": arguments.count,
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        **measure(models, asked, arguments.temperature),
    }
    if arguments.engine:
        some = questions_of(arguments.seed, _COMPARED)
        prompts = [conversation(question.text) for question in some]
        report[f"of {len(some)} the same in SGLang"] = {
            size: anyio.run(same_in_engine, folders[size], some, model.say(prompts))
            for size, model in models.items()
        }
    Console().print_json(data=report)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
