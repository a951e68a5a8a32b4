"""Plan the links of a chat (:class:`ChatLinkPlanner`); :mod:`.what_if` forecasts its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agent_framework import Executor, Message, RawAgent, Workflow
from agent_framework._workflows._edge import InternalEdgeGroup
from agent_framework_orchestrations import (
    MAGENTIC_MANAGER_NAME,
    AgentBasedGroupChatOrchestrator,
    BaseGroupChatOrchestrator,
    GroupChatOrchestrator,
    HandoffAgentExecutor,
    MagenticOrchestrator,
)

from flashmoa.frameworks import (
    CallRequest,
    CallResult,
    ChatRequest,
    ExpectedRequest,
    LinkedCall,
    LinkPlanner,
    LinkSettings,
    NotForecastable,
    Placeholders,
    Prompt,
    RequestAfterTools,
    Turn,
)
from flashmoa.frameworks.agent_framework.client import ToolCalls, agent_of
from flashmoa.frameworks.agent_framework.dry_run import (
    answers_requests,
    client_of,
    get_conversation,
    request_after_tools,
    why_not_run,
    why_rewritten,
)
from flashmoa.frameworks.agent_framework.what_if import WhatIf
from flashmoa.observe import Listener
from flashmoa.observe.events import LATE

_STOCK = (GroupChatOrchestrator, AgentBasedGroupChatOrchestrator, MagenticOrchestrator)
# Why others do not get what a manager or an agent writes.
_DECIDES = "it decides who speaks"
_INSTRUCTS = "its instruction is cut out of JSON"
_UNKNOWN = "?"
_SENDS_MORE = "others also read the calls and results of its tools"


@dataclass(slots=True)
class _Answer:
    """The answer that an agent is writing, in one call of its model, or more if it calls tools.

    Attributes:
        author: the id of its executor.
        history, length: the executor's conversation, which changes when the answer is complete.
        texts: the texts of the answer's earlier calls. Each text is a message of its own.
        has_called_tools: whether an earlier call of the answer has called tools.
    """

    author: str
    history: list[Message]
    length: int
    texts: list[str] = field(default_factory=list[str])
    has_called_tools: bool = False

    def is_same(self, other: _Answer) -> bool:
        """Return whether the other object stands for this answer."""
        is_alike = (self.author, self.length) == (other.author, other.length)
        return is_alike and self.history is other.history


def is_chat(workflow: Workflow) -> bool:
    kinds = (BaseGroupChatOrchestrator, HandoffAgentExecutor)
    return any(isinstance(each, kinds) for each in workflow.executors.values())


def find_orchestrator(workflow: Workflow) -> BaseGroupChatOrchestrator | None:
    """Return the orchestrator of a chat; ``None`` if its agents hand off to each other."""
    executors = workflow.executors.values()
    return next((each for each in executors if isinstance(each, BaseGroupChatOrchestrator)), None)


class ChatLinkPlanner(LinkPlanner):
    """Plans the links of a chat.

    While an agent writes, links go to the manager, if a model decides who speaks next, and to every
    other agent; if agents hand off to each other, to the agents that the writer can hand off to.
    While the manager decides, these links are kept.

    Args:
        orchestrator: the chat's orchestrator; ``None`` if agents hand off to each other.

    Attributes:
        linkable: the agents that have a FlashMoA client, and the manager if it has one.
    """

    def __init__(
        self,
        workflow: Workflow,
        orchestrator: BaseGroupChatOrchestrator | None,
        settings: LinkSettings,
        listener: Listener,
        kv_share: float,
    ) -> None:
        super().__init__(listener, settings, kv_share=kv_share)
        self._workflow = workflow
        self._orchestrator: Any = orchestrator
        self._is_magentic = isinstance(orchestrator, MagenticOrchestrator)
        self._refusal = why_refused(workflow, orchestrator)
        executors = workflow.executors.values()
        self._decider = "" if orchestrator is None else orchestrator.id
        self._manager: str | None = None
        if orchestrator is None:
            handing_off = [each for each in executors if isinstance(each, HandoffAgentExecutor)]
            self._members = [each.id for each in handing_off]
        else:
            self._members = list(orchestrator._participant_registry.participants)
            self._manager = orchestrator.id if agent_of(orchestrator) is not None else None
        callers = {*self._members, self._manager}
        self.linkable = {
            each.id
            for each in executors
            if each.id in callers and client_of(each) is not None and self._refusal is None
        }
        # The framework's object for the current run.
        self._run: object = None
        self._answer: _Answer | None = None
        self._has_answer = False  # Whether the last call has been answered.
        self._late: set[str] = set()  # Agents whose requests were sought after that.
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
        if name == self._decider and name != self._manager:
            return None  # It asks a model in the user's code, a selection function for instance.
        run = self._workflow._active_run
        if run is not self._run:
            # A run may begin before the end of the previous run is noticed.
            self.end_all("unused")
            self._run = run
        linkable, self._has_answer = name in self.linkable, False
        if name == self._manager:
            rewritten = _INSTRUCTS if self._is_magentic else _DECIDES
            return self.begin(name, request, rewritten, linkable)
        answer = self._note_answer(executor)
        rewritten = why_rewritten(self._workflow, executor)
        if self._is_magentic and answer.has_called_tools:
            rewritten = rewritten or _SENDS_MORE
        call = self.begin(name, request, rewritten, linkable)
        self._calls += 1
        self._late.clear()
        return call

    def why_unplanned(self, agent: str) -> str:
        if self._refusal is not None and self._has_begun:
            return self._refusal
        return LATE if agent in self._late else super().why_unplanned(agent)

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
        self._has_answer |= call.agent == self.caller
        answer, calls = self._answer, cast("ToolCalls | None", result.tool_calls)
        beside = None if calls is None else calls.texts
        if answer is not None and answer.author == call.agent and beside is not None:
            answer.has_called_tools = True
            answer.texts += beside
        if call.agent != self._manager and not self._is_magentic:
            # Others get a text beside calls of tools, and nothing of the calls.
            is_text = bool(result.text) and result.is_forwarded
            is_forwarded = is_text if beside is None else len(beside) == 1
            result = replace(result, is_forwarded=is_forwarded)
        super().call_answered(call, result)

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        return request_after_tools(self._workflow, agent, cast("ToolCalls", answer))

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        """Return the manager's turn, and the turns of the agents that may be chosen."""
        if self._refusal is not None:
            return []
        if caller == self._manager:
            return self._candidates((frozenset([caller]),)) if self._may_be_decided() else []
        executor = self._workflow.executors[caller]
        if caller not in self._members or why_rewritten(self._workflow, executor) is not None:
            return []
        if self._ends_after_answer():
            return []
        if self._orchestrator is None:
            targets = getattr(executor, "_handoff_targets", ())
            return [turn for turn in self._candidates(()) if turn.agent in targets]
        after = (frozenset([caller]),)
        instructed = (frozenset([self._decider]),) if self._is_magentic else ()
        candidates = self._candidates((*after, *instructed))
        if self._manager is None:
            return candidates
        sure = self._orchestrator._termination_condition is None
        return [Turn(self._manager, after, sure), *candidates]

    def _ends_after_answer(self) -> bool:
        """Return whether the answer that is being written is the last one of the chat."""
        if self._orchestrator is None:
            return False
        limit = self._orchestrator._max_rounds
        return limit is not None and self._orchestrator._round_index >= limit

    def _may_be_decided(self) -> bool:
        """Return whether the requests after the manager's present call can be told.

        Not in a group chat after an answer: the links that were made while the answer was written
        are kept. Not if Magentic's manager writes the final answer.
        """
        if not self._is_magentic:
            return self._answer is None and bool(self._task())
        ledger = self._orchestrator._progress_ledger
        return ledger is None or not ledger.is_request_satisfied.answer

    def _candidates(self, after: tuple[frozenset[str], ...]) -> list[Turn]:
        """Return the turns of all agents but the last speaker, the likeliest first."""
        last = self._last_speaker
        names = [name for name in self._members if name != last]
        names.sort(key=lambda name: -self._followed[last, name])
        return [Turn(name, after, sure=False) for name in names]

    async def expect(self, turn: Turn) -> ExpectedRequest | None:
        """Return an agent's next request, by what-if supersteps.

        ``None`` if the caller has got its answer. The workflow then goes on, and its state does not
        say which messages its executors have yet to send.
        """
        name = turn.agent
        if self._has_answer:
            self._late.add(name)
            return None
        if reason := why_not_run(self._workflow, self._workflow.executors[name]):
            raise NotForecastable(reason)
        placeholders, holds = Placeholders(turn.writers), self._watch()
        instruction = placeholders.padded(self._decider)
        is_deciding = self.caller == self._manager
        writer, task = None if is_deciding else self.caller, self._task()
        answers = self._possible_answers(placeholders)
        # All copies are made before the workflow goes on.
        futures = [
            WhatIf(self._workflow, name, writer, self._orchestrator, instruction) for _ in answers
        ]
        requests: list[ChatRequest] = []
        for future, texts in zip(futures, answers, strict=True):
            request = await (
                future.after_decision(task) if is_deciding else future.after_answer(texts)
            )
            requests += [request] if request not in requests else []
        return ExpectedRequest(turn, requests, placeholders, holds)

    def _possible_answers(self, placeholders: Placeholders) -> list[list[str]]:
        """Return the texts of each answer that the caller may give; none if it decides."""
        if self.caller == self._manager:
            return [[]]
        texts = [] if self._answer is None else self._answer.texts
        if self._orchestrator is None:
            # Beside a call that hands off, many models write nothing.
            return [[*texts], [*texts, _UNKNOWN]]
        if self._is_magentic and self._answer is not None and self._answer.has_called_tools:
            return [[], [_UNKNOWN]]
        return [[*texts, placeholders.padded(self.caller)]]

    def _note_answer(self, executor: Executor) -> _Answer:
        """Note that an agent begins an answer, or that its answer goes on. Return the answer."""
        history: list[Message] = getattr(executor, "_full_conversation", [])
        answer = _Answer(executor.id, history, len(history))
        if self._answer is not None and answer.is_same(self._answer):
            return self._answer
        answer.has_called_tools = answers_requests(get_conversation(executor))
        self._followed[self._last_speaker, executor.id] += 1
        self._last_speaker, self._answer = executor.id, answer
        return answer

    def _task(self) -> list[Message]:
        """Return the task that the manager decides on, in its first call of a run."""
        conversation = self._conversation()
        place = len(conversation)
        while place and conversation[place - 1].role == "user":
            place -= 1
        return conversation[place:]

    def _conversation(self) -> list[Message]:
        if self._orchestrator is None:
            return []  # Each agent has its own, and all calls are seen.
        if not self._is_magentic:
            return self._orchestrator._full_conversation
        context = self._orchestrator._magentic_context
        return [] if context is None else context.chat_history

    def _watch(self) -> Callable[[Prompt, Turn | None], bool]:
        """Return a function that returns whether a request that is expected now is still right.

        It is not after another call of an agent, or if somebody has spoken whose calls the planner
        does not see.
        """
        calls, known = self._calls, self._conversation()
        length, last = len(known), known[-1] if known else None
        authors = {MAGENTIC_MANAGER_NAME} if self._is_magentic else set[str]()
        if self._answer is not None:
            authors.add(get_author(self._workflow.executors[self._answer.author]))

        def holds(_prompt: Prompt, _now: Turn | None) -> bool:
            now = self._conversation()
            if (
                calls != self._calls
                or len(now) < length
                or (length and now[length - 1] is not last)
            ):
                return False
            new = [each for each in now[length:] if each.role != "tool"]
            return authors.issuperset(each.author_name for each in new)

        return holds


def get_author(executor: Executor) -> str:
    """Return the name that the messages of an executor's agent have."""
    agent: Any = agent_of(executor)
    return agent._get_agent_name() if isinstance(agent, RawAgent) else executor.id


def why_refused(workflow: Workflow, orchestrator: Executor | None) -> str | None:
    """Return why nobody can tell a chat's next requests without user-defined code, or ``None``."""
    if orchestrator is not None:
        kind = type(orchestrator)
        own = [name for name, value in vars(orchestrator).items() if callable(value)]
        if kind not in _STOCK or any(hasattr(kind, name) for name in own):
            return f"its workflow's {kind.__name__} has rules that are not Agent Framework's own"
    groups = [each for each in workflow.edge_groups if not isinstance(each, InternalEdgeGroup)]
    if any(getattr(each, "selection_func", None) is not None for each in groups) or any(
        edge.has_condition for each in groups for edge in each.edges
    ):
        return "its workflow has edges with conditions, which are code of your own"
    return None
