"""Build prompts of aggregators and debaters, and cut answers into chunks while they are written.

In each round of a staircase (Staircase Streaming, arXiv 2510.05059), a reader's prompt grows by the
next chunk of every answer (``ChunkedText``, ``GrowingPrompt``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

from flashmoa import Text, UpstreamCancelled, Workflow
from flashmoa.link.streamed_text import StreamedText
from flashmoa.moa.results import MixtureFailed, common_refusal, describe
from flashmoa.moa.settings import Steps

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Question = str | Sequence[Message]
Layout = Literal["answers-first", "question-first"]
Memory = Literal["all", "last"]
# How readers read an answer: the text before it, and the text in place of both if it is left out.
AnswerForm = tuple[str, str]
# For each earlier round or layer: every answer in all its forms, or their marks.
Rounds = Sequence[Sequence[tuple[str, ...]]]

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
_REVIEW = (
    "Several assistants have answered the user's last message, each by itself. You review their "
    "answers, whose authors you do not know. Judge what they say, not how long or how sure it is."
)
_RANK = (
    "\n\nRank the answers. Give a remark of one sentence on each, and then the numbers of all "
    'answers, the best first, as JSON: {"remarks": [...], "ranking": [...]}'
)
_COMPARE = (
    "\n\nCompare the answers, without merging them: what all or most of them say, where they "
    "contradict each other, and what none of them has considered. Each item is a sentence. Answer "
    'as JSON: {"consensus": [...], "contradictions": [...], "blind_spots": [...]}'
)
_CHAIR = (
    "Several assistants have answered the user's last message, each by itself. They have ranked "
    "all answers without knowing the authors, and a judge has compared the answers. Any of it may "
    "be wrong. Decide every contradiction, close the gaps, and write the one answer that you would "
    "stand for. Do not mention the answers, the rankings or the comparison."
)
_ADVISE = (
    "You advise the assistant that writes the next message. Only that assistant can call tools. "
    "Say in words what it should do or answer next, and why. It has these tools:\n"
)


@dataclass(frozen=True, slots=True)
class AggregationPrompt:
    """The prompt of an aggregator. It has a numbered slot for each answer that the agent reads.

    Attributes:
        layout: ``question-first`` puts the answers at the end, so everything else is prefilled
            before an answer begins. ``answers-first``, the form of the first Mixture-of-Agents
            (Wang et al. 2024), puts the answers into the system message. The conversation follows
            them, so it cannot be prefilled before the answers are complete.
        instruction: text before the answers that says what to do with them.
        heading: text before each answer; ``{number}`` counts from 1.
        closing: text after the last answer.
    """

    layout: Layout = "question-first"
    instruction: str = _AGGREGATE
    heading: str = "\n\nAnswer {number}:\n"
    closing: str = ""
    has_all_rounds: ClassVar[bool] = False

    def title(self, number: int) -> str:
        """Return the text before an answer, by its number from 1."""
        return self.heading.replace("{number}", str(number))

    def messages(self, question: Question, answers: Sequence[str]) -> Messages:
        """Return the messages to send.

        Args:
            answers: each answer, or its mark, after its title.

        Raises: ValueError if :func:`conversation` raises it.
        """
        messages = conversation(question)
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        read = "".join(answers) + self.closing
        instruction = f"{system}\n\n{self.instruction}" if system else self.instruction
        if self.layout == "answers-first":
            return [{"role": "system", "content": instruction + read}, *messages]
        *before, last = messages
        after = [{**last, "content": f"{last['content']}{read}"}]
        if last["role"] == "tool":  # What a tool returned must stay as it is.
            after = [last, {"role": "user", "content": read.lstrip()}]
        return [{"role": "system", "content": instruction}, *before, *after]

    def forms(self, places: Sequence[int]) -> list[list[AnswerForm]]:
        """Return the form of each answer at these places of a layer."""
        return [[(self.title(number), "")] for number in range(1, len(places) + 1)]

    def for_reader(self, question: Messages, place: int, rounds: Rounds) -> Messages:
        """Return the messages for the agent at a place; it reads the last of the rounds."""
        return self.messages(question, [answer for (answer,) in rounds[-1]])

    def on_staircase(self, place: int) -> AggregationPrompt:
        """Return the prompt on a staircase of the agent at a place."""
        return self


@dataclass(frozen=True, slots=True)
class ReviewPrompt(AggregationPrompt):
    """The prompt of a council's reviewers: each member ranks the answers, a judge compares them.

    All reviewers' prompts are the same up to ``closing``, so an engine computes that part once.

    Attributes:
        closing: what the members are asked after the answers.
        comparison: what the judge is asked instead. The judge is the last agent of the layer.
    """

    instruction: str = _REVIEW
    closing: str = _RANK
    comparison: str = _COMPARE
    has_all_rounds: ClassVar[bool] = True

    def for_reader(self, question: Messages, place: int, rounds: Rounds) -> Messages:
        """Return the messages for a member, or for the judge, whose place follows the members'."""
        answers = [answer for (answer,) in rounds[0]]
        prompt = self if place < len(answers) else replace(self, closing=self.comparison)
        return prompt.messages(question, answers)


