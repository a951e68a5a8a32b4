"""Dry runs: find an agent's next request by running the framework's own code on a copy.

A dry run gives a copy of the agent's executor the messages that it will receive, with placeholders
for texts that are still being written, and ends at its first request to a model. It sends no
request, does not change the workflow, and neither middleware nor telemetry sees it. An agent whose
prompt depends on user-defined code gets a reason instead of a dry run.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from types import MethodType
from typing import Any, cast

from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    AgentResponse,
    AgentSession,
    BaseAgent,
    ChatContext,
    Executor,
    FunctionalWorkflow,
    FunctionalWorkflowAgent,
    FunctionTool,
    InMemoryHistoryProvider,
    InProcRunnerContext,
    Message,
    RawAgent,
    Workflow,
    WorkflowAgent,
    WorkflowContext,
    WorkflowExecutor,
    normalize_tools,
)
from agent_framework._mcp import MCPTool
from agent_framework._sessions import PerServiceCallHistoryPersistingMiddleware
from agent_framework._workflows._agent_utils import prepare_agent_run_args
from agent_framework._workflows._const import (
    RESOLVED_WORKFLOW_RUN_KWARGS_KEY,
    WORKFLOW_RUN_KWARGS_KEY,
)
from agent_framework._workflows._state import State
from agent_framework_orchestrations import (
    AgentBasedGroupChatOrchestrator,
    HandoffAgentExecutor,
    MagenticAgentExecutor,
    MagenticOrchestrator,
    StandardMagenticManager,
)
from agent_framework_orchestrations._handoff import (
    _AutoHandoffContextProvider,
    _AutoHandoffMiddleware,
    get_handoff_tool_name,
)

from flashmoa.frameworks import (
    ChatRequest,
    NotForecastable,
    RequestAfterTools,
    RequestCaptured,
    first_request,
)
from flashmoa.frameworks.agent_framework.client import FlashMoAChatClient, ToolCalls, agent_of
from flashmoa.link.after_tools import name_calls

# A stock agent's ``run`` without the layers that trace it.
run_untraced: Any = cast("Any", RawAgent).run

_ASKS_SERVERS = "predicting its prompt would ask its MCP servers for their tools"
_HISTORY_ELSEWHERE = (
    "a service keeps its history (store, conversation_id), and gets only new messages"
)

# Executors of the framework that ask no model, and executors that run user-defined code.
_WITHOUT_MODEL = (
    "_AggregateAgentConversations",
    "AgentRequestInfoExecutor",
    "_TerminalAgentRequestInfoExecutor",
)
_WITH_USER_CODE = ("_CallbackAggregator", "FunctionExecutor")

# A request and its text depend on methods of the client and the agent whose names begin so.
# Releases of the framework add such methods.
_CLIENT_METHODS = ("get_response", "_inner_", "_prepare_", "_build_", "_parse_")
_TOOL_METHODS = ("to_json_schema_spec", "parameters")
_STOCK_TOOL_METHODS = tuple(getattr(FunctionTool, name) for name in _TOOL_METHODS)
_AGENT_METHODS = (
    "run",
    "create_session",
    "_prepare_",
    "_call_",
    "_parse_",
    "_finalize_",
    "_get_",
    "_resolve_",
)
# These change no text, or are declined for another reason.
_OTHER_CODE = {"_parse_usage_from_openai", "tokenizer", "compaction_strategy"}

# Executors that send others an agent's answer. Subclasses may send something else.
_AGENT_EXECUTORS = (AgentExecutor, MagenticAgentExecutor, HandoffAgentExecutor)
# Orchestrators that ask a manager, an agent.
_MANAGERS = (AgentBasedGroupChatOrchestrator, MagenticOrchestrator)

# The framework's own middleware and context providers. None changes what a request says:
# ``HandoffBuilder`` adds its middleware to end an answer at a handoff.
_OWN_MIDDLEWARE = (PerServiceCallHistoryPersistingMiddleware, _AutoHandoffMiddleware)
_OWN_PROVIDERS = (InMemoryHistoryProvider, _AutoHandoffContextProvider)
# Types of contents that reply to an agent's requests to the workflow's user.
_REPLIES = ("function_approval_response", "function_result", "computer_tool_result")

_WORKFLOWS = (
    Workflow,
    WorkflowAgent,
    WorkflowExecutor,
    FunctionalWorkflow,
    FunctionalWorkflowAgent,
)


def get_conversation(executor: Executor) -> list[Message]:
    """Return the conversation that a running agent was given; empty for any other executor."""
    return list(executor._cache) if isinstance(executor, AgentExecutor) else []


def answers_requests(conversation: Sequence[Message]) -> bool:
    """Return whether an agent resumes with an approval of a tool, or a result that it asked for.

    Others then also get the results.
    """
    contents = conversation[-1].contents if conversation else []
    return any(content.type in _REPLIES for content in contents)


def make_response(
    executor: Executor,
    conversation: Sequence[Message],
    text: str,
    results: Sequence[Message] = (),
) -> AgentExecutorResponse:
    """Return the message that an agent sends to others after it has answered with ``text``.

    Args:
        executor: an agent that sends others its model's text (see :func:`why_rewritten`).
        conversation: the conversation before the answer.
        results: the answer's calls of tools, and their results, before the text.
    """
    agent = cast("Agent", cast("AgentExecutor", executor).agent)
    answer = [*map(_copy_message, results), Message("assistant", [text])]
    for message in answer:
        message.author_name = agent._get_agent_name()
    whole = [*map(_copy_message, conversation), *answer]
    return AgentExecutorResponse(
        executor.id, AgentResponse(messages=answer), full_conversation=whole
    )


async def dry_run(
    workflow: Workflow, executor: Executor, message: Any, sources: Sequence[str]
) -> tuple[ChatRequest, list[Message]]:
    """Run a copy of an agent's executor on ``message``, up to its first request to a model.

    Return the request, and the conversation that the agent got.

    Args:
        sources: ids of the executors that sent the message.

    Raises: NotForecastable if the executor must not be run (:func:`why_not_run`), if its run fails
        or ends without a request, or if the request may change before it is sent.
    """
    if reason := why_not_run(workflow, executor):
        raise NotForecastable(reason)
    shadow = copy_agent_executor(cast("AgentExecutor", executor))
    try:
        handle = find_handler(shadow, message)
    except RuntimeError as error:
        raise NotForecastable(str(error)) from error
    state, runner_context = copy_state(workflow), copy_runner_context(workflow)
    context: Any = WorkflowContext(shadow, list(sources), state, runner_context)
    return await captured_request(handle(message, context)), get_conversation(shadow)


async def captured_request(dry_run: Awaitable[object]) -> ChatRequest:
    """Return the request at the end of a dry run. Raises: NotForecastable if there is none."""
    try:
        return await first_request(dry_run)
    except NotForecastable:
        raise
    except Exception as error:
        raise NotForecastable(f"its dry run on a copy failed: {error!r}") from error


def request_after_tools(
    workflow: Workflow, name: str, answer: ToolCalls
) -> RequestAfterTools | None:
    """Return an executor's request after the tools of an answer.

    It is ``None`` if the answer hands off, or calls a tool that waits for a person.

    Raises: NotForecastable if the request may change before it is sent.
    """
    executor = workflow.executors[name]
    if reason := why_not_run(workflow, executor):
        raise NotForecastable(reason)
    targets = getattr(executor, "_handoff_targets", ())
    hands_off = not {*map(get_handoff_tool_name, targets)}.isdisjoint(answer.names)
    if hands_off or not answer.are_run:
        return None
    tools = name_calls(answer.names)

    async def request(texts: Mapping[str, str]) -> ChatRequest:
        return answer.ask_again([texts[tool] for tool in tools])

    return RequestAfterTools(name, tools, [request])


def find_handler(shadow: Executor, message: Any) -> Callable[..., Awaitable[None]]:
    """Return the method of a copied executor that handles a message.

    Raises: RuntimeError if it has none.
    """
    # The copied containers have handlers that are bound to the original.
    return MethodType(cast("Any", shadow._find_handler(message)).__func__, shadow)


def copy_containers(owner: Any) -> Any:
    """Copy an object, and the lists, dicts and sets that it holds."""
    shadow: Any = copy.copy(owner)
    held: dict[str, Any] = {**vars(shadow)}
    for name, value in held.items():
        if isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))
    return shadow


def copy_agent_executor(executor: AgentExecutor) -> AgentExecutor:
    """Copy an executor and everything that the framework changes when it runs the agent."""
    shadow = copy_containers(executor)
    shadow._cache = [_copy_message(message) for message in shadow._cache]
    shadow._session = copy_session(shadow._session)
    shadow._agent = copy_agent(shadow._agent)
    return shadow


def copy_session(session: AgentSession) -> AgentSession:
    shadow = copy.copy(session)
    shadow.state = {
        key: dict(cast("dict[Any, Any]", value)) if isinstance(value, dict) else value
        for key, value in session.state.items()
    }
    return shadow


def copy_agent(original: Any) -> Any:
    """Copy an agent. The copy runs without the layers that trace it.

    Its client raises its first request as :class:`RequestCaptured`.
    """
    agent: Any = copy.copy(original)
    agent.context_providers = list(agent.context_providers)
    agent.run = partial(run_untraced, agent)
    if isinstance(agent.client, FlashMoAChatClient):
        agent.client = _capturing(agent.client)
    return agent


def _capturing(client: FlashMoAChatClient) -> FlashMoAChatClient:
    async def get_response(messages: Sequence[Message], **arguments: Any) -> None:
        if reason := why_call_unpredictable(client, arguments):
            raise NotForecastable(reason)
        options: dict[str, Any] = {**(arguments.get("options") or {})}
        context = ChatContext(client, list(messages), options)

        async def capture() -> None:
            body = client._prepare_options(context.messages, context.options or {})
            raise RequestCaptured(ChatRequest(client.engine, body))

        for each in _get_middleware(arguments):
            if isinstance(each, PerServiceCallHistoryPersistingMiddleware):
                # It loads the history for each request.
                await each.process(context, capture)
        await capture()

    shadow: Any = copy.copy(client)
    shadow.get_response = get_response
    return shadow


def _copy_message(message: Message) -> Message:
    """Copy a message and its list of contents."""
    clone = copy.copy(message)
    clone.contents = list(message.contents)
    clone.additional_properties = dict(message.additional_properties)
    return clone


def copy_state(workflow: Workflow) -> State:
    return copy_containers(workflow._runner.state)


def copy_runner_context(workflow: Workflow) -> InProcRunnerContext:
    """Return a context with the tools of the run, but without its messages and receivers."""
    runner_context = InProcRunnerContext()
    runner_context.set_runtime_tools(workflow._runner.context.get_runtime_tools())
    return runner_context


def client_of(executor: Executor) -> FlashMoAChatClient | None:
    """Return the FlashMoA client of the agent that an executor asks, if it has one."""
    client = getattr(agent_of(executor), "client", None)
    return client if isinstance(client, FlashMoAChatClient) else None


def holds_workflow(executor: Executor) -> bool:
    """Return whether an executor, or an agent in it, has or is a workflow."""
    held: list[Any] = [executor, *vars(executor).values()]
    for each in list(held):
        if isinstance(each, BaseAgent):
            held += vars(each).values()
    return any(isinstance(each, _WORKFLOWS) for each in held)


def asks_no_model(executor: Executor) -> bool:
    """Return whether an executor is the framework's own and never asks a model."""
    return _is_stock(executor) and type(executor).__name__ in _WITHOUT_MODEL


