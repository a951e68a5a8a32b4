"""Use FlashMoA with Google's Agent Development Kit (ADK): a drop-in model, and a plugin that links.

Needs the extra ``adk``.
"""

# ADK does not go with SGLang's pins, so that it is missing where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, wraps
from types import SimpleNamespace
from typing import Any, Unpack

from flashmoa._extras import from_extra

with from_extra("adk", "flashmoa.adk", "Google's ADK"):
    import openai
    from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
    from google.adk.agents.parallel_agent import _create_branch_ctx_for_sub_agent
    from google.adk.events import Event
    from google.adk.integrations.openai import OpenAILlm
    from google.adk.models import LlmRequest, LlmResponse
    from google.adk.plugins import BasePlugin
    from google.adk.tools import BaseTool, FunctionTool
    from google.genai import types
    from pydantic import field_validator

from flashmoa._concurrency import all_of, setting
from flashmoa._limits import Recent
from flashmoa.engine import EngineSettings
from flashmoa.engine.connections import self_hosted_key, self_hosted_url
from flashmoa.frameworks import (
    CallObserver,
    CallRequest,
    ChatRequest,
    EngineClient,
    ExpectedRequest,
    LinkedCall,
    LinkOptions,
    LinkPlanner,
    LinkSettings,
    NotForecastable,
    ObservedCall,
    Placeholders,
    Prompt,
    Report,
    RequestAfterTools,
    RequestCaptured,
    Turn,
    current_attempts,
    end_trace,
    first_request,
)
from flashmoa.link.after_tools import name_calls
from flashmoa.link.expected import Writers
from flashmoa.link.link import log_unlinked
from flashmoa.observe import LinkDeclined, Listener
from flashmoa.observe.report import Reported
from flashmoa.openai import instrument
from flashmoa.openai.http import advising, observe_completions

__all__ = ["FlashMoALlm", "LinkPlugin"]

logger = logging.getLogger(__name__)

# Attributes of an agent that may change its prompt by user-defined code or requests to servers.
_UNKNOWN = ("before_agent_callback", "before_model_callback", "planner", "code_executor")
# ADK runs other agents in another way, without a callback when such a run is cancelled.
_TEAMS = (SequentialAgent, ParallelAgent, LoopAgent)
_is_dry_run: ContextVar[bool] = ContextVar("flashmoa_adk_dry_run", default=False)
# The run and the agent that are about to call a model, if any. This is a list, because ADK may make
# the call in a copy of the context, and the call must take the entry away for all copies.
_caller: ContextVar[list[tuple[RunPlanner, str]]] = ContextVar("flashmoa_adk")