@dataclass(frozen=True, slots=True)
class ChairPrompt(AggregationPrompt):
    """The prompt of a council's chairman: the answers, the members' rankings and the comparison.

    Attributes:
        ranking_heading: text before each ranking; ``{number}`` counts from 1.
        comparison_heading: text before the judge's comparison.
    """

    instruction: str = _CHAIR
    ranking_heading: str = "\n\nRanking {number}:\n"
    comparison_heading: str = "\n\nComparison:\n"
    has_all_rounds: ClassVar[bool] = True

    def forms(self, places: Sequence[int]) -> list[list[AnswerForm]]:
        """Return the form of each ranking, and of the comparison, which is the last text."""
        numbers = range(1, len(places))
        rankings = [self.ranking_heading.replace("{number}", str(number)) for number in numbers]
        return [[(title, "")] for title in (*rankings, self.comparison_heading)]

    def for_reader(self, question: Messages, place: int, rounds: Rounds) -> Messages:
        """Return the messages with the texts of all rounds."""
        return self.messages(question, [text for texts in rounds for (text,) in texts])


@dataclass(frozen=True, slots=True)
class DebatePrompt:
    """The prompts of a debate.

    A debater's own answers are its assistant messages. The user message after each own answer has
    the other debaters' answers.

    Attributes:
        instruction: text before the others' answers, so that it can be prefilled first.
        heading: text before each of the others' answers; ``{number}`` is the debater, from 1.
        absent: text in place of a debater's own answer if it failed.
        memory: which earlier rounds a prompt has. ``all``, as published: the prompt begins with the
            debater's previous prompt. ``last`` needs less context.
        staircase_instruction: takes the place of ``instruction`` on a staircase, where a debater's
            own incomplete answer is among the numbered answers; ``{number}`` is the reader.
        aggregation: the prompt of the aggregator.
    """

    instruction: str = _DEBATE
    heading: str = "\n\nAnswer of debater {number}:\n"
    absent: str = "I have no answer yet."
    memory: Memory = "all"
    staircase_instruction: str = _DEBATE_STAIRCASE
    aggregation: AggregationPrompt = field(default_factory=AggregationPrompt)

    @property
    def has_all_rounds(self) -> bool:
        """Return whether a prompt has the answers of all earlier rounds."""
        return self.memory == "all"

    def title(self, number: int) -> str:
        """Return the text before a debater's answer, by the debater's number from 1."""
        return self.heading.replace("{number}", str(number))

    def forms(self, places: Sequence[int]) -> list[list[AnswerForm]]:
        """Return the form of each answer for its debater, and the form for the others."""
        return [[("", self.absent), (self.title(place + 1), "")] for place in places]

    def for_reader(self, question: Messages, place: int, rounds: Rounds) -> Messages:
        """Return the messages for one debater, by its place from 0."""
        messages = [dict(message) for message in question]
        for answers in rounds if self.has_all_rounds else rounds[-1:]:
            others = [other for number, (_, other) in enumerate(answers) if number != place]
            messages += [
                {"role": "assistant", "content": answers[place][0]},
                {"role": "user", "content": self.instruction + "".join(others)},
            ]
        return messages

    def on_staircase(self, place: int) -> AggregationPrompt:
        """Return the prompt on a staircase of a debater, by its place from 0."""
        instruction = self.staircase_instruction.replace("{number}", str(place + 1))
        return AggregationPrompt(instruction=instruction, heading=self.heading)


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

    Raises: ValueError if a message has no role, or no content and is no assistant's, or if the last
        message is not a user's or a tool's, or has no text.
    """
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    messages = [_joined(message, place) for place, message in enumerate(question)]
    if not messages:
        raise ValueError("the question has no messages; its last message must be a user's")
    role, content = messages[-1].get("role"), messages[-1].get("content")
    if role not in ("user", "tool") or not isinstance(content, str):
        raise ValueError(
            f"the last message of the question has role {role!r} and content of type "
            f"{type(content).__name__}; it must have role 'user' or 'tool', and a string"
        )
    return messages


def _joined(message: Message, place: int) -> dict[str, Any]:
    """Return a copy of a message. Its parts become one text, unless a part is no text."""
    role: Any = message.get("role")
    content: Any = message.get("content")
    # OpenAI's form of several parts.
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts: list[Any] = [cast("Any", part).get("text") for part in parts if isinstance(part, dict)]
    if texts and len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
        content = "\n".join(texts)
    has_content = isinstance(content, str | list) or (role == "assistant" and content is None)
    if not isinstance(role, str) or not has_content:
        raise ValueError(
            f"messages[{place}] of the question has role {role!r} and content of type "
            f"{type(cast('object', content)).__name__}; it must have a role and a text"
        )
    return {**message, "content": content} if "content" in message else {**message}


def transcript(question: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Return a conversation for agents that have no tools.

    The results of tools become texts of the user, after the calls. With ``tools``, the system
    message says that the agent advises, and names the tools.
    """
    messages = [dict(message) for message in question]
    if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        messages = _without_tools(messages)
    if not tools:
        return messages
    named = "\n".join(map(_describe_tool, tools))
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
    return [{"role": "system", "content": f"{system}\n\n{_ADVISE}{named}".lstrip()}, *messages]


