"""The AutoGen model client (``FlashMoAChatCompletionClient``)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Literal, Self, cast

import anyio
import httpx
from autogen_core import CancellationToken
from autogen_core.models import CreateResult, LLMMessage, ModelFamily, ModelInfo
from autogen_core.tools import Tool, ToolSchema
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.openai._model_info import get_info
from autogen_ext.models.openai._openai_client import CreateParams
from autogen_ext.models.openai.config import OpenAIClientConfigurationConfigModel
from pydantic import BaseModel, SecretStr

from flashmoa.engine import EngineClient, EngineSettings, kv_namespace
from flashmoa.engine.connections import self_hosted_key, self_hosted_url, verification
from flashmoa.engine.plain import Models
from flashmoa.engine.refusals import Answer, bad_answer, read_answer, translate_errors
from flashmoa.engine.wire import PromptTokens
from flashmoa.errors import EngineError, EngineTimeout, EngineUnreachable, RequestRefused
from flashmoa.frameworks.autogen.calls import (
    SCORED_REASON,
    JsonOutput,
    caller_name,
    calling_agent,
    finish_call,
    score_call,
    why_held_back,
)
from flashmoa.link.calls import CallObserver, CallRequest, ObservedCall, current_attempts
from flashmoa.link.expected import ChatRequest
from flashmoa.link.failure_policy import FailurePolicy, OnFailure
from flashmoa.link.linked_team import LinkedTeams
from flashmoa.link.prompt_feed import level_once
from flashmoa.observe import Listener
from flashmoa.observe.calls import CallReporter
from flashmoa.observe.events import contained, ignore
from flashmoa.openai.http import advising, observe_completions
from flashmoa.scoring import Candidate, Scores

logger = logging.getLogger(__name__)

ToolChoice = Tool | Literal["auto", "required", "none"]

_NO_TOOLS = (
    "The engine at %s reads no tool calls, so AutoGen refuses agents with tools; start it with "
    "--tool-call-parser and the name of its model's format."
)


class FlashMoAClientConfigurationConfigModel(OpenAIClientConfigurationConfigModel):
    """The configuration that ``dump_component`` writes; unlike the stock one, with extra_body."""

    extra_body: dict[str, Any] | None = None
    auto_link: bool = False
    merge_user_messages: bool = False
    on_failure: OnFailure = FailurePolicy()
    engine_settings: EngineSettings = EngineSettings()


class FlashMoAChatCompletionClient(OpenAIChatCompletionClient):
    """Replaces ``OpenAIChatCompletionClient`` for a self-hosted SGLang engine.

    By itself it is the stock client with defaults for self-hosting: it needs no API key, takes
    ``model_info`` and token counts from the engine, and reports usage in streams, too. In a
    linked team (``flashmoa.autogen.link(team)``), the texts of its agents are streamed into the
    prompts of the agents that will read them.

    Args:
        model: the served model's name.
        base_url: the engine's URL, with or without ``/v1``; by default the environment's
            ``OPENAI_BASE_URL`` or else SGLang's default address.
        merge_user_messages: merge consecutive user messages, for chat templates that refuse them
            (Mistral, Gemma). In AutoGen's teams most messages have the role ``user``.
        auto_link: link the teams of its agents automatically, at their first call.
        on_failure: the failure policy of automatic links.
        engine_settings: how links use the engine.
        listener: receives events of its calls, and of links to their prompts, but not in teams that
            were given to ``link``. Neither ``dump_component`` nor a pickle keeps it.
        **kwargs: see the stock client.
    """

    component_config_schema = FlashMoAClientConfigurationConfigModel
    component_provider_override = "flashmoa.autogen.FlashMoAChatCompletionClient"
    # Links the team that is calling. The module ``team_link``, which imports this one, sets it.
    _link_caller: ClassVar[Callable[..., None]]

    def __init__(
        self,
        *,
        auto_link: bool = False,
        merge_user_messages: bool = False,
        on_failure: OnFailure = "abort",
        engine_settings: EngineSettings | None = None,
        listener: Listener = ignore,
        **kwargs: Any,
    ) -> None:
        if not kwargs.get("model"):
            raise ValueError(
                "no model is given; FlashMoAChatCompletionClient needs model=NAME, the name of "
                "the served model"
            )
        url = self_hosted_url(kwargs.get("base_url"))
        key = self_hosted_key(kwargs.get("api_key"), kwargs.get("base_url"))
        kwargs["api_key"] = key or "EMPTY"
        kwargs["base_url"] = f"{url}/v1"
        headers = {"Authorization": f"Bearer {kwargs['api_key']}"}
        headers |= kwargs.get("default_headers") or {}
        self._synchronous = SynchronousEngine(url, headers)
        # When to ask the engine again for the abilities of its model (``time.monotonic()``).
        self._asks_again = math.inf
        if "model_info" not in kwargs and "model_capabilities" not in kwargs:
            kwargs["model_info"] = self._find_model_info(kwargs["model"])
        super().__init__(**kwargs)
        if self._asks_again < math.inf:
            del self._raw_config["model_info"]
        self._auto_link = auto_link
        self._merge_user_messages = merge_user_messages
        self.on_failure = FailurePolicy.of(on_failure)
        self._engine_settings = engine_settings or EngineSettings()
        self._listener = contained(listener)
        self._connect()

    def _connect(self) -> None:
        observe_completions(cast("Any", self._client)._client, current_attempts)
        key, model = self._raw_config["api_key"], self._create_args["model"]
        self.engine = EngineClient(
            self._raw_config["base_url"],
            api_key=None if key == "EMPTY" else key,
            timeout=self._raw_config.get("timeout") or 600.0,
            headers=self._raw_config.get("default_headers"),
            namespace=kv_namespace({"model": model, **(self._create_args.get("extra_body") or {})}),
            model=model,
            engine_settings=self._engine_settings,
        )
        self.linked_teams = LinkedTeams()

    def __getstate__(self) -> dict[str, Any]:
        # Connections and links belong to the process that made them.
        asks_again = math.inf if self._asks_again == math.inf else 0.0
        dropped = {"engine": None, "linked_teams": None, "_listener": ignore}
        return {**super().__getstate__(), **dropped, "_asks_again": asks_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    @classmethod
    def _from_config(cls, config: OpenAIClientConfigurationConfigModel) -> Self:
        fields = config.model_dump(exclude_none=True)
        if isinstance(config.api_key, SecretStr):
            fields["api_key"] = config.api_key.get_secret_value()
        if isinstance(config, FlashMoAClientConfigurationConfigModel):
            # ``model_dump`` has turned these into dictionaries.
            fields["on_failure"] = config.on_failure
            fields["engine_settings"] = config.engine_settings
        return cls(**fields)

    def _to_config(self) -> FlashMoAClientConfigurationConfigModel:
        return FlashMoAClientConfigurationConfigModel(
            **self._raw_config,
            auto_link=self._auto_link,
            merge_user_messages=self._merge_user_messages,
            on_failure=self.on_failure,
            engine_settings=self._engine_settings,
        )

    @property
    def model_info(self) -> ModelInfo:
        """The abilities of the engine's model.

        If the engine has not answered yet, this asks it again, which blocks for at most 2 s.
        """
        if time.monotonic() >= self._asks_again:
            info = self._find_model_info(self._create_args["model"])
            self._model_info = info
            if self._asks_again == math.inf:
                self._raw_config["model_info"] = info
        return self._model_info

    async def _learn_model_info(self, *, uses_tools: bool) -> None:
        """Ask the engine again for its model's abilities, in another thread, if it is time to.

        Log why AutoGen refuses tools if the engine reads no tool calls.
        """
        if time.monotonic() >= self._asks_again:
            await anyio.to_thread.run_sync(lambda: self.model_info, abandon_on_cancel=True)
        if uses_tools and not self.model_info["function_calling"]:
            logger.log(level_once(self.engine.url, "tools"), _NO_TOOLS, self.engine.url)

    def _find_model_info(self, model: str) -> ModelInfo:
        """Return AutoGen's own entry for a model of this name, or else the engine's answer.

        If the engine cannot be reached, return the abilities of SGLang with any text model, and ask
        again later.
        """
        is_first, self._asks_again = self._asks_again == math.inf, math.inf
        with suppress(KeyError, ValueError):
            return get_info(model)
        served = Abilities()
        begun = time.monotonic()
        try:
            served = self._synchronous.abilities()
            if not served.tool_call_parser:
                logger.info(_NO_TOOLS, self._synchronous.url)
        except EngineError as error:
            # Other errors come from servers without this route.
            is_down = isinstance(error, EngineUnreachable | EngineTimeout)
            if is_down or (isinstance(error, RequestRefused) and error.status >= 500):
                now = time.monotonic()
                self._asks_again = now + 9 * (now - begun)  # Asking takes a tenth of the time.
                if is_first:
                    logger.warning(
                        "%s It will be asked again at the next use of the client for what the "
                        "model can do; until it answers, that is assumed to be tools, but no "
                        "images.",
                        error,
                    )
        return ModelInfo(
            vision=served.has_image_understanding,
            function_calling=bool(served.tool_call_parser),
            json_output=True,
            family=ModelFamily.UNKNOWN,
            structured_output=True,
            multiple_system_messages=False,
        )

    def _process_create_args(self, *args: Any, **kwargs: Any) -> CreateParams:
        params = super()._process_create_args(*args, **kwargs)
        if self._merge_user_messages:
            params.messages[:] = merge_user_messages(params.messages)
        return params

    def _request(
        self,
        messages: Sequence[LLMMessage],
        tools: Sequence[Tool | ToolSchema] = (),
        tool_choice: ToolChoice = "auto",
        extra_create_args: Mapping[str, Any] = {},
    ) -> ChatRequest:
        params = self._process_create_args(messages, tools, tool_choice, None, extra_create_args)
        lists = {"messages": params.messages, "tools": params.tools}
        dicts = {name: [dict(each) for each in found] for name, found in lists.items()}
        return ChatRequest(self.engine, {**params.create_args, **dicts})

    def _scoring_request(self, messages: Sequence[LLMMessage]) -> ChatRequest:
        """Return the request of :meth:`score`, which gives chat templates fewer fields."""
        given = self._request(messages)
        names = ("messages", "chat_template_kwargs")
        body = {name: given.sent.get(name) for name in names}
        return ChatRequest(self.engine, {**given.namespace, **body})

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: JsonOutput = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        await self._learn_model_info(uses_tools=bool(tools))
        held = why_held_back(json_output, self.model_info)
        with self._begin(held) as call, call.making(), advising(self.engine.url):
            result = await super().create(
                messages,
                tools=tools,
                tool_choice=tool_choice,
                json_output=json_output,
                extra_create_args=extra_create_args,
                cancellation_token=cancellation_token,
            )
            return finish_call(call, result, json_output, tools)

    async def create_stream(  # noqa: PLR0913 - AutoGen's signature
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: JsonOutput = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
        max_consecutive_empty_chunk_tolerance: int = 0,
        include_usage: bool | None = None,
    ) -> AsyncGenerator[str | CreateResult, None]:
        await self._learn_model_info(uses_tools=bool(tools))
        held = why_held_back(json_output, self.model_info)
        with self._begin(held) as call, advising(self.engine.url):
            given = {**self._create_args, **extra_create_args}
            if include_usage is None and "stream_options" not in given:
                include_usage = True
            stream = super().create_stream(
                messages,
                tools=tools,
                tool_choice=tool_choice,
                json_output=json_output,
                extra_create_args=extra_create_args,
                cancellation_token=cancellation_token,
                max_consecutive_empty_chunk_tolerance=max_consecutive_empty_chunk_tolerance,
                include_usage=include_usage,
            )
            async with aclosing(stream), aclosing(call.items(stream)) as items:
                async for item in items:
                    if isinstance(item, CreateResult):
                        item = finish_call(call, item, json_output, tools)
                    yield item

    async def score(
        self,
        messages: Sequence[LLMMessage],
        candidates: Sequence[Candidate],
        *,
        length_normalised: bool = False,
        cancellation_token: CancellationToken | None = None,
    ) -> Scores:
        """Return how likely each candidate is as the answer's beginning; nothing is decoded.

        See :meth:`flashmoa.scoring.Scorer.score`. Messages and template arguments
        (``chat_template_kwargs`` of ``extra_body``) are as in :meth:`create`. In a linked team,
        the engine prefills the prompt while earlier agents write.
        """
        request, call = self._scoring_request(messages), self._begin(SCORED_REASON)
        return await score_call(call, request, candidates, length_normalised, cancellation_token)

    def count_tokens(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
    ) -> int:
        """Return the number of tokens in the prompt as the engine would build it.

        AutoGen's interface is synchronous, so this blocks until the engine answers.

        Raises: EngineError if the engine cannot be reached or refuses.
        """
        return self._synchronous.count_tokens(self._request(messages, tools))

    def remaining_tokens(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
    ) -> int:
        """Return the served model's context length less :meth:`count_tokens`.

        Raises: EngineError, see :meth:`count_tokens`.
        """
        context = self._synchronous.context_length(self._create_args["model"])
        return context - self.count_tokens(messages, tools=tools)

    async def close(self) -> None:
        """Close every link of this client's teams, all at once, then its connections."""
        await self.linked_teams.close(self.engine.close, super().close)

    def _begin(self, held: str | None) -> ObservedCall:
        """Begin a call whose request is about to be sent.

        Linked teams observe it. Without a linked team, events go to the client's own listener.

        Args:
            held: see :class:`CallRequest`.
        """
        url, model = self.engine.url, self._create_args["model"]
        observers = self._find_observers(CallRequest(url, model, held, self.engine))
        if not observers and self._listener is not ignore:
            report = CallReporter(self._listener, agent=caller_name(), engine=url, model=model)
            report.started(None, "its agent is in no linked team")
            observers = [CallObserver(report)]
        return ObservedCall(observers)

    def _find_observers(self, request: CallRequest) -> list[CallObserver]:
        """Return the observers of linked teams; ``auto_link`` may link the caller's team first."""
        agent = calling_agent()
        if agent is None:
            return []
        observers = self.linked_teams.observe(agent, request)
        if not observers and self._auto_link:
            try:
                self._link_caller(on_failure=self.on_failure, listener=self._listener)
            except Exception:
                # Whatever is wrong with a link, the agent's call must be made.
                text = "The team of %s runs unlinked because of the error below"
                logger.exception(text, agent.type)
            observers = self.linked_teams.observe(agent, request)
        return observers