class FlashMoALlm(OpenAILlm):
    """Replaces ADK's ``OpenAILlm`` for a self-hosted SGLang engine.

    By itself it is the stock model with defaults for self-hosting; it needs no API key. In a runner
    with a :class:`LinkPlugin`, the texts of its agents are streamed into the prompts of the agents
    that will read them.

    Args:
        model: the served model's name.
        base_url: the engine's URL; by default OPENAI_BASE_URL of the environment, else SGLang's.
        api_key, default_headers, engine_settings: see :class:`flashmoa.EngineClient`.
        extra_body: further fields of every request, as SGLang has them.
        max_tokens: see the stock model.

    Raises: ValueError if ``client`` is given.
    """

    api_key: str | None = None
    default_headers: dict[str, str] | None = None
    extra_body: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    engine_settings: EngineSettings | None = None

    @field_validator("client", mode="before")
    @classmethod
    def _refuse_client(cls, client: object) -> None:
        if client is not None:
            raise ValueError(
                "client cannot be given to FlashMoALlm, whose links must go to the same server as "
                "its requests; give base_url, api_key and default_headers instead"
            )

    @cached_property
    def engine(self) -> EngineClient:
        """The engine client that links use."""
        return EngineClient(
            self_hosted_url(self.base_url),
            api_key=self_hosted_key(self.api_key, self.base_url),
            headers=self.default_headers,
            model=self.model,
            engine_settings=self.engine_settings,
        )

    @cached_property
    def _http_client(self) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=f"{self.engine.url}/v1",
            api_key=self_hosted_key(self.api_key, self.base_url) or "EMPTY",
            default_headers=self.default_headers,
        )
        # The first observer of a call links it.
        observe_completions(client._client, current_attempts)
        instrument(client, self.engine_settings)
        return client

    @property
    def _openai_client(self) -> Any:
        """Stands in for the stock model's OpenAI client; it has only :meth:`create`."""
        return SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, **parameters: Any) -> Any:
        """Send a request of the stock model, or end the dry run that made it."""
        body = {name: value for name, value in parameters.items() if value is not None}
        body["extra_body"] = self.extra_body
        if _is_dry_run.get():
            raise RequestCaptured(ChatRequest(self.engine, body))
        with advising(self.engine.url):
            return await self._http_client.chat.completions.create(**body)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse]:
        responses = super().generate_content_async(llm_request, stream)
        request = CallRequest(self.engine.url, self.model, client=self.engine)
        observers: list[CallObserver] = []
        if (callers := _caller.get([])) and not _is_dry_run.get():
            planner, name = callers.pop()
            observers = planner.observe(name, request)
        if not observers:
            async for response in responses:
                yield response
            return
        with ObservedCall(observers) as call:
            async with aclosing(call.items(responses)) as items:
                async for response in items:
                    # The text must be complete before others get it.
                    if not response.partial and (answer := call.answer) is not None:
                        calls = response.content if answer.tool_calls else None
                        call.finish(replace(answer, tool_calls=calls))
                    yield response

    async def close(self) -> None:
        """Close its connections."""
        await all_of([self.engine.close, self._http_client.close])


