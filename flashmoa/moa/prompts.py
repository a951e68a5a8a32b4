"""Build prompts of aggregators (``AggregationPrompt``) and debaters (``DebatePrompt``); pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from flashmoa.moa.settings import Order

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Question = str | Sequence[Message]
Layout = Literal["answers-first", "question-first"]
Memory = Literal["all", "last"]

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
        layout: ``answers-first`` is the usual form: the answers are in the system message, and
            the conversation follows them, so that it cannot be prefilled before the answers are
            complete. ``question-first`` has the conversation first and the answers at its end, so
            that everything but the answers has a fixed position.
        instruction: text before the answers, which tells the model what to do with them.
        heading: text before each answer; ``{number}`` counts from 1.
        closing: text after the last answer.
    """

    layout: Layout = "answers-first"
    instruction: str = _AGGREGATE
    heading: str = "\n\nAnswer {number}:\n"
    closing: str = ""

    def title(self, number: int) -> str:
        """Return the text before an answer, by its number from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(self, question: Question, slots: Sequence[str]) -> Messages:
        """Return the messages to send.

        Args:
            slots: the answers, each with its title before it, or the marks that stand for them.

        Raises: ValueError if :func:`conversation` raises it.
        """
        messages = conversation(question)
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        answers = "".join(slots) + self.closing
        instruction = f"{system}\n\n{self.instruction}" if system else self.instruction
        if self.layout == "answers-first":
            return [{"role": "system", "content": instruction + answers}, *messages]
        *before, last = messages
        after = [{**last, "content": f"{last['content']}{answers}"}]
        if last["role"] == "tool":  # What a tool returned must stay as it is.
            after = [last, {"role": "user", "content": answers.lstrip()}]
        return [{"role": "system", "content": instruction}, *before, *after]


class AnswerForms(NamedTuple):
    """A debater's answer of one round, or its mark, as the debater and as the others read it."""

    own: str
    others: str


@dataclass(frozen=True, slots=True)
class DebatePrompt:
    """The prompts of a debate.

    A debater's own answers are its assistant messages. The user message after each of them has the
    answers of the others.

    Attributes:
        instruction: text before the others' answers, so that it can be prefilled first.
        heading: text before each of these answers; ``{number}`` is the debater's number, from 1.
        absent: text in place of a debater's own answer in a round in which it failed.
        memory: which earlier rounds a prompt has. ``all``, as published, so that it begins with
            the prompt of the round before; or only the ``last`` one, which needs less context.
        staircase_instruction: takes the place of ``instruction`` on a staircase, where answers are
            read before they are complete and a debater's own answer is among the others;
            ``{number}`` is the reader's number.
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
        """Return the text before a debater's answer, by the debater's number from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(
        self, question: Sequence[Message], place: int, rounds: Sequence[Sequence[AnswerForms]]
    ) -> Messages:
        """Return the messages to send to one debater.

        Args:
            question: a conversation.
            place: number of the debater, from 0.
            rounds: the earlier rounds, each with every debater's answer.
        """
        messages = [dict(message) for message in question]
        for answers in self.select_rounds(rounds):
            others = [answer.others for number, answer in enumerate(answers) if number != place]
            messages += [
                {"role": "assistant", "content": answers[place].own},
                {"role": "user", "content": self.instruction + "".join(others)},
            ]
        return messages

    def on_staircase(self, place: int) -> AggregationPrompt:
        """Return the prompt on a staircase of a debater, by its number from 0."""
        instruction = self.staircase_instruction.replace("{number}", str(place + 1))
        return AggregationPrompt("question-first", instruction, self.heading)

    def select_rounds(
        self, rounds: Sequence[Sequence[AnswerForms]]
    ) -> Sequence[Sequence[AnswerForms]]:
        """Return the earlier rounds that the prompt has, by ``memory``."""
        return rounds if self.memory == "all" else rounds[-1:]


def add_role(messages: Sequence[Message], role: str) -> Messages:
    """Return messages whose system message begins with an agent's role; no role changes nothing."""
    copies = [dict(message) for message in messages]
    if not role:
        return copies
    if copies and copies[0]["role"] == "system":
        copies[0]["content"] = f"{role}\n\n{copies[0]['content']}"
        return copies
    return [{"role": "system", "content": role}, *copies]


def conversation(question: Question) -> Messages:
    """Return a question as messages.

    Raises: ValueError if its last message is not a user's or a tool's, or has no string.
    """
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    messages = [dict(message) for message in question]
    if not messages:
        raise ValueError("the question has no messages; its last message must be a user's")
    role, content = messages[-1].get("role"), messages[-1].get("content")
    if role not in ("user", "tool") or not isinstance(content, str):
        raise ValueError(
            f"the last message of the question has role {role!r} and content of type "
            f"{type(content).__name__}; it must have role 'user' or 'tool', and a string"
        )
    return messages


def staircase_messages(
    order: Order,
    prompt: AggregationPrompt,
    question: Sequence[Message],
    rounds: Sequence[Sequence[str]],
) -> Messages:
    """Return an agent's messages in a round on a staircase (Staircase Streaming).

    Args:
        order: see :class:`flashmoa.moa.Steps`.
        rounds: the chunks of all proposers in each round, up to this one. With the order
            ``rounds`` they include their titles, so that an empty chunk has no title.
    """
    if order == "contiguous":
        texts = ["".join(pieces) for pieces in zip(*rounds, strict=True)]
        slots = [f"{prompt.title(n)}{text}" for n, text in enumerate(texts, 1)]
        return prompt.messages(question, slots)
    return prompt.messages(question, [chunk for chunks in rounds for chunk in chunks])


def fair_shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return to which lengths answers must be cut so that all fit into ``room``.

    Short answers stay whole. The room that they do not need goes to the longer ones, which are cut
    to one length (max-min fairness). All numbers have the same unit, tokens or characters.
    """
    shares = [0] * len(lengths)
    left = max(0, room)
    for done, place in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        shares[place] = min(lengths[place], left // (len(lengths) - done))
        left -= shares[place]
    return shares


def cut_answer(text: str, length: int, share: int) -> str:
    """Return the beginning of an answer of ``length`` tokens that has at most ``share`` tokens."""
    if share >= length:
        return text
    # The token at which a text is cut may become two.
    return text[: len(text) * max(0, share - 1) // length]
