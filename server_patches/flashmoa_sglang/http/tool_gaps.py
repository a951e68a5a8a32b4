"""``ToolGaps``: an agent's next prompt is held while its tools run, whatever its client is.

An answer that ends in tool calls leaves a prompt stream of the prompt that will come back with the
results, up to the first of them. The chat template renders it from the answer as the client gets
it. The decoded tokens often differ from it, and so would a second parse, since SGLang's parsers of
streams and of whole answers differ. What the radix tree has of the prompt is pinned, and the rest
is prefilled. The request is known by its prompt, so that every client gains
and none has to name the stream. They give way before streams that grow, but not to requests that
are held back (``scheduler/admission.py``).

Of a request of token ids, as one that came through a front end which renders chats itself, the next
prompt is not known. What is held is its own prompt with the tokens of its answer.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.http import asked, client_requests, metrics, rendering
from flashmoa_sglang.http.errors import ApiError
from flashmoa_sglang.http.tokens.token_buffer import TokenBuffer, common_length
from flashmoa_sglang.sglang.options import Options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.rendering import ChatRenderer
    from flashmoa_sglang.http.sent_answers import ChatApi, Events, Part
    from flashmoa_sglang.http.stream import PromptStream
    from flashmoa_sglang.http.streams import StreamTable

logger = logging.getLogger(__name__)

# Stands for each result in the rendered prompt, which is cut at the first.
_RESULT = "FLASHMOA-TOOL-RESULT-6f0c2a"


@dataclass(slots=True)
class _Answer:
    """The answer to a chat, while SGLang makes it.

    Attributes:
        api: the API of its request.
        chat: the ``ChatCompletionRequest``, once it is known that the answer may call tools.
        obj: its ``GenerateReqInput``, likewise.
        meta: the ``meta_info`` of the last output, if the model has ended the answer itself.
        is_over: whether reading it has ended.
    """

    api: ChatApi
    chat: Any = None
    obj: Any = None
    meta: dict[str, Any] | None = None
    is_over: bool = False


# The answer that is made in this context, if its API is one of ``sent_answers``.
_answer: ContextVar[_Answer | None] = ContextVar("flashmoa_answer", default=None)


class ToolGaps:
    """Holds the next prompts of agents whose tools run."""

    def __init__(self, engine: Engine, table: StreamTable, renderer: ChatRenderer) -> None:
        self._engine = engine
        self._table = table
        self._renderer = renderer
        self._seconds = Options.from_environment().hold_tool_calls
        self._has_failed = False
        # Each ends by itself once its prompt is rendered. With the requests that have come since.
        self._tasks: dict[asyncio.Task[None], list[Any]] = {}

    @staticmethod
    def may_hold(engine: Engine) -> bool:
        """Return whether prompts are to be held, and this engine keeps KV and decodes."""
        wanted = Options.from_environment().hold_tool_calls > 0
        return wanted and engine.role is None and engine.has_radix_cache

    def watch(self, obj: Any, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """Return the outputs of a ``GenerateReqInput``, and note how its answer ends."""
        if not hasattr(obj, "stream"):
            return outputs  # This is a request for an embedding.
        for come in self._tasks.values():
            come.append(obj)
        chat, answer = rendering.served.get(), _answer.get()
        if not self._may_call(chat, obj):
            return self._watch_without_calls(obj, outputs)
        if answer is None or not _is_chat(chat):
            return self._watch_tokens(obj, outputs)
        answer.chat, answer.obj = chat, obj
        return self._watch_chat(answer, outputs)

    def _may_call(self, chat: Any, obj: Any) -> bool:
        """Return whether a request may be answered with calls, and the next prompt be known."""
        # Requests of a session find no streams by their prompts.
        if not client_requests.has_one_prompt(obj) or not asked.has_one_answer(obj):
            return False
        return bool(chat.tools) if _is_chat(chat) else self._renderer.knows_calls

    async def _watch_chat(
        self, answer: _Answer, outputs: AsyncGenerator[Any]
    ) -> AsyncGenerator[Any]:
        async with aclosing(outputs):
            async for output in outputs:
                if _has_stopped(output):
                    if answer.is_over:
                        self._expect_no_more(answer.obj, output["meta_info"])
                    else:
                        answer.meta = output["meta_info"]
                yield output

    async def _watch_tokens(self, obj: Any, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        pieces, ids = self._engine.streams_pieces(obj), list[int]()
        async with aclosing(outputs):
            async for output in outputs:
                if pieces:
                    ids += output.get("output_ids") or ()
                if _has_stopped(output):
                    of_answer = ids if pieces else output["output_ids"]
                    next_tokens = partial(self._with_answer, array("q", obj.input_ids), of_answer)
                    self._hold_next(obj, output["meta_info"], next_tokens)
                yield output

    async def follow(self, api: ChatApi, serving: Awaitable[Any]) -> Any:
        """Return a chat's answer, whole or streamed, and hold the next prompt if it has calls.

        Args: serving: SGLang's answer to a request of the API.
        """
        answer = _Answer(api)
        _answer.set(answer)
        result: Any = None
        is_streamed = False
        try:
            result = await serving
            is_streamed = hasattr(result, "body_iterator") or hasattr(result, "__aiter__")
            if answer.meta is not None and not is_streamed:
                self._hold_after(answer, partial(api.read, result))
        finally:
            if not is_streamed:
                self._end(answer)
        if hasattr(result, "body_iterator"):
            result.body_iterator = self._follow_events(answer, result.body_iterator)
            return result
        return self._follow_events(answer, result) if is_streamed else result

    async def _follow_events(self, answer: _Answer, events: Any) -> AsyncGenerator[Any]:
        sent = answer.api.events()
        try:
            async for event in events:
                if answer.obj is not None and not answer.is_over:
                    self._read(answer, sent, event if isinstance(event, str) else event.decode())
                yield event
        finally:
            self._end(answer)

    def _read(self, answer: _Answer, sent: Events, event: str) -> None:
        try:
            sent.add(event)
        except Exception as error:  # The client must get its answer.
            self._report(error)
            self._end(answer)
        else:
            if answer.meta is not None and answer.api.end in event:
                self._hold_after(answer, sent.parts)

    def _hold_after(self, answer: _Answer, read: Callable[[], list[Part]]) -> None:
        assert answer.meta is not None
        next_tokens = partial(self._next_prompt, answer, read)
        self._hold_next(answer.obj, answer.meta, next_tokens)
        answer.is_over, answer.meta = True, None

    def _end(self, answer: _Answer) -> None:
        """Expect no results of tools, unless the answer was sent and has called some."""
        if answer.meta is not None:
            self._expect_no_more(answer.obj, answer.meta)
        answer.is_over, answer.meta = True, None

    def _hold_next(
        self, obj: Any, meta: dict[str, Any], next_tokens: Callable[[], array[int] | None]
    ) -> None:
        """Hold an agent's next prompt, if there is one, while other requests go on.

        Args: next_tokens: returns its known tokens, or ``None`` without tool calls.
        """
        come: list[Any] = []
        task = asyncio.create_task(self._hold(obj, meta, next_tokens, come))
        self._tasks[task] = come
        task.add_done_callback(self._tasks.pop)

    async def _watch_without_calls(
        self, obj: Any, outputs: AsyncGenerator[Any]
    ) -> AsyncGenerator[Any]:
        async with aclosing(outputs):
            async for output in outputs:
                # The output is a list if the request asks for several answers.
                for answer in output if isinstance(output, list) else [output]:
                    if _has_stopped(answer):
                        self._expect_no_more(obj, answer["meta_info"])
                yield output

    def _expect_no_more(self, obj: Any, meta: dict[str, Any]) -> None:
        """Tell the scheduler that the agent of a stream's request does not return from tools."""
        if client_requests.has_stream(obj):
            self._engine.release(meta["id"])

    async def _hold(
        self,
        obj: Any,
        meta: dict[str, Any],
        next_tokens: Callable[[], array[int] | None],
        come: list[Any],
    ) -> None:
        def has_come(stream: PromptStream) -> bool:
            return any(client_requests.has_prompt_of(request, stream) for request in come)

        is_held = False
        try:
            # A long prompt takes tens of milliseconds, in which no other token would go out.
            tokens = await asyncio.to_thread(next_tokens)
            if tokens is not None:
                since = common_length(array("q", obj.input_ids), tokens)
                # A tool may have ended before, and its result can take no stream any more.
                is_held = self._table.hold(obj, meta, tokens, self._seconds, since, has_come)
        except ApiError as error:
            logger.debug("A prompt is not held while tools run: %s", error)
        except Exception as error:  # Chat templates may raise anything.
            self._report(error)
        if is_held:
            metrics.count("tool_calls_held")
        else:
            self._expect_no_more(obj, meta)

    def _report(self, error: Exception) -> None:
        log = logger.debug if self._has_failed else logger.warning
        self._has_failed = True
        log("A prompt is not held while tools run: %s: %s", type(error).__name__, error)

    def _with_answer(self, prompt: array[int], ids: list[int]) -> array[int] | None:
        """Return a prompt of token ids with its answer, or ``None`` without tool calls."""
        return prompt + array("q", ids) if self._renderer.calls_tools(ids) else None

    def _next_prompt(self, answer: _Answer, read: Callable[[], list[Part]]) -> array[int] | None:
        """Return the next prompt up to its first result, or ``None`` without tool calls.

        Args: read: returns the parts of the answer.
        """
        messages = self._renderer.read_parts(answer.api, read())
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        if not calls:
            return None
        if not _returns_thoughts(answer):
            messages = [{k: m[k] for k in m if k != "reasoning_content"} for m in messages]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": _RESULT} for c in calls]
        *before, last = self._renderer.render_with(answer.chat, [*messages, *results]).pieces
        text, mark, _ = last.text.partition(_RESULT)
        tokenizer = self._engine.tokenizer
        if before or not mark or tokenizer is None:
            return None
        buffer = TokenBuffer(tokenizer, last.add_special_tokens)
        buffer.append(text)
        return buffer.tokens


def _is_chat(chat: Any) -> bool:
    """Return whether a request's messages are known, which is then SGLang's chat."""
    # SGLang makes one of a request of the Responses API, but not for models of Harmony.
    return hasattr(chat, "messages")


def _returns_thoughts(answer: _Answer) -> bool:
    """Return whether the thoughts of an answer are likely to come back with it.

    What its client has done before tells, or else what most clients of the API do.
    """
    earlier = [message for message in answer.chat.messages if message.role == "assistant"]
    if not earlier:
        return answer.api.returns_thoughts
    return any(getattr(message, "reasoning_content", None) for message in earlier)


def _has_stopped(output: dict[str, Any]) -> bool:
    """Return whether an answer has ended by itself, as one does that calls tools."""
    return (output["meta_info"].get("finish_reason") or {}).get("type") == "stop"
