"""Let members answer and rank each other's answers, and a chairman write the result (``Council``).

The form is that of Karpathy's llm-council, with the structured comparison of OpenRouter's Fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, Unpack

from pydantic import BaseModel, ValidationError

from flashmoa.moa.models import Model
from flashmoa.moa.prompts import ChairPrompt, ReviewPrompt
from flashmoa.moa.results import AgentAnswer, Result
from flashmoa.moa.run import System, SystemSettings
from flashmoa.moa.settings import Quorum
from flashmoa.moa.topology import Topology

_Form = TypeVar("_Form", bound=BaseModel)


class Review(BaseModel):
    """A member's review: a remark on each answer, and the answers' numbers, the best first."""

    remarks: list[str]
    ranking: list[int]


class Comparison(BaseModel):
    """A judge's comparison of the answers, in sentences."""

    consensus: list[str]
    contradictions: list[str]
    blind_spots: list[str]


class Council(System):
    """Lets members answer a question, and rank all answers without knowing the authors.

    Meanwhile a judge compares the answers. A chairman reads everything and writes the result.

    Args:
        members: at least two models. Each answers, and then ranks all answers, also its own.
        chairman: the model that writes the result.
        judge: the model that compares the answers; by default the chairman's.
        review: the prompt of members and judge after the answers.
        prompt: the chairman's prompt.
        quorum: how many members' answers suffice after some time.

    Raises: ValueError if there are fewer than two members.
    """

    def __init__(
        self,
        members: Sequence[Model],
        chairman: Model,
        *,
        judge: Model | None = None,
        review: ReviewPrompt | None = None,
        prompt: ChairPrompt | None = None,
        quorum: Quorum | None = None,
        **settings: Unpack[SystemSettings],
    ) -> None:
        count = len(members)
        if count < 2:
            raise ValueError(f"a council needs at least two members; there are {count}")
        reviewers = [member.with_sampling(_in_form(Review, count)) for member in members]
        reviewers.append((judge or chairman).with_sampling(_in_form(Comparison, count)))
        answers, reviews = tuple(range(count)), tuple(range(count + 1))
        super().__init__(
            [members, reviewers, [chairman]],
            Topology((((),) * count, (answers,) * (count + 1), (reviews,))),
            [review or ReviewPrompt(), prompt or ChairPrompt()],
            [quorum, None],
            settings=settings,
        )
        self.answering_layers = 1

    def verdict(self, result: Result) -> Mapping[str, Any]:
        """Return the ranking of the answers, the best first, and the judge's comparison.

        ``ranking`` has each complete answer's ``agent`` and ``model``, its ``mean_place`` from 1
        and the number of ``votes``. A ranking that is not valid, or a comparison, does not count.
        """
        answers, reviews = result.layers[:2]
        votes = [_read(Review, review) for review in reviews[:-1]]
        places = count_places([vote.ranking for vote in votes if vote is not None], answers)
        ranking = [
            {
                "agent": answer.name,
                "model": answer.model,
                "mean_place": sum(own) / len(own) if own else None,
                "votes": len(own),
            }
            for answer, own in places
        ]
        comparison = _read(Comparison, reviews[-1])
        return {
            "ranking": ranking,
            "comparison": None if comparison is None else comparison.model_dump(),
        }


def count_places(
    rankings: Sequence[Sequence[int]], answers: Sequence[AgentAnswer]
) -> list[tuple[AgentAnswer, list[int]]]:
    """Return the complete answers, the best first, each with its place in every ranking.

    Answers are ordered by their mean place. Answers without a vote are last.

    Args:
        rankings: numbers of answers, from 1, the best first. A ranking counts if it has every
            complete answer; other numbers in it are left out, and of repeated ones the first is
            kept.
    """
    numbers = [number for number, answer in enumerate(answers, 1) if answer.is_complete]
    places: dict[int, list[int]] = {number: [] for number in numbers}
    for ranking in rankings:
        kept = [number for number in dict.fromkeys(ranking) if number in places]
        if len(kept) == len(numbers):
            for place, number in enumerate(kept, 1):
                places[number].append(place)
    found = [(answers[number - 1], own) for number, own in places.items()]
    return sorted(found, key=lambda one: sum(one[1]) / len(one[1]) if one[1] else float("inf"))


def _in_form(form: type[BaseModel], count: int) -> dict[str, Any]:
    """Return the parameter that makes an engine answer in a form; ``count`` answers are ranked."""
    schema = form.model_json_schema()
    if form is Review:
        number = {"enum": list(range(1, count + 1))}
        schema["properties"]["ranking"] |= {"items": number, "minItems": count, "maxItems": count}
        schema["properties"]["remarks"] |= {"maxItems": count}
    named = {"name": form.__name__.lower(), "schema": {**schema, "additionalProperties": False}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _read(form: type[_Form], review: AgentAnswer) -> _Form | None:
    """Return a review; ``None`` if it failed or is not valid."""
    with suppress(ValidationError):
        return form.model_validate_json(review.text) if review.is_complete else None
    return None
