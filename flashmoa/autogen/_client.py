"""The AutoGen model client (``FlashMoAChatCompletionClient``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self

import anyio
from autogen_core import CancellationToken
from autogen_core.models import CreateResult, LLMMessage
from autogen_core.tools import Tool, ToolSchema
from autogen_ext.models.openai.config import OpenAIClientConfigurationConfigModel

from flashmoa._concurrency import all_of
from flashmoa.autogen._call_observers import CallObservers, caller_name, calling_agent
from flashmoa.autogen._model_call import (
    SCORED_REASON,
    JsonOutput,
    finish_call,
    log_as,
    log_items_as,
    make_extra_args,
    score_call,
    why_held_back,
)
from flashmoa.autogen._promises import Pending, PromisedCall, Promises
from flashmoa.autogen._self_hosted import (
    FlashMoAClientConfigurationConfigModel,
    SelfHostedClient,
    ToolChoice,
    client_arguments,
    render,
)
from flashmoa.engine import WithoutPlugin
from flashmoa.linking.calls import ObservedCall
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure
from flashmoa.linking.streamed_text import Text
from flashmoa.observe import Listener, contained, ignore
from flashmoa.scoring import Candidate, Scorer, Scores


class FlashMoAChatCompletionClient(SelfHostedClient):
    """Replaces ``OpenAIChatCompletionClient`` for a self-hosted SGLang engine.

    By itself it is the stock client with defaults for self-hosting: it needs no API key, takes
    ``model_info`` and token counts from the engine, and reports usage in streams, too. In a
    linked team (``flashmoa.autogen.link(team)``), what its agents write is streamed into the
    prompts of the agents that will read it.

    Args:
        model: the served model's name.
        base_url: the engine's URL, with or without ``/v1``; by default OPENAI_BASE_URL of the
            environment, else the address on which SGLang listens by default.
        merge_user_messages: send consecutive user messages as one, for chat templates that refuse
            them (Mistral, Gemma); in AutoGen's teams most messages have the role ``user``.
        auto_link: link the teams of its agents automatically, at their first call.
        on_failure: what happens to links to its prompts when a text in them fails.
        stream_ttl_seconds: seconds after which the engine releases what links have prefilled if
            this process vanishes.
        without_plugin: what links to its prompts do on a server that does not have the plugin:
            ``prefill`` them in a few steps, as far as that pays, or nothing (``off``).
        listener: receives events of its calls, and of links to their prompts, but not in teams that
            were given to ``link``. Neither ``dump_component`` nor a pickle keeps it.
        **kwargs: see the stock client.
    """

    component_config_schema = FlashMoAClientConfigurationConfigModel
    component_provider_override = "flashmoa.autogen.FlashMoAChatCompletionClient"

    # Links the team on whose behalf a client is called; set by ``_team_link``, which imports this.
    link_caller: ClassVar[Callable[[Listener], None] | None] = None

    def __init__(
        self,
        *,
        auto_link: bool = False,
        merge_user_messages: bool = False,
        on_failure: OnFailure = "abort",
        stream_ttl_seconds: float = 30.0,
        without_plugin: WithoutPlugin = "prefill",
        listener: Listener = ignore,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            merge_user_messages=merge_user_messages,
            stream_ttl_seconds=stream_ttl_seconds,
            without_plugin=without_plugin,
            **kwargs,
        )
        self.on_failure = FailurePolicy.of(on_failure)
        self._listener = contained(listener)
        self._auto_link = auto_link
        self._prepare_links()

    def _prepare_links(self) -> None:
        self.observers = CallObservers(
            self.engine.url,
            self._create_args["model"],
            self._listener,
            auto_link=type(self).link_caller if self._auto_link else None,
        )
        self._promises = Promises(self.engine, self.on_failure, self._listener)

    def __getstate__(self) -> dict[str, Any]:
        # Links belong to the process that made them.
        dropped = {"observers": None, "_promises": None, "_listener": ignore}
        return {**super().__getstate__(), **dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare_links()

    @classmethod
    def _from_config(cls, config: OpenAIClientConfigurationConfigModel) -> Self:
        return cls(**client_arguments(config))

    def _to_config(self) -> FlashMoAClientConfigurationConfigModel:
        return FlashMoAClientConfigurationConfigModel(
            **self._raw_config,
            auto_link=self._auto_link,
            merge_user_messages=self._merge_user_messages,
            on_failure=self.on_failure,
            stream_ttl_seconds=self._stream_ttl_seconds,
            without_plugin=self._without_plugin,
        )

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
        messages, pending = await self._resolve(
            messages, tools, tool_choice, extra_create_args, cancellation_token
        )
        return await self._ask_model(
            messages,
            pending,
            tools=tools,
            tool_choice=tool_choice,
            json_output=json_output,
            extra_create_args=extra_create_args,
            cancellation_token=cancellation_token,
        )

    async def promise(
        self,
        messages: Sequence[LLMMessage],
        *,
        json_output: JsonOutput = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        """Start a call as :meth:`create` does, but return at once, with a mark as its content.

        This is for agents written by hand. The mark stands for the text that is being written: pass
        it on unchanged, in messages, results and f-strings. When a FlashMoA client's ``create`` or
        ``promise`` finds it in its messages, its prompt is prefilled while the text is written, and
        sent with the text. Do not parse, cut or display the mark; ``await result(content)`` returns
        the text. Raises: RuntimeError if the client is closed.
        """

        async def write(text: Text) -> CreateResult:
            resolved, pending = await self._resolve(
                messages, (), "auto", extra_create_args, cancellation_token
            )
            return await self._ask_model(
                resolved,
                pending,
                text,
                tools=(),
                tool_choice="auto",
                json_output=json_output,
                extra_create_args=extra_create_args,
                cancellation_token=cancellation_token,
            )

        agent = calling_agent()
        return self._promises.make(agent.type if agent is not None else "promise", write)

    async def result(self, content: str) -> str:
        """Return ``content`` with texts in place of its marks, once the texts are complete.

        Raises: the error of the call that was to write a text, if that call failed.
        """
        return await self._promises.result(content)

    async def score(
        self,
        messages: Sequence[LLMMessage],
        candidates: Sequence[Candidate],
        *,
        length_normalised: bool = False,
        cancellation_token: CancellationToken | None = None,
    ) -> Scores:
        """Return how likely each candidate is as the answer's beginning; nothing is decoded.

        See :meth:`flashmoa.scoring.Scorer.score`; the messages and the template arguments
        (``chat_template_kwargs`` of ``extra_body``) are those of :meth:`create`. In a linked team
        the call's prompt is prefilled while agents before it write.
        """
        params = self._process_create_args(messages, (), "auto", None, {})
        prompt = [dict(message) for message in params.messages]
        scorer = Scorer(self.engine, template_args=self._template_args)
        call = self._begin(SCORED_REASON)
        return await score_call(
            call, scorer, prompt, candidates, length_normalised, cancellation_token
        )

    async def _ask_model(
        self,
        messages: Sequence[LLMMessage],
        pending: Pending | None,
        text: Text | None = None,
        *,
        json_output: JsonOutput,
        tools: Sequence[Tool | ToolSchema],
        extra_create_args: Mapping[str, Any],
        **rest: Any,
    ) -> CreateResult:
        held = why_held_back(tools, json_output, self.model_info)
        with self._begin(held, pending, text) as call, log_as(call):
            result = await super().create(
                messages,
                tools=tools,
                json_output=json_output,
                extra_create_args=make_extra_args(self._create_args, extra_create_args, call),
                **rest,
            )
            return finish_call(call, result, json_output, tools)

    async def _resolve(
        self,
        messages: Sequence[LLMMessage],
        tools: Sequence[Tool | ToolSchema],
        tool_choice: ToolChoice,
        extra_create_args: Mapping[str, Any],
        cancellation_token: CancellationToken | None,
    ) -> tuple[Sequence[LLMMessage], Pending | None]:
        """Wait for promised texts in a call's messages; see :meth:`Promises.resolve`."""
        await self._learn_model_info()

        async def render_prompt(messages: Sequence[LLMMessage]) -> str:
            return await render(
                self,
                messages,
                tools,
                tool_choice=tool_choice,
                extra_create_args=extra_create_args,
            )

        agent = caller_name()
        try:
            return await self._promises.resolve(messages, render_prompt, agent, cancellation_token)
        except BaseException as error:
            self.observers.make_reporter(agent).failed(error)
            raise

    def _begin(
        self, held: str | None, pending: Pending | None = None, text: Text | None = None
    ) -> ObservedCall:
        """Begin a call; a pending request's prompt stream is used rather than a link's."""
        if pending is None and text is None:
            return ObservedCall(self.observers.begin(held), held)
        promised = PromisedCall(self._promises, pending, text, held)
        observers = self.observers.begin(held, promised.used_id, late=promised.is_late)
        return ObservedCall([*observers, promised], held)

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
        messages, pending = await self._resolve(
            messages, tools, tool_choice, extra_create_args, cancellation_token
        )
        held = why_held_back(tools, json_output, self.model_info, is_stream=True)
        with self._begin(held, pending) as call:
            args = make_extra_args(self._create_args, extra_create_args, call)
            if include_usage is None and "stream_options" not in {**self._create_args, **args}:
                include_usage = True
            stream = super().create_stream(
                messages,
                tools=tools,
                tool_choice=tool_choice,
                json_output=json_output,
                extra_create_args=args,
                cancellation_token=cancellation_token,
                include_usage=include_usage,
            )
            async with aclosing(log_items_as(call, stream)) as items:
                async for item in items:
                    if isinstance(item, CreateResult):
                        item = finish_call(call, item, json_output, tools)
                    yield item

    async def close(self) -> None:
        """Close every link of this client's teams, all at once, then its connections."""
        try:
            await all_of([self.observers.close, self._promises.close])
        finally:
            with anyio.CancelScope(shield=True):
                await all_of([self.engine.close, super().close])
