"""Compare a real model's answers by prefills alone with its decoded answers (MoE-Prefill §8.6).

The texts are review snippets with people's mean sentiment (Hutto and Gilbert, 2014):
`amazonReviewSnippets_GroundTruth.txt` in `additional_resources/hutto_ICWSM_2014.tar.gz` of the
source distribution of the package vaderSentiment 3.3.2. Nothing is downloaded; give the file. Each
question is asked twice: one prefill gives the answers' probabilities, and a greedily decoded answer
is searched for its first label.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flashmoa.engine import EngineClient
from flashmoa.scoring import Scorer
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import run_concurrently

OURS = "flashmoa"
LABELS = ("positive", "negative")
WORDS = "Is this review positive or negative? Answer with one word."
LETTERS = "A. positive\nB. negative\nAnswer with the letter of one option."
_QUESTIONS = {"words": (WORDS, LABELS), "letters": (LETTERS, ("A", "B"))}


@dataclass(frozen=True, slots=True)
class Snippet:
    """A text, and whether people found it positive."""

    text: str
    positive: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The model's answers about one text.

    Attributes:
        right: the right label: 0 positive, 1 negative.
        scored: the likelier label by the prefill.
        mass: the probability of both labels together.
    """

    right: int
    scored: int
    decoded: int | None
    mass: float


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """A question's figures, as shares of the texts.

    Attributes:
        unread: decoded answers without a label, which count as wrong.
        same: texts with the same label both ways, among decoded answers with a label.
    """

    question: Annotated[str, Column("")]
    texts: Annotated[int, Column("texts")]
    scored: Annotated[float, Column("scored", "{:.1%}")]
    decoded: Annotated[float, Column("decoded", "{:.1%}")]
    unread: Annotated[float, Column("no label", "{:.1%}")]
    same: Annotated[float, Column("same label", "{:.1%}")]
    mass: Annotated[float, Column("mass", "{:.1%}")]


async def _measure(report: Report) -> None:
    options = report.options
    snippets = read(options.file)
    random.Random(options.seed).shuffle(snippets)
    role = Role(OURS, plugin=True, model=options.model)
    async with report.connect([role], 20_000) as engines:
        rows = [
            await _ask_all(engines[OURS], name, snippets[: options.texts], options.tokens)
            for name in _QUESTIONS
        ]
    report.show("Right answers by prefills alone and decoded", rows)
    report.save({"rows": rows})


def read(file: Path) -> list[Snippet]:
    """Read snippets whose sentiment is clear.

    Raises: ValueError if a line is not an id, a number and a text, between tabs.
    """
    snippets: list[Snippet] = []
    text = file.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            _, mean, snippet = line.split("\t", 2)
            sentiment = float(mean)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not an id, a number and a text") from error
        # Sentiments go from -4 to 4; weak ones are neither positive nor negative.
        if abs(sentiment) >= 1:
            snippets.append(Snippet(snippet.strip(), sentiment > 0))
    return snippets


async def _ask_all(
    engine: EngineClient, name: str, snippets: Sequence[Snippet], tokens: int
) -> AccuracyRow:
    question, labels = _QUESTIONS[name]
    scorer = Scorer(engine, template_args={"enable_thinking": False})

    async def ask(snippet: Snippet) -> Outcome:
        messages = [{"role": "user", "content": f"{snippet.text}\n\n{question}"}]
        # A capitalised label is as good an answer, so its probability counts too.
        spellings = {label: [*dict.fromkeys((label, label.capitalize()))] for label in labels}
        scores = await scorer.score(messages, [one for own in spellings.values() for one in own])
        known = dict(zip(scores.candidates, scores.probabilities, strict=True))
        shares = [sum(known[one] for one in spellings[label]) for label in labels]
        settings: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": tokens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        async with engine.chat(messages, **settings) as deltas:
            decoded = "".join([delta.text async for delta in deltas])
        return Outcome(
            right=0 if snippet.positive else 1,
            scored=shares.index(max(shares)),
            decoded=find_label(decoded, labels),
            mass=scores.mass,
        )

    return summarise(name, await run_concurrently(ask, snippets, limit=8))


def find_label(answer: str, labels: Sequence[str]) -> int | None:
    """Return the label that comes first in an answer as a whole word; ``None`` without one."""
    # A one-letter label must be a capital, since "a" is also an article.
    flags = re.IGNORECASE if all(len(label) > 1 for label in labels) else re.NOFLAG
    found = re.search(rf"\b({'|'.join(labels)})\b", answer, flags)
    return [label.lower() for label in labels].index(found[1].lower()) if found else None


def summarise(question: str, outcomes: Sequence[Outcome]) -> AccuracyRow:
    count = len(outcomes)
    read_answers = [one for one in outcomes if one.decoded is not None]
    return AccuracyRow(
        question=question,
        texts=count,
        scored=sum(one.scored == one.right for one in outcomes) / count,
        decoded=sum(one.decoded == one.right for one in outcomes) / count,
        unread=1 - len(read_answers) / count,
        same=sum(one.scored == one.decoded for one in read_answers) / max(1, len(read_answers)),
        mass=sum(one.mass for one in outcomes) / count,
    )


main = command(
    "score_accuracy",
    __doc__,
    _measure,
    [Role(OURS, plugin=True)],
    Option("file", Path, about="the file of snippets"),
    Option("--texts", positive, 300, "the most texts"),
    Option("--tokens", positive, 8, "decoded tokens of an answer"),
    Option("--model", Path, about="folder of the model for an engine made here"),
)
