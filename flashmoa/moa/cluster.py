"""Copy the answers of agents that are read together into their readers' prompts (``Cluster``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from flashmoa import Text, UpstreamCancelled
from flashmoa.moa.agent import Agent
from flashmoa.moa.early_exit import Decision, ScoredAnswers
from flashmoa.moa.prompts import cut_answer, fair_shares
from flashmoa.moa.results import MixtureFailed, common_refusal, describe
from flashmoa.moa.settings import Quorum

logger = logging.getLogger(__name__)

# Returns how many tokens the answers of a cluster may have together; None: any number.
Room = Callable[[], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class AnswerSlot:
    """The slot of an answer in its readers' prompts.

    Attributes:
        text: the title and the answer, or ``absent`` if the answer is left out.
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

    agent: Agent
    slots: Sequence[AnswerSlot]
    used: bool | None = None

    def finish(self, length: int | None = None) -> None:
        """Complete the slots with the first ``length`` characters of the answer."""
        for slot in self.slots:
            slot.text.finish(slot.title + self.agent.written[:length])


@dataclass(slots=True)
class Cluster:
    """Copies the answers of agents with the same readers into their slots.

    An answer is copied while it is written. If it fails or is empty, it is left out. Answers that
    are not needed are left out, too, and their agents are cancelled unless other clusters wait for
    them. If all answers are left out, the slots of the last answer fail.

    Args:
        members: the agents, in the order of their slots.
        find_room: returns how many tokens the prompts have for all answers together.
        scores: decides about early exit; ``None``: wait for every member.
        quorum: how many answers suffice after some time; ``None``: wait for all.
        room_timeout: how many seconds complete answers wait for ``find_room``. After that time they
            are not cut.

    Attributes:
        readers: number of agents that read the answers and were not left out.
        last: the member whose answer came last.
        deciding: seconds from that answer until the readers got it, if answers are scored.
    """

    members: Sequence[Member]
    find_room: Room
    scores: ScoredAnswers | None = None
    quorum: Quorum | None = None
    room_timeout: float = 1.0
    deciding: float = 0.0
    readers: int = 0
    last: Member = field(init=False)
    _last_arrival: float = 0.0
    _room: int | None = None
    _room_is_known: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # Is replaced when another answer is complete.
    _answered: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.last = self.members[-1]
        for member in self.members:
            member.agent.waiting += 1

    @property
    def decisions(self) -> list[Decision]:
        """Return the decisions about early exit so far."""
        return self.scores.decisions if self.scores is not None else []

    @property
    def marks(self) -> list[tuple[str, ...]]:
        """Return the marks of every member's slots."""
        return [tuple(f"{slot.text}" for slot in member.slots) for member in self.members]

    async def run(self) -> None:
        """Copy answers into their slots until every slot is complete or one has failed."""
        with self._scope:
            async with anyio.create_task_group() as group:
                group.start_soon(self._ask_for_room)
                async with anyio.create_task_group() as copying:
                    for member in self.members:
                        copying.start_soon(self._process, member, copying.cancel_scope)
                    if self.quorum is not None:
                        scope = copying.cancel_scope
                        copying.start_soon(self._wait_for_quorum, self.quorum, scope)
                with anyio.move_on_after(self.room_timeout):
                    await self._room_is_known.wait()
                group.cancel_scope.cancel()
        if self._scope.cancel_called:
            return
        if self.scores is not None:
            self.deciding = time.perf_counter() - self._last_arrival
        used = [member for member in self.members if member.used]
        lengths = [member.agent.tokens for member in used]
        shares = fair_shares(lengths, self._room)
        for member, length, share in zip(used, lengths, shares, strict=True):
            member.agent.record.cut_tokens = length - share
            member.finish(len(cut_answer(member.agent.written, length, share)))

    def cancel(self) -> None:
        """Stop :meth:`run`; slots may stay incomplete."""
        self._scope.cancel()

    def lose_reader(self) -> None:
        """Note that a reader was left out. Without any, wait for no more answers."""
        self.readers -= 1
        if not self.readers and not self._scope.cancel_called:
            self.cancel()
            for member in self._undecided():
                member.agent.stop_waiting()

    async def _ask_for_room(self) -> None:
        self._room = await self.find_room()
        self._room_is_known.set()
        self._finish_short_answers()

    def _finish_short_answers(self) -> None:
        """Complete the slots of answers that certainly have room, so that the next can stream."""
        if not self._room_is_known.is_set():
            return
        for member in self.members:
            if member.used and (self._share is None or member.agent.tokens <= self._share):
                member.finish()

    @property
    def _share(self) -> int | None:
        """Return the tokens that each answer may certainly have; ``None``: any number so far."""
        return None if self._room is None else self._room // len(self.members)

    async def _process(self, member: Member, run: anyio.CancelScope) -> None:
        """Copy a member's answer, and end the cluster's run if it needs no other answer."""
        agent, problem = member.agent, await self._copy(member)
        if member.used is None:
            self.last, self._last_arrival = member, time.perf_counter()
        if problem is not None:
            self._leave_out(member, problem)
        else:
            member.used = True
            self._answered.set()
        # When all answers have arrived, pending decisions are cancelled: they decide nothing.
        if not self._undecided():
            run.cancel()
        elif member.used:
            self._finish_short_answers()
            scores = self.scores
            if scores and await scores.add_and_decide(agent.name, agent.written, agent.logprobs):
                self._leave_out_the_others(run)

    async def _wait_for_quorum(self, quorum: Quorum, run: anyio.CancelScope) -> None:
        """End the cluster's run once the time is over and enough answers are complete."""
        await wait_for_several([member.agent.asked.wait for member in self.members], 1)
        await anyio.sleep(quorum.seconds)
        while sum(bool(member.used) for member in self.members) < quorum.answers:
            self._answered = anyio.Event()
            await self._answered.wait()
        self._leave_out_the_others(run)

    def _leave_out_the_others(self, run: anyio.CancelScope) -> None:
        for other in self._undecided():
            self._leave_out(other, "")
            other.agent.stop_waiting()
        run.cancel()

    def _undecided(self) -> list[Member]:
        return [member for member in self.members if member.used is None]

    async def _copy(self, member: Member) -> str | None:
        """Copy an answer into its slots while it is written, up to its certain share of the room.

        Returns: why the answer is left out, ``""`` if it was cancelled; ``None`` if it is used.
        """
        count = 0
        try:
            async for piece in member.agent:
                count += 1
                if self._share is None or count <= self._share:
                    for slot in member.slots:
                        slot.text.write(slot.title + piece if count == 1 else piece)
        except UpstreamCancelled:
            return ""
        except Exception as error:
            return describe(error)
        if member.agent.written.strip():
            return None
        called = member.agent.finish_reason == "tool_calls"
        return "it called a tool" if called else "it answered nothing"

    def _leave_out(self, member: Member, problem: str) -> None:
        """Leave an answer out, unless it is decided already whether it is used."""
        if member.used is not None:
            return
        member.used = False
        agent = member.agent
        if problem:
            agent.record.status, agent.record.problem = "failed", problem
            logger.warning("%s is left out: %s", agent.name, problem)
        if any(other.used is not False for other in self.members):
            for slot in member.slots:
                slot.text.finish(slot.absent)
            return
        failure = MixtureFailed(f"no agent answered; {agent.name}: {problem}")
        failure.__cause__ = common_refusal([one.agent.error for one in self.members])
        for slot in member.slots:
            slot.text.fail(failure)


async def wait_for_several(waits: Sequence[Callable[[], Awaitable[object]]], count: int) -> None:
    """Return when ``count`` of the calls have returned without an exception, or all have ended."""
    left = count
    async with anyio.create_task_group() as group:

        async def run(wait: Callable[[], Awaitable[object]]) -> None:
            nonlocal left
            try:
                await wait()
            except Exception:
                return  # The text's readers get the error.
            left -= 1
            if left <= 0:
                group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(run, wait)
