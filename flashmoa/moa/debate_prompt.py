"""What debaters are told; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from flashmoa.moa.prompts import AggregationPrompt

Memory = Literal["all", "last"]

_INSTRUCTION = (
    "Others have answered the same question, each by itself; their answers follow. Any of them "
    "may be wrong, and so may yours. Where they differ from it, find out who is right. Then "
    "answer the question again, as well as you now can, in full and in the same form."
)

_TOGETHER = (
    "Several debaters have answered the user's last message, each by itself, and you are debater "
    "{number} of them; their answers follow. Any of them may be wrong, and so may yours. Where "
    "they differ, find out who is right. Then answer the user again, as well as you now can, in "
    "full and in the same form."
)


class Told(NamedTuple):
    """One debater's answer of a round, or what stands for it: as itself is told it, and as the
    others are."""

    own: str
    others: str


@dataclass(frozen=True, slots=True)
class DebatePrompt:
    """The prompts of a debate: its own answers are a debater's assistant messages, and the
    others' stand together in the user message after each.

    Attributes:
        instruction: stands before the others' answers, where it can be prefilled first.
        heading: stands before each of them; ``{number}`` is the debater's, from 1.
        absent: what a debater is told to have said where it failed.
        memory: ``all`` rounds before, as published, so that a prompt goes on where that of the
            round before ended; or the ``last`` one only, which needs less context.
        together: stands instead of ``instruction`` on a staircase, where answers are read before
            they are complete, and a debater's own stands among the others'; ``{number}`` is its.
        aggregation: what an aggregator is told in the end.
    """

    instruction: str = _INSTRUCTION
    heading: str = "\n\nAnswer of debater {number}:\n"
    absent: str = "I have no answer yet."
    memory: Memory = "all"
    together: str = _TOGETHER
    aggregation: AggregationPrompt = field(
        default_factory=lambda: AggregationPrompt("question-first")
    )

    def title(self, number: int) -> str:
        """What stands before the answer of that debater, from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(
        self, question: Sequence[dict[str, Any]], place: int, told: Sequence[Sequence[Told]]
    ) -> list[dict[str, Any]]:
        """What to send to one debater.

        Args:
            question: a conversation.
            place: the debater's, from 0.
            told: every debater's answers of the rounds before.
        """
        talk = list(question)
        for answers in self.read(told):
            others = [one.others for number, one in enumerate(answers) if number != place]
            talk += [
                {"role": "assistant", "content": answers[place].own},
                {"role": "user", "content": self.instruction + "".join(others)},
            ]
        return talk

    def seat(self, place: int) -> AggregationPrompt:
        """What a debater, from 0, is told on a staircase."""
        told = self.together.replace("{number}", str(place + 1))
        return AggregationPrompt("question-first", told, self.heading)

    def read(self, told: Sequence[Sequence[Told]]) -> Sequence[Sequence[Told]]:
        """Those rounds that are remembered."""
        return told if self.memory == "all" else told[-1:]