def _contained(callback: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return a callback that logs its exceptions: ADK would end the run."""

    @wraps(callback)
    async def call(*arguments: Any, **named: Any) -> None:
        try:
            await callback(*arguments, **named)
        except Exception as problem:
            log_unlinked(problem)

    return call


class LinkPlugin(BasePlugin, Reported):
    """Links the agents of a runner: each agent's tokens stream into the prompts of later agents.

    Give it to the runner or the app (``plugins=[LinkPlugin()]``); prompts and answers stay the
    same. It links agents of ``SequentialAgent``, ``ParallelAgent`` and ``LoopAgent`` whose model is
    a :class:`FlashMoALlm`, also their requests after tools. These run unlinked: agents of
    user-defined classes or with a model that overrides how requests are made, agents with an
    instruction that is a function or reads artifacts, with callbacks before their model, with
    planners, code executors or toolsets, and agents after a loop or after an agent that may
    transfer to another agent.

    Args:
        options: see :class:`flashmoa.LinkOptions`, also for exceptions.
    """

    def __init__(self, **options: Unpack[LinkOptions]) -> None:
        super().__init__(name="flashmoa")
        self._settings = LinkSettings(**options)
        self._listener = self._settings.listen()
        self.report = Report(self._listener)
        # By invocation id; several may run at once.
        self._runs: dict[str, RunPlanner] = {}
        self._declined = Recent[tuple[str, str], None]()

    @_contained
    async def before_run_callback(self, *, invocation_context: Any) -> None:
        for invocation_id, run in list(self._runs.items()):
            if invocation_id == invocation_context.invocation_id or not run.is_running:
                await self._end(invocation_id)
        message = invocation_context.user_content
        # A dry run of an answer to a tool's request would run the tool.
        answers = [part for part in (message and message.parts) or () if part.function_response]
        if answers:
            self._decline(invocation_context, "its run begins with the result of a tool")
        elif type(invocation_context.agent) not in _TEAMS:
            self._decline(invocation_context, "LinkPlugin links runs of ADK's team agents only")
        else:
            planner = RunPlanner(invocation_context, self.report, self._settings)
            self._runs[invocation_context.invocation_id] = planner

    @_contained
    async def before_agent_callback(self, *, agent: Any, callback_context: Any) -> None:
        if planner := self._runs.get(callback_context.invocation_id):
            planner.begin_agent(agent)

    @_contained
    async def before_model_callback(self, *, callback_context: Any, llm_request: Any) -> None:
        planner = self._runs.get(callback_context.invocation_id)
        _caller.set([(planner, callback_context.agent_name)] if planner is not None else [])

    @_contained
    async def after_tool_callback(
        self, *, tool: Any, tool_args: Any, tool_context: Any, result: Any
    ) -> None:
        if planner := self._runs.get(tool_context.invocation_id):
            planner.end_tool(tool_context.agent_name, tool_context.function_call_id, result)

    @_contained
    async def after_agent_callback(self, *, agent: Any, callback_context: Any) -> None:
        if planner := self._runs.get(callback_context.invocation_id):
            planner.end_agent(agent)
            if agent is planner.root:  # There is no other callback if a run is cancelled.
                await self._end(callback_context.invocation_id)

    @_contained
    async def after_run_callback(self, *, invocation_context: Any, error: Any = None) -> None:
        await self._end(invocation_context.invocation_id)

    on_run_error_callback = after_run_callback

    async def close(self) -> None:
        """End every link and the trace."""
        for run in list(self._runs):
            await self._end(run)
        end_trace(self._listener)

    def _decline(self, context: Any, reason: str) -> None:
        """Leave a run unlinked, and report each reason once for each agent.

        A graph has no agent. Nothing is logged, as ``flashmoa.openai.run`` may link the run.
        """
        agent = getattr(context.agent, "name", "(graph)")
        if (agent, reason) not in self._declined:
            self._declined[agent, reason] = None
            self.report(LinkDeclined(agent=agent, engine="", reason=reason))

    async def _end(self, invocation_id: str) -> None:
        planner = self._runs.pop(invocation_id, None)
        if planner is not None:
            try:
                planner.end_all("unused")
            finally:
                await planner.host.close()


class RunPlanner(LinkPlanner):
    """Plans the links of a run (an invocation) of the agent ``root``."""

    def __init__(self, context: Any, listener: Listener, settings: LinkSettings) -> None:
        super().__init__(listener, settings)
        self.root: Any = context.agent
        self._context = context
        self._task = asyncio.current_task()
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        # (agent, id of a tool call) -> the request that brings the result, the tool's name in it.
        # Some models number their calls, so that two agents have the same ids.
        self._results: dict[tuple[str, str | None], tuple[RequestAfterTools, str]] = {}

    @property
    def is_running(self) -> bool:
        """Whether the run's task goes on: no callback tells the plugin of a cancellation."""
        return self._task is None or not self._task.done()

    def observe(self, name: str, request: CallRequest) -> list[CallObserver]:
        """Note that an agent is about to send a request. Return the request's observers."""
        try:
            is_changed = getattr(self.root.find_agent(name), "after_model_callback", None)
            rewritten = "a callback may change its answer" if is_changed else None
            return [self.begin(name, request, rewritten=rewritten)]
        except Exception:
            # Whatever is wrong with a link, the agent's request must be sent.
            logger.exception("%s runs unlinked because of the error below", name)
            return []

    def begin_agent(self, agent: Any) -> None:
        """Note that an agent begins. If it had ended, another pass of its loop begins."""
        if agent.name in self._ended:
            parent = agent.parent_agent  # None if an agent of another class keeps it for itself.
            again = {each.name for each in (parent.sub_agents if parent else [agent])}
            self._begun -= again
            self._ended -= again
        self._begun.add(agent.name)

    def end_agent(self, agent: Any) -> None:
        """Note that an agent has ended, so that its messages have their place in the history."""
        self._ended.add(agent.name)
        if request := self.tools.get(agent.name):  # A tool has ended the agent.
            self.tools.give_up(request)
        self.links.end(agent.name, "unused")
        if self.running:
            self.plan()

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return the agent's request after the tools of its answer, which is a ``Content``.

        ``None`` if a callback may change the answer, or if a tool is ADK's: it may ask another
        agent, or end this agent.
        """
        actor: Any = self.root.find_agent(agent)
        content: Any = answer
        calls = [part.function_call for part in content.parts or () if part.function_call]
        if reason := self._why_unknown(actor):
            raise NotForecastable(reason)
        own = [each if isinstance(each, BaseTool) else FunctionTool(each) for each in actor.tools]
        is_own = {call.name for call in calls} <= {tool.name for tool in own}
        if actor.after_model_callback or not is_own:
            return None
        tools = name_calls([call.name for call in calls])
        empty = [types.FunctionResponse(id=each.id, name=each.name, response={}) for each in calls]
        parts = [types.Part(function_response=each) for each in empty]
        told = [content, types.Content(role="user", parts=parts)]
        events = [*self._context.session.events, *(self._event(actor, each) for each in told)]

        async def request(texts: Mapping[str, str]) -> ChatRequest:
            asked = await self._dry_run(actor, events, self._context.session.state)
            found = {call.id: texts[tool] for call, tool in zip(calls, tools, strict=True)}
            messages = [*asked.body["messages"]]
            # Results of earlier calls may have the same ids; only the last results are new.
            for place in range(_last_call(messages) + 1, len(messages)):
                each = messages[place]
                if each["role"] == "tool" and each["tool_call_id"] in found:
                    messages[place] = {**each, "content": found[each["tool_call_id"]]}
            return replace(asked, body={**asked.body, "messages": messages})

        expected = RequestAfterTools(agent, tools, [request])
        for call, tool in zip(calls, tools, strict=True):
            self._results[agent, call.id] = expected, tool
        return expected

    def end_tool(self, agent: str, call_id: str | None, result: object) -> None:
        """Note the result of an agent's call of a tool."""
        if (agent, call_id) in self._results:
            request, tool = self._results.pop((agent, call_id))
            # A later callback may still turn the result into JSON.
            with suppress(TypeError, ValueError):
                whole = result if isinstance(result, dict) else {"result": result}
                self.tools.add_result(request, tool, json.dumps(whole))

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        """End the links, as others get tool calls and results, or another text."""
        super().call_held_back(call, reason)
        for link in self.waiting_for(call.agent):
            link.end("abort")

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        turns: list[Turn] = []
        self._add_turns(self.root, (), turns)
        return turns

    def _add_turns(
        self, agent: Any, before: tuple[Writers, ...], turns: list[Turn]
    ) -> tuple[Writers, ...] | None:
        """Add the turns of an agent after the writers ``before``.

        Return the writers before the next agent; ``None`` if they are not certain.
        """
        if agent.name in self._ended:
            return before
        if type(agent) is ParallelAgent:
            branches = [self._add_turns(each, before, turns) for each in agent.sub_agents]
            if None in branches:
                return None
            steps = [step for branch in branches for step in (branch or ())[len(before) :]]
            return (*before, frozenset[str]().union(*steps)) if steps else before
        if type(agent) in (SequentialAgent, LoopAgent):
            after: tuple[Writers, ...] | None = before
            for each in agent.sub_agents:
                after = self._add_turns(each, after, turns) if after is not None else None
            if type(agent) is SequentialAgent:
                return after
            first: Any = next(iter(agent.sub_agents), None)
            if after is not None and type(first) is LlmAgent and first.name in self._ended:
                turns.append(Turn(first.name, after, sure=False))  # In another pass of the loop.
            return None
        if isinstance(agent, LlmAgent) and agent.name not in self._begun:
            turns.append(Turn(agent.name, before))
        if type(agent) is not LlmAgent or agent.sub_agents:
            return None
        return (*before, frozenset([agent.name]))

    async def expect(self, turn: Turn) -> ExpectedRequest:
        agent = self.root.find_agent(turn.agent)
        if reason := self._why_unknown(agent):
            raise NotForecastable(reason)
        placeholders, then = Placeholders(turn.writers), self._histories(turn)
        requests: list[ChatRequest] = []
        for order in turn.orders:
            events, state = list(self._context.session.events), dict(self._context.session.state)
            for name in order:
                writer, text = self.root.find_agent(name), placeholders.padded(name)
                content = types.Content(role="model", parts=[types.Part(text=text)])
                events.append(self._event(writer, content))
                if writer.output_key:
                    state[writer.output_key] = text
            requests.append(await self._dry_run(agent, events, state))

        def holds(_prompt: Prompt, now: Turn | None) -> bool:
            return now is None or self._histories(now) == then

        return ExpectedRequest(turn, requests, placeholders, holds)

    def _histories(self, turn: Turn) -> list[list[str]]:
        """Return the authors of messages before a turn, in each possible order."""
        known = [event.author for event in self._context.session.events if event.content]
        return [[*known, *order] for order in turn.orders]

    def _why_unknown(self, agent: Any) -> str | None:
        """Return why predicting an agent's prompt would run code that is not ADK's."""
        if agent is None:
            return "its team has no agent of this name"
        if type(agent) is not LlmAgent:
            return f"it is a {type(agent).__name__}, not a stock LlmAgent"
        model = agent.canonical_model
        if not isinstance(model, FlashMoALlm):
            return "its model is no FlashMoALlm"
        kind, stock = type(model), FlashMoALlm
        # A dry run calls these.
        used = ("generate_content_async", "create", "_openai_client", "engine", "capabilities")
        own = [each for each in used if getattr(kind, each, None) != getattr(stock, each, None)]
        found = [f"{kind.__name__}.{name}" for name in own]
        found += [name for name in _UNKNOWN if getattr(agent, name)]
        guides = [agent.instruction, getattr(agent.root_agent, "global_instruction", "")]
        found += ["instruction, which is a function"] * any(map(callable, guides))
        texts = "\n".join(guide for guide in guides if isinstance(guide, str))
        found += ["artifact service"] * bool(re.search(r"\{\s*artifact\.", texts))
        tools = [each for each in agent.tools if not callable(each) or isinstance(each, BaseTool)]
        kinds = (type(each) for each in tools)
        found += [f"tool of class {kind.__name__}" for kind in kinds if kind is not FunctionTool]
        found += ["runner's compaction"] * (self._context.events_compaction_config is not None)
        return f"predicting its prompt would run its {found[0]}" if found else None

    def _event(self, writer: Any, content: types.Content) -> Event:
        place = {"invocation_id": self._context.invocation_id, "branch": self._branch(writer)}
        return Event(author=writer.name, content=content, **place)

    async def _dry_run(
        self, agent: Any, events: Sequence[Event], state: Mapping[str, Any]
    ) -> ChatRequest:
        """Return the request that an agent will send when these events have come."""
        context = self._context
        session = context.session.model_copy(update={"events": [*events], "state": dict(state)})
        changed = {"agent": agent, "branch": self._branch(agent), "session": session}
        shadow, request = context.model_copy(update=changed), LlmRequest()
        async for _ in agent._llm_flow._preprocess_async(shadow, request):
            pass
        with setting(_is_dry_run, True):
            responses = agent.canonical_model.generate_content_async(request)
            return await first_request(anext(responses))

    def _branch(self, agent: Any) -> str | None:
        """Return the branch of the conversation that an agent reads and writes."""
        parent, context = agent.parent_agent, self._context
        if agent is self.root or parent is None:
            return context.branch
        branch = self._branch(parent)
        if not isinstance(parent, ParallelAgent):
            return branch
        above = context.model_copy(update={"branch": branch})
        return _create_branch_ctx_for_sub_agent(parent, agent, above).branch


def _last_call(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the last message that calls tools."""
    return max(place for place, each in enumerate(messages) if each.get("tool_calls"))
