"""Copy the answers of agents that are read together into their readers' prompts (``Cluster``)."""

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

# Returns how many tokens the answers of a cluster may have together; None: any number.
Room = Callable[[], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class AnswerSlot:
    """The place of an answer in its readers' prompts.

    Attributes:
        text: the title and the answer, or ``absent`` if the answer is left out.
        title: text before the answer.
    """

    text: Text
    title: str = ""
    absent: str = ""


@dataclass(slots=True)
class Member:
    """An agent whose answer is read, with a slot for each form of the answer in prompts.

    Attributes:
        used: whether its readers get its answer; ``None`` until that is decided.
    """

    answer: Answer
    record: AgentAnswer
    slots: Sequence[AnswerSlot]
    used: bool | None = None

    @property
    def tokens(self) -> int:
        """Return the answer's length in tokens, or in characters if its engine did not count."""
        usage = self.answer.usage
        return usage.completion_tokens if usage is not None else len(self.answer.written)

    def write(self, piece: str, *, first: bool) -> None:
        """Append a piece of the answer to the slots; the first one after the title."""
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
    """Copies the answers of agents with the same readers into their slots.

    An answer is copied while it is written. An answer that fails, stalls or is empty is left out.
    If all answers are left out, the slots of the last one fail.

    Args:
        members: the agents, in the order of their slots.
        room: returns how many tokens the prompts have for all answers together.
        stall_seconds: how long to wait for an answer's next piece, once it has begun; ``None``
            for no limit.
        scores: decides about early exit; ``None``: every member is waited for.
        leave: called with each member that early exit leaves out.

    Attributes:
        last: the member whose answer came last.
        deciding: seconds from that answer until the readers got it, if answers are scored.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        room: Room,
        stall_seconds: float | None,
        scores: ScoredAnswers | None,
        leave: Callable[[Member], None],
    ) -> None:
        self.decisions: list[Decision] = []
        self.deciding = 0.0
        self.last = members[-1]
        self._last_arrival = 0.0
        self._is_scored = scores is not None
        self._members = members
        self._room = room
        self._stall_seconds = stall_seconds
        self._scores = scores
        self._leave = leave
        self._has_exited_early = False
        self._scoring = anyio.Lock()

    async def run(self) -> None:
        """Copy answers into their slots until every slot is complete or one has failed."""
        room = await self._room()
        share = None if room is None else room // len(self._members)
        async with anyio.create_task_group() as group:
            for member in self._members:
                group.start_soon(self._process, member, share, group.cancel_scope)
        if self._is_scored:
            self.deciding = time.perf_counter() - self._last_arrival
        used = [member for member in self._members if member.used]
        if room is not None:
            _cut_to_fit(used, room)
        for slot in (slot for member in used for slot in member.slots):
            slot.text.close()

    async def _process(self, member: Member, share: int | None, run: anyio.CancelScope) -> None:
        """Copy a member's answer, and end the cluster's run if no other answer is needed."""
        problem = await self._copy(member, share)
        if member.used is None:
            self.last, self._last_arrival = member, time.perf_counter()
        if problem is not None:
            self._leave_out(member, problem)
        else:
            member.used = True
            if share is None or member.tokens <= share:
                member.finish(member.answer.written)
        # When all answers have arrived, pending decisions are cancelled: they decide nothing.
        if not self._undecided() or (member.used and await self._exits_early_with(member)):
            run.cancel()

    def _undecided(self) -> list[Member]:
        """Return the members whose answers are still waited for."""
        return [member for member in self._members if member.used is None]

    async def _copy(self, member: Member, share: int | None) -> str | None:
        """Copy an answer into its slots while it is written, up to ``share`` pieces.

        Returns: why the answer is left out, ``""`` if it was cancelled; ``None`` if it is used.
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

    def _leave_out(self, member: Member, problem: str) -> None:
        """Leave an answer out, unless it is decided already whether it is used."""
        if member.used is not None:
            return
        member.used = False
        if problem:
            member.record.status, member.record.problem = "failed", problem
            logger.warning("%s is left out: %s", member.answer.name, problem)
        if any(other.used is not False for other in self._members):
            member.leave_out()
        else:
            member.fail(MixtureFailed(f"no agent answered; {member.answer.name}: {problem}"))

    async def _exits_early_with(self, member: Member) -> bool:
        """Score an answer. Leave out the others and return True if the complete ones suffice."""
        if self._scores is None:
            return False
        started = time.perf_counter()
        async with self._scoring:
            try:
                quality = await self._scores.add(member.answer.written, member.answer.logprobs)
            except Exception as error:
                text = "No early exit for this cluster: its answers cannot be compared: %s"
                logger.warning(text, error)
                self._scores = None
                return False
            undecided = self._undecided()
            if not undecided:
                return False  # The embedder could not be cancelled and finished too late.
            exits = not self._has_exited_early and self._scores.suffice(quality)
            seconds = time.perf_counter() - started
            count = len(self._members)
            self.decisions.append(Decision(len(self._scores), count, quality, exits, seconds))
        if exits:
            self._has_exited_early = True
            for other in undecided:
                self._leave_out(other, "")
                self._leave(other)
        return exits


def _cut_to_fit(used: Sequence[Member], room: int) -> None:
    """Complete the slots of answers, each cut to its fair share of the room."""
    shares = fair_shares([member.tokens for member in used], room)
    for member, share in zip(used, shares, strict=True):
        text = member.answer.written
        if share < member.tokens:
            member.record.cut_tokens = member.tokens - share
            text = text[: len(text) * share // member.tokens]
        member.finish(text)


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
