"""The prompts of aggregators and debaters; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Question = str | Sequence[Message]
Layout = Literal["answers-first", "question-first"]
Memory = Literal["all", "last"]
Order = Literal["contiguous", "rounds", "interleaved"]

_AGGREGATE = (
    "Several assistants have answered the user's last message without knowing of each other. "
    "Their answers may contradict each other, and any of them may be wrong, biased or "
    "incomplete. Weigh them against the question and against each other, keep what holds, mend "
    "what does not, and write the one answer that you would stand for. Do not mention that "
    "there were others."
)
_DEBATE = (
    "Others have answered the same question, each by itself; their answers follow. Any of them "
    "may be wrong, and so may yours. Where they differ from it, find out who is right. Then "
    "answer the question again, as well as you now can, in full and in the same form."
)
_DEBATE_STAIRCASE = (
    "Several debaters have answered the user's last message, each by itself, and you are debater "
    "{number} of them; their answers follow. Any of them may be wrong, and so may yours. Where "
    "they differ, find out who is right. Then answer the user again, as well as you now can, in "
    "full and in the same form."
)


@dataclass(frozen=True, slots=True)
class AggregationPrompt:
    """The prompt of an aggregator, with a numbered slot for each answer it reads.

    Attributes:
        layout: ``answers-first`` is the usual form: the answers stand in the system message and
            the conversation follows them, so it cannot be prefilled before the answers are
            complete. ``question-first`` has the conversation first and the answers at its end:
            everything but the answers stands at a fixed position.
        instruction: says what to do with the answers.
        heading: stands before each answer; ``{number}`` counts from 1.
        closing: stands after the last answer.
    """

    layout: Layout = "answers-first"
    instruction: str = _AGGREGATE
    heading: str = "\n\nAnswer {number}:\n"
    closing: str = ""

    def title(self, number: int) -> str:
        """Return what stands before the answer of that number, from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(self, question: Question, slots: Sequence[str]) -> Messages:
        """Return the messages to send.

        Args:
            slots: the answers, each with its title before it, or the marks that stand for them.

        Raises: ValueError as :func:`conversation`.
        """
        talk = conversation(question)
        system = talk.pop(0)["content"] if talk[0]["role"] == "system" else ""
        answers = "".join(slots) + self.closing
        instruction = f"{system}\n\n{self.instruction}" if system else self.instruction
        if self.layout == "answers-first":
            return [{"role": "system", "content": instruction + answers}, *talk]
        last = talk.pop()
        asked = {**last, "content": f"{last['content']}{answers}"}
        return [{"role": "system", "content": instruction}, *talk, asked]


class AnswerForms(NamedTuple):
    """A debater's answer of one round, or the mark for it, in the forms that prompts have: as
    the debater itself reads it, and as the others do."""

    own: str
    others: str


@dataclass(frozen=True, slots=True)
class DebatePrompt:
    """The prompts of a debate.

    A debater's own answers are its assistant messages; the answers of the others stand together
    in the user message after each.

    Attributes:
        instruction: stands before the others' answers, where it can be prefilled first.
        heading: stands before each of them; ``{number}`` is the debater's, from 1.
        absent: stands for a debater's own answer of a round in which it failed.
        memory: ``all`` earlier rounds, as published, so that a prompt begins with the prompt of
            the round before; or only the ``last`` one, which needs less context.
        staircase_instruction: stands instead of ``instruction`` on a staircase, where answers are
            read before they are complete and a debater's own stands among the others;
            ``{number}`` is the reader's.
        aggregation: the prompt of an aggregator that concludes the debate.
    """

    instruction: str = _DEBATE
    heading: str = "\n\nAnswer of debater {number}:\n"
    absent: str = "I have no answer yet."
    memory: Memory = "all"
    staircase_instruction: str = _DEBATE_STAIRCASE
    aggregation: AggregationPrompt = field(
        default_factory=lambda: AggregationPrompt("question-first")
    )

    def title(self, number: int) -> str:
        """Return what stands before the answer of that debater, from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(
        self, question: Sequence[Message], place: int, rounds: Sequence[Sequence[AnswerForms]]
    ) -> Messages:
        """Return the messages to send to one debater.

        Args:
            question: a conversation.
            place: the debater's, from 0.
            rounds: the earlier rounds, each with every debater's answer.
        """
        talk = [dict(message) for message in question]
        for answers in self.remembered(rounds):
            others = [one.others for number, one in enumerate(answers) if number != place]
            talk += [
                {"role": "assistant", "content": answers[place].own},
                {"role": "user", "content": self.instruction + "".join(others)},
            ]
        return talk

    def on_staircase(self, place: int) -> AggregationPrompt:
        """Return the prompt of a debater, from 0, on a staircase."""
        instruction = self.staircase_instruction.replace("{number}", str(place + 1))
        return AggregationPrompt("question-first", instruction, self.heading)

    def remembered(
        self, rounds: Sequence[Sequence[AnswerForms]]
    ) -> Sequence[Sequence[AnswerForms]]:
        """Return those of the earlier rounds that the prompt has."""
        return rounds if self.memory == "all" else rounds[-1:]


def conversation(question: Question) -> Messages:
    """Return a question as messages. Raises: ValueError if its last message is not a user's."""
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    talk = [dict(message) for message in question]
    if not talk:
        raise ValueError("the question has no messages; its last message must be a user's")
    role, content = talk[-1].get("role"), talk[-1].get("content")
    if role != "user" or not isinstance(content, str):
        raise ValueError(
            f"the last message of the question has role {role!r} and content of type "
            f"{type(content).__name__}; it must have role 'user' and a string"
        )
    return talk


def staircase_messages(
    order: Order,
    prompt: AggregationPrompt,
    question: Sequence[Message],
    rounds: Sequence[Sequence[str]],
    written: Sequence[str],
) -> Messages:
    """Return an agent's messages in a round on a staircase (Staircase Streaming).

    Chunks that are not contiguous have their titles with them, so that an empty one is not
    mentioned.

    Args:
        order: see :class:`flashmoa.moa.Steps`.
        rounds: this round's chunks and those of the rounds before, by proposer.
        written: the agent's own chunk of each round before. Only ``interleaved`` has them in the
            prompt; otherwise they are not part of what is returned.
    """
    if order == "contiguous":
        texts = ["".join(pieces) for pieces in zip(*rounds, strict=True)]
        slots = [f"{prompt.title(n)}{text}" for n, text in enumerate(texts, 1)]
        return prompt.messages(question, slots)
    if order == "rounds":
        return prompt.messages(question, [chunk for chunks in rounds for chunk in chunks])
    talk = prompt.messages(question, rounds[0])
    for chunks, text in zip(rounds[1:], written, strict=True):
        talk += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "".join(chunks)},
        ]
    return talk


def last_words(text: str, count: int = 8) -> str:
    """Return the end of a text, from one of its last words on, with the white space after it.

    A text without spaces between words gives as many characters as ``count`` words may have.
    """
    words = [word.start() for word in re.finditer(r"\S+", text)]
    begin = words[-count] if len(words) > count else 0
    return text[max(begin, len(text) - 10 * count) :]
