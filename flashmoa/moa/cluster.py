"""A cluster: agents that are read together, and the way of their answers into readers' prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from flashmoa import Answer, Text, UpstreamCancelled
from flashmoa.moa.agents import read_with_timeout
from flashmoa.moa.early_exit import ScoredAnswers
from flashmoa.moa.results import AgentAnswer, Decision, MixtureFailed

logger = logging.getLogger(__name__)

# How many tokens the answers of a cluster may have together; None: any number.
Room = Callable[[], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class AnswerSlot:
    """The place of an answer in its readers' prompts, behind ``title``; if the answer is left
    out, ``absent`` stands there instead of both."""

    text: Text
    title: str = ""
    absent: str = ""


@dataclass(slots=True)
class Member:
    """An agent that is read, with a slot for each form in which prompts have its answer."""

    answer: Answer
    record: AgentAnswer
    slots: Sequence[AnswerSlot]
    # Whether its readers are given its answer; None while that is open.
    used: bool | None = None

    @property
    def tokens(self) -> int:
        """Return the answer's length in tokens, or in characters if its engine did not count."""
        usage = self.answer.usage
        return usage.completion_tokens if usage is not None else len(self.answer.written)

    def write(self, piece: str, *, first: bool) -> None:
        """Append a piece of the answer to the slots, the first one behind the title."""
        for slot in self.slots:
            slot.text.write(slot.title + piece if first else piece)

    def finish(self, answer: str) -> None:
        """Complete the slots with this answer."""
        for slot in self.slots:
            slot.text.finish(slot.title + answer)

    def leave_out(self) -> None:
        """Complete the slots without an answer."""
        for slot in self.slots:
            slot.text.finish(slot.absent)

    def fail(self, error: Exception) -> None:
        """Fail the slots, and with them the readers' requests."""
        for slot in self.slots:
            slot.text.fail(error)


class Cluster:
    """Agents with the same readers, in the order of their slots.

    An answer flows into its slots, behind their titles, while it is written. An answer that
    fails, stalls or is empty is left out. If none remains, the slots of the last one fail.

    Args:
        room: is asked how many tokens there are for all answers together.
        stall_seconds: how long to wait for an answer's next piece, once it has begun.
        scores: decides about early exit, if anything does.
        leave: is called with each member that the cluster no longer waits for.

    Attributes:
        last: the member that was waited for longest.
        deciding: seconds from its answer until the readers were given it, if answers are scored.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        room: Room,
        stall_seconds: float,
        scores: ScoredAnswers | None,
        leave: Callable[[Member], None],
    ) -> None:
        self.decisions: list[Decision] = []
        self.deciding = 0.0
        self.last = members[-1]
        self._last_came = 0.0
        self._is_scored = scores is not None
        self._members = members
        self._room = room
        self._stall_seconds = stall_seconds
        self._scores = scores
        self._leave = leave
        self._left = False
        self._scoring = anyio.Lock()

    async def run(self) -> None:
        """Copy answers into their slots until every slot is complete or one has failed."""
        room = await self._room()
        share = None if room is None else room // len(self._members)
        async with anyio.create_task_group() as group:
            for member in self._members:
                group.start_soon(self._follow, member, share, group.cancel_scope)
        if self._is_scored:
            self.deciding = time.perf_counter() - self._last_came
        used = [member for member in self._members if member.used]
        if room is not None:
            _cut(used, room)
        for slot in (slot for member in used for slot in member.slots):
            slot.text.close()

    async def _follow(self, member: Member, share: int | None, all_: anyio.CancelScope) -> None:
        problem = await self._copy(member, share)
        if member.used is None:
            self.last, self._last_came = member, time.perf_counter()
        if problem is not None:
            self._drop(member, problem)
        else:
            member.used = True
            if share is None or member.tokens <= share:
                member.finish(member.answer.written)
        waiting = any(one.used is None for one in self._members)
        # Once all answers are there, decisions under way are pointless and are cancelled, too.
        if not waiting or (member.used and await self._suffices(member)):
            all_.cancel()

    async def _copy(self, member: Member, share: int | None) -> str | None:
        """Copy an answer into its slots as it comes, as far as there is certainly room.

        Returns: why its readers are not given it, ``""`` if it was cancelled; ``None`` if they
        are.
        """
        count = 0
        try:
            async for piece in read_with_timeout(member.answer, self._stall_seconds):
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
        """Settle that readers are not given an answer."""
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
        """Score an answer; if the complete ones suffice, drop the others and return True."""
        if self._scores is None:
            return False
        began = time.perf_counter()
        async with self._scoring:
            try:
                quality = await self._scores.add(member.answer.written, member.answer.logprobs)
            except Exception as error:
                logger.warning("No early exit: the answers cannot be compared: %s", error)
                self._scores = None
                return False
            waiting = [one for one in self._members if one.used is None]
            if not waiting:
                return False  # The embedder could not be cancelled and finished too late.
            left = not self._left and self._scores.suffice(quality)
            seconds = time.perf_counter() - began
            of = len(self._members)
            self.decisions.append(Decision(len(self._scores), of, quality, left, seconds))
        if left:
            self._left = True
            for one in waiting:
                self._drop(one, "")
                self._leave(one)
        return left


def _cut(used: Sequence[Member], room: int) -> None:
    """Complete the slots of answers, each cut to its fair share of the room."""
    shares = fair_shares([member.tokens for member in used], room)
    for member, share in zip(used, shares, strict=True):
        text = member.answer.written
        if share < member.tokens:
            member.record.cut_tokens = member.tokens - share
            text = text[: len(text) * share // member.tokens]
        member.finish(text)


def fair_shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how much of each answer can stay so that all fit into ``room``.

    Short answers stay whole and leave what they do not need to the longer ones, which are cut to
    one length (max-min fairness). All numbers have the same unit, tokens or characters.
    """
    shares = [0] * len(lengths)
    left = max(0, room)
    for done, place in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        shares[place] = min(lengths[place], left // (len(lengths) - done))
        left -= shares[place]
    return shares