def _without_tools(messages: Messages) -> Messages:
    """Return messages whose calls are texts, with one user message for results in a row."""
    texts: Messages = []
    # Ids are unique within a turn only: some engines count each turn's calls from 0.
    calls: dict[Any, Mapping[str, Any]] = {}
    for message in messages:
        calls |= {call.get("id"): call for call in message.pop("tool_calls", None) or ()}
        if message["role"] == "tool":
            call = calls.get(message.get("tool_call_id"), {})
            called = call.get("function") or call.get("custom") or {"name": "a tool"}
            given = called.get("arguments") or called.get("input") or ""
            result = f"Result of {called['name']}({given}):\n{message['content']}"
            message = {"role": "user", "content": result}
        if message["role"] == "assistant" and not message.get("content"):
            continue  # The message had nothing but calls.
        if texts and texts[-1]["role"] == message["role"] == "user":
            # Some chat templates need roles that alternate.
            contents = texts[-1].get("content"), message.get("content")
            texts[-1]["content"] = "\n\n".join(filter(None, contents))
        else:
            texts.append(message)
    return texts


def _describe_tool(tool: Mapping[str, Any]) -> str:
    named = tool.get("function") or tool.get("custom") or tool
    return f"- {named.get('name')}: {named.get('description') or 'no description'}"