def why_not_run(workflow: Workflow, executor: Executor) -> str | None:
    """Return why an executor gets no dry run, or ``None``.

    A dry run must neither run user-defined code nor ask a server.
    """
    if holds_workflow(executor):
        return "it runs a workflow, and a copy would run the same one; link that workflow itself"
    if type(executor) not in (*_AGENT_EXECUTORS, *_MANAGERS):
        return _why_no_agent(executor)
    manager = getattr(executor, "_manager", None)
    if manager is not None and type(manager) is not StandardMagenticManager:
        return f"its manager is a {type(manager).__name__}, not a StandardMagenticManager"
    if reason := _why_unpredictable(workflow, executor):
        return reason
    run_tools = workflow._runner.context.get_runtime_tools()
    if any(isinstance(tool, MCPTool) for tool in normalize_tools(run_tools)):
        return _ASKS_SERVERS
    if isinstance(executor, AgentExecutor) and executor._context_mode == "custom":
        return "its context_filter is code of your own, which is not run to predict its prompt"
    if client_of(executor) is None:
        return "its client is not a FlashMoAChatClient; give it one"
    return None


def why_rewritten(workflow: Workflow, executor: Executor) -> str | None:
    """Return why others may get a message other than its model's text, or ``None``."""
    if type(executor) not in _AGENT_EXECUTORS:
        return f"{executor.id} is a {type(executor).__name__}, not an AgentExecutor"
    return _why_unpredictable(workflow, executor)


