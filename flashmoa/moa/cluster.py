"""The agents that are read together: their texts into the slots of those who read them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.linking.streamed_text import Text
from flashmoa.moa.answers import AgentAnswer, Decision, MixtureFailed
from flashmoa.moa.early_exit import ScoredAnswers
from flashmoa.moa.patience import patiently
from flashmoa.moa.shares import fair_shares
from flashmoa.workflow import Answer

logger = logging.getLogger(__name__)

# Tokens that answers of a cluster may have together.
Room = Callable[[], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an answer stands in the prompts of its readers: behind ``title``; ``absent`` is what
    stands there where it is left out."""

    text: Text
    title: str = ""
    absent: str = ""


@dataclass(slots=True)
class Member:
    """One agent that is read, and its slots: one for each form in which it is."""

    answer: Answer
    record: AgentAnswer
    slots: Sequence[Slot]
    # Whether its readers are told it: not known as long as it is being written.
    used: bool | None = None

    @property
    def tokens(self) -> int:
        """How long it is."""
        usage = self.answer.usage
        return usage.completion_tokens if usage is not None else len(self.answer.written)

    def write(self, piece: str, *, first: bool) -> None:
        """The next piece of its answer."""
        for slot in self.slots:
            slot.text.write(slot.title + piece if first else piece)

    def finish(self, answer: str) -> None:
        """This is what its readers are told."""
        for slot in self.slots:
            slot.text.finish(slot.title + answer)

    def leave_out(self) -> None:
        for slot in self.slots:
            slot.text.finish(slot.absent)

    def fail(self, error: Exception) -> None:
        """Its readers cannot be told anything."""
        for slot in self.slots:
            slot.text.fail(error)


class Cluster:
    """Agents with the same readers, in the order of their slots.

    An answer flows into its slots as it is written, behind their titles. One that fails, stalls
    or is empty is left out. Where none is left, the slots of one fail.

    Args:
        room: is asked how many tokens there are for all of them together.
        stall_seconds: how long to wait for an answer's next piece, once it has begun.
        answers: decides about leaving early, if anything does.
        leave: is told of members that are not waited for any more.

    Attributes:
        last: the member that was waited for longest.
        deciding: seconds from its answer until the readers were told, where answers are judged.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        room: Room,
        stall_seconds: float,
        answers: ScoredAnswers | None,
        leave: Callable[[Member], None],
    ) -> None:
        self.decisions: list[Decision] = []
        self.deciding = 0.0
        self.last = members[-1]
        self._came = 0.0
        self._is_judged = answers is not None
        self._members = members
        self._room = room
        self._stall_seconds = stall_seconds
        self._answers = answers
        self._leave = leave
        self._left = False
        self._judging = anyio.Lock()

    async def run(self) -> None:
        """Until every slot is complete, or one has failed."""
        room = await self._room()
        share = None if room is None else room // len(self._members)
        async with anyio.create_task_group() as group:
            for member in self._members:
                group.start_soon(self._follow, member, share, group.cancel_scope)
        if self._is_judged:
            self.deciding = time.perf_counter() - self._came
        used = [member for member in self._members if member.used]
        if room is not None:
            _cut(used, room)
        for slot in (slot for member in used for slot in member.slots):
            slot.text.close()

    async def _follow(
        self, member: Member, share: int | None, everybody: anyio.CancelScope
    ) -> None:
        problem = await self._copy(member, share)
        if member.used is None:
            self.last, self._came = member, time.perf_counter()
        if problem is not None:
            self._drop(member, problem)
        else:
            member.used = True
            if share is None or member.tokens <= share:
                member.finish(member.answer.written)
        waiting = any(one.used is None for one in self._members)
        # Once all are there, decisions under way are about nothing.
        if not waiting or (member.used and await self._suffices(member)):
            everybody.cancel()

    async def _copy(self, member: Member, share: int | None) -> str | None:
        """Into the slot as it comes, as far as there is certainly room. Returns: why its readers
        are not told it; nothing to say where somebody has lost interest in it."""
        count = 0
        try:
            async for piece in patiently(member.answer, self._stall_seconds):
                count += 1
                if share is None or count <= share:
                    member.write(piece, first=count == 1)
        except UpstreamCancelled:
            return ""
        except Exception as error:
            return str(error) or type(error).__name__
        if member.answer.written.strip():
            return None
        called = member.answer.finish_reason == "tool_calls"
        return "it called a tool" if called else "it answered nothing"

    def _drop(self, member: Member, problem: str) -> None:
        """An answer that its readers will not be told."""
        if member.used is not None:
            return
        member.used = False
        if problem:
            member.record.status, member.record.problem = "failed", problem
            logger.warning("%s is left out: %s", member.answer.name, problem)
        if any(one.used is not False for one in self._members):
            member.leave_out()
        else:
            member.fail(MixtureFailed(f"no agent answered; {member.answer.name}: {problem}"))

    async def _suffices(self, member: Member) -> bool:
        """Whether, with this one, the others are not needed any more; then they are dropped."""
        if self._answers is None:
            return False
        began = time.perf_counter()
        async with self._judging:
            try:
                quality = await self._answers.add(member.answer.written, member.answer.logprobs)
            except Exception as error:
                logger.warning("No early exit: the answers cannot be compared: %s", error)
                self._answers = None
                return False
            waiting = [one for one in self._members if one.used is None]
            if not waiting:
                return False  # What cannot be cancelled has come to its end.
            left = not self._left and self._answers.suffice(quality)
            seconds = time.perf_counter() - began
            of = len(self._members)
            self.decisions.append(Decision(len(self._answers), of, quality, left, seconds))
        if left:
            self._left = True
            for one in waiting:
                self._drop(one, "")
                self._leave(one)
        return left


def _cut(used: Sequence[Member], room: int) -> None:
    """What is longer than its fair share ends there."""
    shares = fair_shares([member.tokens for member in used], room)
    for member, share in zip(used, shares, strict=True):
        text = member.answer.written
        if share < member.tokens:
            member.record.cut_tokens = member.tokens - share
            text = text[: len(text) * share // member.tokens]
        member.finish(text)