def fair_shares(lengths: Sequence[int], room: int | None) -> list[int]:
    """Return the length of each answer after cutting all to fit ``room``; ``None``: cut nothing.

    Short answers stay whole. The longer answers get the rest of the room, and are cut to one length
    (max-min fairness). All numbers have the same unit, tokens or characters.
    """
    if room is None:
        return [*lengths]
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
    # The token at the cut may become two tokens.
    return text[: len(text) * max(0, share - 1) // length]


@dataclass(slots=True)
class ChunkedText:
    """Cuts a text into chunks, one for each round of a staircase. Each chunk is a separate text.

    A chunk ends with the part of the text that brings its last token.

    Args:
        tokens: number of tokens of each part of ``source``, which grows before ``source`` does.
        title: text before each chunk.

    Attributes:
        problem: why the text ended before it was complete; empty if it did not.
    """

    flow: Workflow
    source: StreamedText
    tokens: Sequence[int]
    title: str
    steps: Steps
    problem: str = ""
    error: Exception | None = None
    _chunks: list[Text] = field(default_factory=list[Text])
    # The number of chunks; None until the text has ended.
    _count: int | None = None

    @property
    def failed(self) -> bool:
        """Return whether the text ended without any chunk."""
        return self._count == 0

    def chunk(self, number: int) -> Text:
        """Return the chunk of a round, from 0; it is empty after the text's end."""
        while len(self._chunks) <= number:
            text = self.flow.text(f"{self.source.name} chunk {len(self._chunks) + 1}")
            if self._count is not None:
                text.close()
            self._chunks.append(text)
        return self._chunks[number]

    def ends_before(self, number: int) -> bool:
        """Return whether the text has ended and has no chunk for that round or a later one."""
        return self._count is not None and self._count <= number

    async def cut(self) -> None:
        """Fill the chunks as the text is written, until it ends or fails."""
        number, left, parts, sizes = -1, 0, 0, self.steps.sizes()
        try:
            async for part in self.source:
                if left <= 0:
                    number, left = number + 1, next(sizes)
                    self.chunk(number).write(self.title)
                self.chunk(number).write(part)
                left -= self.tokens[parts]
                parts += 1
                if left <= 0:
                    self.chunk(number).close()
        except UpstreamCancelled:
            pass  # Readers get the chunks so far.
        except Exception as error:
            self.error, self.problem = error, describe(error)
            text = "%s ends early: %s. Its readers continue with what it has written."
            logger.warning(text, self.source.name, self.problem.removesuffix("."))
        self._count = number + 1
        if self.failed and not self.problem:
            self.problem = "it answered nothing"
        for text in self._chunks:
            text.close()


@dataclass(frozen=True, slots=True)
class GrowingPrompt:
    """The prompt of an agent on a staircase: each round adds the next chunk of every source."""

    prompt: AggregationPrompt
    question: Messages
    sources: Sequence[ChunkedText]
    steps: Steps

    def messages(self, number: int) -> Messages:
        """Return the messages of a round, from 0.

        With the order ``prefix-cached`` chunks include their titles, so that an empty chunk has
        none.
        """
        rounds = [
            [f"{source.chunk(round_)}" for source in self.sources] for round_ in range(number + 1)
        ]
        answers = [chunk for chunks in rounds for chunk in chunks]
        if self.steps.order == "contiguous":
            texts = ["".join(pieces) for pieces in zip(*rounds, strict=True)]
            answers = [f"{self.prompt.title(n)}{text}" for n, text in enumerate(texts, 1)]
        return self.prompt.messages(self.question, answers)

    def is_last_round(self, number: int) -> bool:
        """Return whether certainly no chunks follow the chunks of a round, from 0."""
        return all(source.ends_before(number + 1) for source in self.sources)

    def raise_if_all_failed(self) -> None:
        """Raise MixtureFailed if no source has written anything."""
        if all(source.failed for source in self.sources):
            problems = (f"{source.source.name}: {source.problem}" for source in self.sources)
            failure = MixtureFailed(f"no agent answered; {'; '.join(problems)}")
            raise failure from common_refusal([source.error for source in self.sources])
