"""The Agent Framework chat client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self, cast
from weakref import WeakSet

from agent_framework import (
    ChatResponse,
    ChatResponseUpdate,
    Content,
    Message,
    ResponseStream,
    UsageDetails,
)
from agent_framework.openai import OpenAIChatCompletionClient
from openai.types.completion_usage import CompletionUsage

from flashmoa._concurrency import all_of
from flashmoa.completions import watch_completions
from flashmoa.engine import EngineClient, kv_namespace, self_hosted_url
from flashmoa.linking.observed_call import CallRequest, CallResult, LinkedTeam, ObservedCall

# What the framework's usage does not have; see ``PromptUsage``.
_DETAILS = ("streamed_tokens", "late_tokens")

_is_dry_run: ContextVar[bool] = ContextVar("flashmoa_dry_run", default=False)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion; ``body``: as the client would send it."""

    client: FlashMoAChatClient
    body: Mapping[str, Any]

    async def render(self) -> str:
        """Return the text of its prompt, by its engine's chat template. Raises: EngineError."""
        extra_body: Mapping[str, Any] = self.body.get("extra_body") or {}
        return await self.client.engine.render(
            self.body["messages"],
            tools=self.body.get("tools"),
            template_args=extra_body.get("chat_template_kwargs"),
        )

    @property
    def namespace(self) -> dict[str, str]:
        """The namespace of its KV."""
        extra_body: Mapping[str, Any] = self.body.get("extra_body") or {}
        return kv_namespace({"model": self.body.get("model"), **extra_body})


class Captured(Exception):
    """Carries a request out of a dry run."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__("a dry run ends here")
        self.request = request


@contextmanager
def capturing() -> Generator[None]:
    """Have every client that is asked meanwhile raise :class:`Captured` instead."""
    token = _is_dry_run.set(True)
    try:
        yield
    finally:
        _is_dry_run.reset(token)


class FlashMoAChatClient(OpenAIChatCompletionClient[Any]):
    """A drop-in for ``OpenAIChatCompletionClient`` on a self-hosted SGLang engine.

    By itself it is the stock client with defaults for self-hosting, and no API key needed. In a
    workflow that is linked (``flashmoa.agent_framework.link(workflow)``) it streams what its
    agents write into the prompts of the agents that will read it.

    Args:
        model: as served.
        base_url: the engine's URL, with or without ``/v1``; by default OPENAI_BASE_URL of the
            environment, else where SGLang listens by default.
        api_key: what the server was started with, if anything.
        default_headers: sent with every request.
        stream_ttl_seconds: after what time the engine releases what links have prefilled if this
            process vanishes.
        **kwargs: as the stock client's.

    Close it, or use it as a context manager. Its usage details have ``prompt/streamed_tokens``
    and ``prompt/late_tokens`` where the engine says so.
    """

    DEFAULT_EXCLUDE: ClassVar[set[str]] = {
        *OpenAIChatCompletionClient.DEFAULT_EXCLUDE,
        "engine",
        "linked",
    }

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        stream_ttl_seconds: float = 30.0,
        **kwargs: Any,
    ) -> None:
        url = self_hosted_url(base_url)
        super().__init__(  # pyright: ignore[reportUnknownMemberType] - its credentials of Azure
            model,
            base_url=f"{url}/v1",
            api_key=api_key or "EMPTY",
            default_headers=default_headers,
            **kwargs,
        )
        watch_completions(cast("Any", self.client))
        self.engine = EngineClient(
            url,
            api_key=api_key,
            headers=default_headers,
            stream_ttl_seconds=stream_ttl_seconds,
        )
        # A linked workflow keeps its link; a client must not keep the workflow.
        self.linked: WeakSet[LinkedTeam] = WeakSet()

    async def close(self) -> None:
        """Close every link of this client's workflows, then its connections."""
        try:
            await all_of([workflow.close for workflow in list(self.linked)])
            await self.engine.close()
        finally:
            await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def get_response(self, messages: Sequence[Message], **kwargs: Any) -> Any:  # type: ignore[override]
        """Ask as the stock client does; a dry run ends here."""
        if _is_dry_run.get():
            options: Mapping[str, Any] = kwargs.get("options") or {}
            raise Captured(ChatRequest(self, self._prepare_options(messages, options)))
        return super().get_response(messages, **kwargs)

    def _inner_get_response(
        self,
        *,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        stream: bool = False,
        **kwargs: Any,
    ) -> Awaitable[ChatResponse] | ResponseStream[ChatResponseUpdate, ChatResponse]:
        inner = super()._inner_get_response

        def send(with_options: Mapping[str, Any]) -> Any:
            return inner(messages=messages, options=with_options, stream=stream, **kwargs)

        if not self.linked:
            return send(options)
        if stream:
            updates = self._watched_updates(send, options)
            return self._build_response_stream(
                updates, response_format=options.get("response_format")
            )
        return self._watched_response(send, options)

    async def _watched_response(
        self,
        send: Callable[[Mapping[str, Any]], Awaitable[ChatResponse]],
        options: Mapping[str, Any],
    ) -> ChatResponse:
        call = self._begin(options)
        if call is None:
            return await send(options)
        with call:
            response = await send(_observed(options, call))
            contents = [one for message in response.messages for one in message.contents]
            _finish(call, contents, response.finish_reason)
            return response

    async def _watched_updates(
        self,
        send: Callable[[Mapping[str, Any]], ResponseStream[ChatResponseUpdate, ChatResponse]],
        options: Mapping[str, Any],
    ) -> AsyncGenerator[ChatResponseUpdate]:
        call = self._begin(options)
        if call is None:
            async for update in send(options):
                yield update
            return
        contents: list[Content] = []
        reason: str | None = None
        with call:
            async for update in send(_observed(options, call)):
                contents += update.contents
                reason = update.finish_reason or reason
                yield update
            _finish(call, contents, reason)

    def _begin(self, options: Mapping[str, Any]) -> ObservedCall | None:
        """Begin a request that goes out; ``None`` where it is of no linked workflow."""
        held = "it calls tools" if options.get("tools") else None
        request = CallRequest(self.engine.url, options.get("model") or self.model or "", held)
        observers = [
            observer
            for workflow in list(self.linked)
            if (observer := workflow.observe(request)) is not None
        ]
        return ObservedCall(observers, held) if observers else None

    def _parse_usage_from_openai(self, usage: CompletionUsage) -> UsageDetails:
        details = super()._parse_usage_from_openai(usage)
        told = usage.prompt_tokens_details
        more: Mapping[str, Any] = (told.model_extra if told is not None else None) or {}
        for name in _DETAILS:
            if isinstance(more.get(name), int):
                cast("dict[str, Any]", details)[f"prompt/{name}"] = more[name]
        return details


def _observed(options: Mapping[str, Any], call: ObservedCall) -> dict[str, Any]:
    """Return a request's options, with what observes it in their body."""
    return {**options, "extra_body": call.body(options.get("extra_body") or {})}


def _finish(call: ObservedCall, contents: Sequence[Content], reason: str | None) -> None:
    """Tell a request's observers what the framework made of its answer."""
    text = "".join(one.text or "" for one in contents if one.type == "text")
    calls_tools = any(one.type == "function_call" for one in contents)
    call.finish(CallResult(text, call.usage, reason, is_forwarded=not calls_tools))