class SynchronousEngine:
    """Queries an engine where AutoGen's interface is synchronous; each method blocks.

    Each method raises EngineError if the engine cannot be reached or refuses.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._headers = headers
        self._context_lengths: dict[str, int] = {}

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens in the prompt of a request."""
        body = {"model": request.body["model"], "messages": request.body["messages"]}
        body |= {"max_tokens": 1, **request.fields}
        return len(self._ask("/tokenize", PromptTokens, body).tokens)

    def context_length(self, model: str) -> int:
        """Return a model's context length in tokens.

        If the engine does not list the model, return the length of the first listed model, since
        SGLang answers requests with any model name.
        """
        if model not in self._context_lengths:
            path = "/v1/models"
            served = self._ask(path, Models).context_lengths
            length = served.get(model, next(iter(served.values()), None))
            if length is None:
                raise bad_answer(self.url, path)
            self._context_lengths[model] = length
        return self._context_lengths[model]

    def abilities(self) -> Abilities:
        """Return the model's abilities, by SGLang's ``/model_info``."""
        # Often the engine has not been started yet, and making the client waits for this.
        return self._ask("/model_info", Abilities, timeout=2.0)

    def _ask(
        self,
        path: str,
        answer: type[Answer],
        body: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
    ) -> Answer:
        with translate_errors(self.url):
            response = httpx.request(
                "GET" if body is None else "POST",
                self.url + path,
                json=body,
                headers=self._headers,
                timeout=timeout,
                verify=verification(self.url),
            )
        return read_answer(response, self.url, answer)


class Abilities(BaseModel):
    """Abilities of an engine's model; without a parser, tool calls would arrive as text."""

    has_image_understanding: bool = False
    tool_call_parser: str | bool | None = True


def merge_user_messages(messages: Sequence[Any]) -> list[Any]:
    """Merge consecutive user messages that are texts; return OpenAI messages.

    Merged messages lose their names; ``add_name_prefixes`` keeps names in the text.
    """
    merged: list[Any] = []
    for message in messages:
        previous = merged[-1] if merged else None
        if previous is not None and _is_user_text(previous) and _is_user_text(message):
            content = f"{previous['content']}\n\n{message['content']}"
            merged[-1] = {"role": "user", "content": content}
        else:
            merged.append(message)
    return merged


def _is_user_text(message: Any) -> bool:
    fields = cast("dict[str, Any]", message)
    return fields.get("role") == "user" and isinstance(fields.get("content"), str)
