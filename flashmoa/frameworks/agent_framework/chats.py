"""Plan the links of a chat (:class:`ChatLinkPlanner`); :mod:`.what_if` forecasts its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, cast

from agent_framework import Executor, Message, Workflow
from agent_framework._workflows._edge import InternalEdgeGroup
from agent_framework_orchestrations import (
    AgentBasedGroupChatOrchestrator,
    BaseGroupChatOrchestrator,
    GroupChatOrchestrator,
    MagenticOrchestrator,
)

from flashmoa.frameworks import (
    CallRequest,
    CallResult,
    ExpectedRequest,
    LinkedCall,
    LinkPlanner,
    LinkSettings,
    NotForecastable,
    Placeholders,
    Prompt,
    Turn,
)
from flashmoa.frameworks.agent_framework.client import agent_of
from flashmoa.frameworks.agent_framework.dry_run import (
    client_of,
    why_not_run,
    why_rewritten,
)
from flashmoa.frameworks.agent_framework.what_if import WhatIf
from flashmoa.observe import Listener

_STOCK = (GroupChatOrchestrator, AgentBasedGroupChatOrchestrator)
_DECIDES = "it decides who speaks next, and others do not get what it writes"


@dataclass(slots=True)
class _Answer:
    """The answer that an agent is writing, in one call of its model, or more if it calls tools.

    Attributes:
        author: the id of its executor.
        history, length: the executor's conversation, which changes when the answer is complete.
        texts: the texts of the answer's earlier calls. Each text is a message of its own.
    """

    author: str
    history: list[Message]
    length: int
    texts: list[str] = field(default_factory=list[str])

    def is_same(self, other: _Answer | None) -> bool:
        """Return whether the other object stands for this answer."""
        return (
            other is not None
            and (self.author, self.length) == (other.author, other.length)
            and self.history is other.history
        )


@dataclass(frozen=True)
class WorkflowSettings(LinkSettings):
    """Says how a workflow is linked; see :func:`flashmoa.agent_framework.link`."""

    kv_share: float = 0.5


def find_orchestrator(workflow: Workflow) -> BaseGroupChatOrchestrator | None:
    """Return the orchestrator of a chat; ``None`` if the workflow is no chat."""
    executors = workflow.executors.values()
    return next(
        (
            each
            for each in executors
            if isinstance(each, BaseGroupChatOrchestrator)
            and not isinstance(each, MagenticOrchestrator)
        ),
        None,
    )


class ChatLinkPlanner(LinkPlanner):
    """Plans the links of a chat.

    While an agent writes, links go to the manager, if a model decides who speaks next, and to every
    other agent. While the manager decides, these links are kept.

    Attributes:
        linkable: the agents that have a FlashMoA client, and the manager if it has one.
    """

    def __init__(
        self,
        workflow: Workflow,
        orchestrator: BaseGroupChatOrchestrator,
        settings: WorkflowSettings,
        listener: Listener,
    ) -> None:
        super().__init__(listener, settings, kv_share=settings.kv_share)
        self._workflow = workflow
        self._orchestrator: Any = orchestrator
        self._refusal = why_refused(workflow, orchestrator)
        self._manager = orchestrator.id if agent_of(orchestrator) is not None else None
        self._members = list(orchestrator._participant_registry.participants)
        self.linkable = {
            name
            for name in [*self._members, orchestrator.id]
            if client_of(workflow.executors[name]) is not None and self._refusal is None
        }
        # The framework's object for the current run.
        self._run: object = None
        self._answer: _Answer | None = None
        self._last_speaker = ""
        # How often an agent has spoken after another one.
        self._followed: Counter[tuple[str, str]] = Counter()
        # The number of calls of agents that are no managers: each may change all later prompts.
        self._calls = 0

    @property
    def is_running(self) -> bool:
        return self._workflow._is_run_active()

    def observe(self, name: str, request: CallRequest) -> LinkedCall | None:
        """Note that an executor is about to send a request. Return the request's observer."""
        executor = self._workflow.executors[name]
        if name != self._manager and name not in self._members:
            return None  # It asks a model in the user's code, a selection function for instance.
        run = self._workflow._active_run
        if run is not self._run:
            # A run may begin before the end of the previous run is noticed.
            self.end_all("unused")
            self._run = run
        if name == self._manager:
            return self.begin(name, request, _DECIDES, linkable=name in self.linkable)
        rewritten = why_rewritten(self._workflow, executor)
        call = self.begin(name, request, rewritten, linkable=name in self.linkable)
        self._calls += 1
        self._note_answer(executor)
        return call

    def why_unplanned(self, agent: str) -> str:
        if self._refusal is not None and self._has_begun:
            return self._refusal
        return super().why_unplanned(agent)

    def why_nothing_linked(self) -> str | None:
        """Return why no agent of the chat can be linked; ``None`` if one can."""
        if self._refusal is not None:
            return self._refusal
        return None if len(self.linkable) > 1 else "it has no two agents with a FlashMoAChatClient"

    def end_all(self, reason: str) -> None:
        super().end_all(reason)
        self._answer = None

    def possible(self) -> set[str]:
        """Return all members while the manager decides."""
        return set(self._members) if self.caller == self._manager else set()

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        """Note the text of an answer that goes on after tools: it is a message of its own."""
        if call.agent == self._manager:
            super().call_answered(call, result)
            return
        if self._answer is not None and self._answer.author == call.agent and result.text:
            self._answer.texts.append(result.text)
        # Others get the text beside calls of tools, and nothing of the calls.
        super().call_answered(call, replace(result, is_forwarded=bool(result.text)))

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        """Return the manager's turn, and the turns of the agents that may be chosen."""
        orchestrator, answer = self._orchestrator, self._answer
        if self._refusal is not None:
            return []
        after = (frozenset([caller]),)
        if caller == self._manager:
            # After an answer, the links that were made while it was written are kept.
            return [] if answer is not None else self._candidates(after)
        limit = orchestrator._max_rounds
        if why_rewritten(self._workflow, self._workflow.executors[caller]) is not None or (
            limit is not None and orchestrator._round_index >= limit
        ):
            return []
        turns = self._candidates(after)
        if self._manager is not None:
            sure = orchestrator._termination_condition is None
            turns.insert(0, Turn(self._manager, after, sure))
        return turns

    def _candidates(self, after: tuple[frozenset[str], ...]) -> list[Turn]:
        """Return the turns of all agents but the last speaker, the likeliest first."""
        last = self._last_speaker
        names = [name for name in self._members if name != last]
        names.sort(key=lambda name: -self._followed[last, name])
        return [Turn(name, after, sure=False) for name in names]

    async def expect(self, turn: Turn) -> ExpectedRequest:
        """Return an agent's next request, from a what-if superstep."""
        name = turn.agent
        if reason := why_not_run(self._workflow, self._workflow.executors[name]):
            raise NotForecastable(reason)
        placeholders, holds = Placeholders(turn.writers), self._watch()
        what_if = WhatIf(self._workflow, name, self._orchestrator)
        if self._answer is None:
            request = await what_if.after_decision(self._task())
        else:
            author = self._answer.author
            texts = [*self._answer.texts, placeholders.padded(author)]
            request = await what_if.after_answer(author, texts)
        return ExpectedRequest(turn, [request], placeholders, holds)

    def _note_answer(self, executor: Executor) -> None:
        """Note that an agent begins an answer, unless its answer goes on after tools."""
        history: list[Message] = getattr(executor, "_full_conversation", [])
        answer = _Answer(executor.id, history, len(history))
        if answer.is_same(self._answer):
            return
        self._followed[self._last_speaker, executor.id] += 1
        self._last_speaker, self._answer = executor.id, answer

    def _task(self) -> list[Message]:
        """Return the task that the manager decides on, in its first call of a run."""
        conversation = self._conversation()
        place = len(conversation)
        while place and conversation[place - 1].role == "user":
            place -= 1
        return conversation[place:]

    def _conversation(self) -> list[Message]:
        return self._orchestrator._full_conversation

    def _watch(self) -> Callable[[Prompt, Turn | None], bool]:
        """Return a function that returns whether a request that is expected now is still right.

        It is not after another call of an agent, or if somebody has spoken whose calls the planner
        does not see.
        """
        calls, known, answer = self._calls, list(self._conversation()), self._answer
        author = "" if answer is None else get_author(self._workflow.executors[answer.author])

        def holds(_prompt: Prompt, _now: Turn | None) -> bool:
            now = self._conversation()
            return (
                calls == self._calls
                and len(now) >= len(known)
                and all(map(is_, known, now))
                and all(message.author_name == author for message in now[len(known) :])
            )

        return holds


def get_author(executor: Executor) -> str:
    """Return the name that the messages of an executor's agent have."""
    return cast("Any", executor).agent._get_agent_name()


def why_refused(workflow: Workflow, orchestrator: Executor) -> str | None:
    """Return why nobody can tell a chat's next requests without user-defined code, or ``None``."""
    kind = type(orchestrator)
    own = [name for name, value in vars(orchestrator).items() if callable(value)]
    if kind not in _STOCK or any(hasattr(kind, name) for name in own):
        return f"its workflow's {kind.__name__} has rules that are not Agent Framework's own"
    groups = [each for each in workflow.edge_groups if not isinstance(each, InternalEdgeGroup)]
    if any(edge.has_condition for group in groups for edge in group.edges):
        return "its workflow has edges with conditions, which are code of your own"
    return None
