"""The Agent Framework chat client (``FlashMoAChatClient``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

from agent_framework import (
    AgentExecutor,
    BaseAgent,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    Executor,
    FunctionTool,
    Message,
    ResponseStream,
    UsageDetails,
    normalize_tools,
)
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework_orchestrations import AgentBasedGroupChatOrchestrator, MagenticOrchestrator
from openai.types.completion_usage import CompletionUsage

from flashmoa._stack import owners
from flashmoa.engine import EngineSettings
from flashmoa.engine.connections import self_hosted_key, self_hosted_url
from flashmoa.frameworks import (
    CallRequest,
    CallResult,
    ChatRequest,
    EngineClient,
    LinkedTeams,
    ObservedCall,
    current_attempts,
)
from flashmoa.openai.http import advising, observe_completions


@dataclass(frozen=True)
class AgentFrameworkRequest(CallRequest):
    """A request of an agent, with the framework's messages."""

    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer that calls tools.

    Attributes:
        texts: its texts beside the calls.
        names: the names of the called tools, in the order of the calls.
        are_run: whether the framework runs the tools at once, and asks nobody.
        ask_again: returns the agent's next request, given the tools' results in this order.
    """

    texts: tuple[str, ...]
    names: Sequence[str]
    are_run: bool
    ask_again: Callable[[Sequence[str]], ChatRequest]


class FlashMoAChatClient(OpenAIChatCompletionClient[Any]):
    """Replaces ``OpenAIChatCompletionClient`` for a self-hosted SGLang engine.

    By itself it is the stock client with defaults for self-hosting; it needs no API key. In a
    linked workflow (``flashmoa.agent_framework.link(workflow)``), the texts of its agents are
    streamed into the prompts of the agents that will read them.

    Args:
        model: the served model's name.
        base_url: the engine's URL; by default OPENAI_BASE_URL of the environment, else SGLang's.
        api_key, default_headers, engine_settings: see :class:`flashmoa.EngineClient`.
        **kwargs: see the stock client; all but ``async_client``.

    Raises: ValueError if ``async_client`` is given.

    Close it, or use it as a context manager. Its usage details have ``prompt/streamed_tokens``
    and ``prompt/late_tokens`` if the engine reports them.
    """

    DEFAULT_EXCLUDE: ClassVar[set[str]] = {
        *OpenAIChatCompletionClient.DEFAULT_EXCLUDE,
        "engine",
        "linked_teams",
    }

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        engine_settings: EngineSettings | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("async_client") is not None:
            raise ValueError(
                "async_client cannot be given to FlashMoAChatClient, whose links must go to the "
                "same server as its requests; give base_url, api_key and default_headers instead"
            )
        url, key = self_hosted_url(base_url), self_hosted_key(api_key, base_url)
        super().__init__(  # pyright: ignore[reportUnknownMemberType] - its credentials of Azure
            model,
            base_url=f"{url}/v1",
            api_key=key or "EMPTY",
            default_headers=default_headers,
            **kwargs,
        )
        observe_completions(cast("Any", self.client)._client, current_attempts)
        self.engine = EngineClient(
            url,
            api_key=key,
            headers=default_headers,
            model=self.model,
            engine_settings=engine_settings,
        )
        self.linked_teams = LinkedTeams()

    async def close(self) -> None:
        """Close every link of this client's workflows, then its connections."""
        await self.linked_teams.close(self.engine.close, self.client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    def _inner_get_response(
        self,
        *,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        stream: bool = False,
        **kwargs: Any,
    ) -> Awaitable[ChatResponse] | ResponseStream[ChatResponseUpdate, ChatResponse]:
        answer: Any = super()._inner_get_response(
            messages=messages, options=options, stream=stream, **kwargs
        )
        if stream:
            updates = self._observe_updates(answer, messages, options)
            return self._build_response_stream(
                updates, response_format=options.get("response_format")
            )
        return self._observe_response(answer, messages, options)

    async def _observe_response(
        self,
        answer: Awaitable[ChatResponse],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> ChatResponse:
        with self._begin(messages, options) as call, call.making(), advising(self.engine.url):
            response = await answer
            self._finish_call(call, response, messages, options)
            return response

    async def _observe_updates(
        self,
        answer: ResponseStream[ChatResponseUpdate, ChatResponse],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> AsyncGenerator[ChatResponseUpdate]:
        received: list[ChatResponseUpdate] = []
        with self._begin(messages, options) as call, advising(self.engine.url):
            async with aclosing(call.items(aiter(answer))) as updates:
                async for update in updates:
                    received.append(update)
                    yield update
            # The framework puts an answer together in the same way.
            whole = ChatResponse.from_updates(received)
            self._finish_call(call, whole, messages, options)

    def _finish_call(
        self,
        call: ObservedCall,
        response: ChatResponse,
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> None:
        contents = [part for message in response.messages for part in message.contents]
        texts = [part.text for part in contents if part.type == "text" and part.text]
        calls = [part for part in contents if part.type == "function_call"]
        asked = [*messages, *response.messages]

        def ask_again(results: Sequence[str]) -> ChatRequest:
            told = [
                Content.from_function_result(str(each.call_id), result=result)
                for each, result in zip(calls, results, strict=True)
            ]
            # A tool is not forced again.
            free = {**options, "tool_choice": None}
            body = self._prepare_options([*asked, Message("tool", told)], free)
            return ChatRequest(self.engine, body)

        # Requests show each text as a message of its own.
        is_forwarded = not calls and len(texts) <= 1
        names = [str(each.name) for each in calls]
        tool_calls = None
        if calls:
            tools = {each.name: each for each in _function_tools(options)}
            are_run = all(name in tools and runs_at_once(tools[name]) for name in names)
            tool_calls = ToolCalls(tuple(texts), names, are_run, ask_again)
        whole, reason = "".join(texts), response.finish_reason
        call.finish(CallResult(whole, call.usage, reason, is_forwarded, tool_calls=tool_calls))

    def _begin(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ObservedCall:
        """Begin a call whose request is about to be sent; linked workflows observe it."""
        model = options.get("model") or self.model or ""
        request = AgentFrameworkRequest(
            self.engine.url, model, client=self.engine, messages=tuple(messages)
        )
        executor = find_calling_executor() if self.linked_teams else None
        observers = self.linked_teams.observe(executor, request) if executor is not None else []
        return ObservedCall(observers)

    def _parse_usage_from_openai(self, usage: CompletionUsage) -> UsageDetails:
        details = super()._parse_usage_from_openai(usage)
        reported = usage.prompt_tokens_details
        counts: Mapping[str, Any] = (reported.model_extra if reported is not None else None) or {}
        for name in ("streamed_tokens", "late_tokens"):  # See ``PromptUsage``.
            if isinstance(counts.get(name), int):
                cast("dict[str, Any]", details)[f"prompt/{name}"] = counts[name]
        return details


def find_calling_executor() -> Executor | None:
    """Return the executor that runs this code, if the stack shows one.

    ``None`` if another agent makes the request, for instance a tool of the executor's agent, or of
    a manager.

    Agent Framework has no context that names the running executor or agent: its ContextVars have
    the origin of events, opaque ids of runs, and telemetry. To set another ContextVar, methods of
    the user's executors and agents would have to be replaced.
    """
    agents: list[object] = []
    for owner in owners():
        if isinstance(owner, Executor):
            own = agent_of(owner)
            is_other = own is not None and any(agent is not own for agent in agents)
            return None if is_other else owner
        if isinstance(owner, BaseAgent):
            agents.append(owner)
    return None


def agent_of(executor: Executor) -> object | None:
    """Return the agent that an executor itself asks: its own, or an orchestrator's manager."""
    if isinstance(executor, AgentExecutor):
        return executor.agent
    if isinstance(executor, AgentBasedGroupChatOrchestrator):
        return executor._agent
    if isinstance(executor, MagenticOrchestrator):
        return getattr(executor._manager, "_agent", None)
    return None


def _function_tools(options: Mapping[str, Any]) -> list[FunctionTool]:
    tools = normalize_tools(options.get("tools"))
    return [tool for tool in tools if isinstance(tool, FunctionTool)]


def runs_at_once(tool: FunctionTool) -> bool:
    """Return whether a called tool runs without a person's approval, and not somewhere else."""
    return not tool.declaration_only and tool.approval_mode != "always_require"