def why_call_unpredictable(client: FlashMoAChatClient, arguments: Mapping[str, Any]) -> str | None:
    """Return why a client may change the request before it sends it, or ``None``.

    Args:
        arguments: the keyword arguments of the client's ``get_response``.
    """
    if client.compaction_strategy or arguments.get("compaction_strategy"):
        return "it has a compaction strategy"
    for name in _find_own_code(client, FlashMoAChatClient, _CLIENT_METHODS):
        return f"{type(client).__name__}.{name}, which its client has, is not FlashMoA's own"
    options: Mapping[str, Any] = arguments.get("options") or {}
    for tool in normalize_tools(options.get("tools")):
        own = (getattr(type(tool), name, None) for name in _TOOL_METHODS)
        if isinstance(tool, FunctionTool) and tuple(own) != _STOCK_TOOL_METHODS:
            return f"its tool's {type(tool).__name__} describes itself by code of your own"
    if options.get("store") or options.get("conversation_id"):
        return _HISTORY_ELSEWHERE
    if client.chat_middleware:
        return "its client has middleware"
    if any(type(each) not in _OWN_MIDDLEWARE for each in _get_middleware(arguments)):
        return "its request has middleware"
    return None


def _get_middleware(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the middleware in the arguments of a client's ``get_response``."""
    client_kwargs: Mapping[str, Any] = arguments.get("client_kwargs") or {}
    found: list[Any] = []
    for given in (arguments.get("middleware"), client_kwargs.get("middleware")):
        if given:
            found += cast("Any", given) if isinstance(given, Sequence) else [given]
    return found


def _find_own_code(owner: Any, stock: Any, methods: tuple[str, ...]) -> list[str]:
    """Return the names of an object's user-defined functions.

    They are methods of its class, or set on the object, as hooks are (``message_preparer``).

    Args:
        stock: the framework's or FlashMoA's class of the object.
        methods: beginnings of the names of methods that count.
    """
    names = [name for name in dir(stock) if name.startswith(methods)]
    get, held = cast("Any", getattr_static), cast("dict[str, Any]", vars(owner))
    found = [name for name in names if get(type(owner), name) is not get(stock, name)]
    found += [name for name, value in held.items() if callable(value)]
    return [name for name in found if name not in _OTHER_CODE]


def _why_no_agent(executor: Executor) -> str:
    name = type(executor).__name__
    if _is_stock(executor) and name not in _WITH_USER_CODE:
        return f"it is a {name} of Agent Framework, which is not linked"
    return "it is code of your own, which is not run to predict its prompt"


def _is_stock(executor: Executor) -> bool:
    # The framework's packages are agent_framework, agent_framework_orchestrations, ...
    return type(executor).__module__.startswith("agent_framework")


def _why_unpredictable(workflow: Workflow, executor: Executor) -> str | None:
    """Return why an agent's prompt may have parts that are unknown beforehand, or ``None``.

    Its instructions and its history are known. Anything else may cost or change something when it
    is queried, and may make the agent send others a text that is not its model's.

    Args:
        executor: the executor of an agent, or an orchestrator whose manager is an agent.
    """
    agent: Any = agent_of(executor)
    kinds: tuple[Any, ...] = (Agent, RawAgent)
    stock = next((kind for kind in kinds if isinstance(agent, kind)), None)
    if stock is None or _find_own_code(agent, stock, _AGENT_METHODS):
        return f"it is a {type(agent).__name__}, not a stock Agent"
    if any(type(each) not in _OWN_MIDDLEWARE for each in agent.middleware or ()):
        return "it has middleware"
    if any(type(each) not in _OWN_PROVIDERS for each in agent.context_providers):
        return "it has context providers other than InMemoryHistoryProvider"
    session: AgentSession | None = getattr(executor, "_session", None)
    if session is not None and session.service_session_id:
        return _HISTORY_ELSEWHERE
    if agent.mcp_tools:
        return _ASKS_SERVERS
    if not isinstance(agent.client, FlashMoAChatClient):
        return None
    arguments = {
        "client_kwargs": _client_kwargs(workflow, executor.id),
        "compaction_strategy": agent.compaction_strategy,
        "options": agent.default_options,
    }
    return why_call_unpredictable(agent.client, arguments)


def _client_kwargs(workflow: Workflow, name: str) -> Mapping[str, Any] | None:
    """Return the run's keyword arguments for the client of the executor ``name``."""
    state = workflow._runner.state
    raw = state.get(WORKFLOW_RUN_KWARGS_KEY, {})
    return prepare_agent_run_args(name, raw, state.get(RESOLVED_WORKFLOW_RUN_KWARGS_KEY))[1]
