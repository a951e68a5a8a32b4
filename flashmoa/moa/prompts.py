"""What an aggregator is told; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = Mapping[str, Any]
Question = str | Sequence[Message]
Layout = Literal["answers-first", "question-first"]

_INSTRUCTION = (
    "Several assistants have answered the user's last message without knowing of each other. "
    "Their answers may contradict each other, and any of them may be wrong, biased or "
    "incomplete. Weigh them against the question and against each other, keep what holds, mend "
    "what does not, and write the one answer that you would stand for. Do not mention that "
    "there were others."
)


@dataclass(frozen=True, slots=True)
class AggregationPrompt:
    """The prompt of aggregators, with a numbered slot for each answer they read.

    Attributes:
        layout: ``answers-first`` is the usual form, with the answers in the system message and
            the conversation after them, which therefore cannot be prefilled before the answers
            are there. ``question-first`` has the conversation first and the answers at its end:
            all but them stands at a fixed position.
        instruction: what to do with the answers.
        heading: what stands before each; ``{number}`` counts from 1.
        closing: what stands after the last one.
    """

    layout: Layout = "answers-first"
    instruction: str = _INSTRUCTION
    heading: str = "\n\nAnswer {number}:\n"
    closing: str = ""

    def title(self, number: int) -> str:
        """What stands before the answer of that number, from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(self, question: Question, slots: Sequence[str]) -> list[dict[str, Any]]:
        """What to send. ``slots``: the answers, each with its title before it, or what stands
        for them."""
        talk = conversation(question)
        system = talk.pop(0)["content"] if talk[0]["role"] == "system" else ""
        answers = "".join(slots) + self.closing
        told = f"{system}\n\n{self.instruction}" if system else self.instruction
        if self.layout == "answers-first":
            return [{"role": "system", "content": told + answers}, *talk]
        last = talk.pop()
        asked = {**last, "content": f"{last['content']}{answers}"}
        return [{"role": "system", "content": told}, *talk, asked]


def conversation(question: Question) -> list[dict[str, Any]]:
    """A question as messages. Raises: ValueError where nobody is asked anything."""
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    talk = [dict(message) for message in question]
    if not talk or talk[-1].get("role") != "user" or not isinstance(talk[-1]["content"], str):
        raise ValueError("the last message of a question is a user's, and its content a text")
    return talk
