"""Run the agents of one question in layers that read whole answers (``AgentLayers``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flashmoa import Answer
from flashmoa.moa.agents import Model, room_for_answers
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.cluster import AnswerSlot, Cluster, Member, Room
from flashmoa.moa.early_exit import ScoredAnswers
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.prompts import (
    AggregationPrompt,
    Message,
    Messages,
    add_role,
    cut_answer,
    fair_shares,
)
from flashmoa.moa.results import AgentAnswer
from flashmoa.moa.settings import Quorum


class AgentLayers:
    """Runs layers of agents that read whole answers. Agents are named ``LAYER.PLACE``, from 1.

    Args:
        inquiry: what all agents of the question share.
    """

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._records: list[list[AgentAnswer]] = []
        self._calls: list[list[AgentCall]] = []
        self._clusters: list[Cluster] = []
        # The number of clusters that still wait for an agent's answer.
        self._waiting: dict[Answer, int] = {}

    def ask(
        self,
        layer: int,
        model: Model,
        messages: Sequence[Message],
        *,
        is_last: bool = False,
        continues: str = "",
        **more: Any,
    ) -> AgentCall:
        """Add an agent to a layer. Its request is sent when all answers in it are complete.

        Args:
            layer: number of the layer, from 0; at most one above the last layer that has agents.
            is_last: whether it writes the question's answer; see :class:`Budget`.
            continues: text of its answer that another agent has written.
            more: parameters of the request besides the model's sampling.
        """
        if layer == len(self._calls):
            self._calls.append([])
            self._records.append([])
        place = len(self._calls[layer])
        call = AgentCall(f"{layer + 1}.{place + 1}", model, self._inquiry, is_last=is_last)
        run = partial(call.run, add_role(messages, model.role), continues=continues, **more)
        self._inquiry.flow.start_soon(run)
        self._calls[layer].append(call)
        self._records[layer].append(AgentAnswer(layer, place, model.model, model.engine.url))
        return call

    def make_member(self, layer: int, place: int, *forms: tuple[str, str]) -> Member:
        """Make an agent, by its layer and place from 0, a member of a cluster.

        Args:
            forms: for each slot, the text before the answer, and the text in place of both if the
                answer is left out.
        """
        call, flow = self._calls[layer][place], self._inquiry.flow
        slots = [AnswerSlot(flow.version(call), title, absent) for title, absent in forms]
        return Member(call, self._records[layer][place], slots, call.asked)

    def start_cluster(
        self,
        members: Sequence[Member],
        room: Room,
        scores: ScoredAnswers | None = None,
        quorum: Quorum | None = None,
    ) -> Cluster:
        """Start to copy the answers of members into their slots.

        The arguments are those of :class:`Cluster`.
        """
        for member in members:
            self._waiting[member.answer] = self._waiting.get(member.answer, 0) + 1
        cluster = Cluster(members, room=room, scores=scores, quorum=quorum, leave=self._leave)
        self._clusters.append(cluster)
        self._inquiry.flow.start_soon(cluster.run)
        return cluster

    def _leave(self, member: Member) -> None:
        """Cancel an agent unless another cluster still waits for it."""
        self._waiting[member.answer] -= 1
        if not self._waiting[member.answer]:
            member.record.status = "left out"
            member.answer.cancel()

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        for call in (call for layer in self._calls for call in layer):
            call.cancel()
        for cluster in self._clusters:
            cluster.cancel()

    def records(self) -> list[list[AgentAnswer]]:
        """Return what every agent wrote, and when, by layer and place."""
        for calls, records in zip(self._calls, self._records, strict=True):
            for call, record in zip(calls, records, strict=True):
                call.describe(record)
        return self._records


async def fill_slots(
    reader: Model, prompt: AggregationPrompt, question: Messages, answers: Sequence[AgentAnswer]
) -> list[str]:
    """Return the titled texts of complete answers, cut to fit into the prompt of a reader."""
    titles = [prompt.title(number) for number in range(1, len(answers) + 1)]
    lengths = [one.tokens for one in answers]
    empty_prompt = add_role(prompt.messages(question, titles), reader.role)
    room = await room_for_answers([reader], empty_prompt, lengths)
    shares = lengths if room is None else fair_shares(lengths, room)
    return [
        title + cut_answer(one.text, length, share)
        for title, one, length, share in zip(titles, answers, lengths, shares, strict=True)
    ]
