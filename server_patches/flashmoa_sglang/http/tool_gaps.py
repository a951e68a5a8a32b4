"""``ToolGaps``: pins an agent's next prompt while its tools run, whatever its client is.

After an answer with tool calls, the server opens a prompt stream of the agent's next prompt, up to
the first result. The chat template renders that prompt from the answer as the client gets it: the
decoded tokens often differ from it, and so would a second parse, since SGLang's parsers of streams
and of whole answers differ. The stream pins the KV that the radix tree has and prefills the rest.
The next request is known by its prompt, so no client has to name the stream. Under KV pressure
these streams are unpinned before streams that grow, but not for requests that wait because their
own prompts were unpinned (``scheduler/admission.py``).

Front ends that render chats themselves send token ids. The next prompt is not known then, so the
request's own prompt is pinned with the tokens of its answer.
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
    from flashmoa_sglang.http.sent_answers import Part, SentAnswer
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
        obj: the ``GenerateReqInput``, likewise.
        meta: the ``meta_info`` of the last output, if the model has ended the answer itself.
        is_over: whether reading it has ended.
    """

    api: type[SentAnswer]
    chat: Any = None
    obj: Any = None
    meta: dict[str, Any] | None = None
    is_over: bool = False


# The answer that is made in this context, if ``sent_answers`` reads its API.
_answer: ContextVar[_Answer | None] = ContextVar("flashmoa_answer", default=None)


class ToolGaps:
    """Pins the next prompts of agents whose tools run."""

    def __init__(self, engine: Engine, table: StreamTable, renderer: ChatRenderer) -> None:
        self._engine = engine
        self._table = table
        self._renderer = renderer
        self._seconds = Options.from_environment().hold_tool_calls
        self._has_failed = False
        # Tasks that render and pin a prompt, each with the requests that have come since.
        self._tasks: dict[asyncio.Task[None], list[Any]] = {}

    @staticmethod
    def may_hold(engine: Engine) -> bool:
        """Return whether to pin next prompts, and this engine keeps KV and decodes."""
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
            return _watch(outputs, partial(self._expect_no_more, obj))
        if answer is None or not _is_chat(chat):
            return self._watch_tokens(obj, outputs)
        answer.chat, answer.obj = chat, obj
        return _watch(outputs, partial(self._note_end, answer))

    def _may_call(self, chat: Any, obj: Any) -> bool:
        """Return whether the answer may call tools, and the next prompt would be known."""
        # Requests of a session find no streams by their prompts.
        if not client_requests.has_one_prompt(obj) or not asked.has_one_answer(obj):
            return False
        return bool(chat.tools) if _is_chat(chat) else self._renderer.knows_calls

    def _note_end(self, answer: _Answer, meta: dict[str, Any]) -> None:
        if answer.is_over:
            self._expect_no_more(answer.obj, meta)
        else:
            answer.meta = meta

    async def _watch_tokens(self, obj: Any, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        pieces, ids = self._engine.streams_pieces(obj), list[int]()
        async with aclosing(outputs):
            async for output in outputs:
                if pieces:
                    ids += output.get("output_ids") or ()
                if _has_stopped(output):
                    of_answer = ids if pieces else output["output_ids"]
                    next_tokens = partial(self._with_answer, array("q", obj.input_ids), of_answer)
                    self._pin_next(obj, output["meta_info"], next_tokens)
                yield output

    async def follow(self, api: type[SentAnswer], serving: Awaitable[Any]) -> Any:
        """Return a chat's answer, whole or streamed, and pin the next prompt if it has calls.

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
                self._pin_after(answer, partial(api.read, result))
        finally:
            if not is_streamed:
                self._end(answer)
        if hasattr(result, "body_iterator"):
            result.body_iterator = self._follow_events(answer, result.body_iterator)
            return result
        return self._follow_events(answer, result) if is_streamed else result

    async def _follow_events(self, answer: _Answer, events: Any) -> AsyncGenerator[Any]:
        sent = answer.api()
        try:
            async for event in events:
                if answer.obj is not None and not answer.is_over:
                    self._read(answer, sent, event if isinstance(event, str) else event.decode())
                yield event
        finally:
            self._end(answer)

    def _read(self, answer: _Answer, sent: SentAnswer, event: str) -> None:
        try:
            sent.add(event)
        except Exception as error:  # The client must get its answer.
            self._report(error)
            self._end(answer)
        else:
            if answer.meta is not None and answer.api.end in event:
                self._pin_after(answer, sent.parts)

    def _pin_after(self, answer: _Answer, read: Callable[[], list[Part]]) -> None:
        assert answer.meta is not None
        next_tokens = partial(self._next_prompt, answer, read)
        self._pin_next(answer.obj, answer.meta, next_tokens)
        answer.is_over, answer.meta = True, None

    def _end(self, answer: _Answer) -> None:
        """Expect no results of tools, unless the answer was sent and has called some."""
        if answer.meta is not None:
            self._expect_no_more(answer.obj, answer.meta)
        answer.is_over, answer.meta = True, None

    def _pin_next(
        self, obj: Any, meta: dict[str, Any], next_tokens: Callable[[], array[int] | None]
    ) -> None:
        """Pin an agent's next prompt, if there is one, while other requests go on.

        Args: next_tokens: returns the known tokens of the prompt, or ``None`` without tool calls.
        """
        come: list[Any] = []
        task = asyncio.create_task(self._pin(obj, meta, next_tokens, come))
        self._tasks[task] = come
        task.add_done_callback(self._tasks.pop)

    async def _pin(
        self,
        obj: Any,
        meta: dict[str, Any],
        next_tokens: Callable[[], array[int] | None],
        come: list[Any],
    ) -> None:
        try:
            # A long prompt takes tens of milliseconds, which would delay other answers.
            tokens = await asyncio.to_thread(next_tokens)
            if tokens is not None:
                since = common_length(array("q", obj.input_ids), tokens)
                stream = self._table.make_pinned(obj, meta, tokens, self._seconds, since)
                # The tool may have ended before, and its request has come without the stream.
                if not any(client_requests.has_prompt_of(request, stream) for request in come):
                    self._table.open(stream)
                    metrics.count("tool_calls_held")
                    return
        except ApiError as error:
            logger.debug("A prompt is not pinned while tools run: %s", error)
        except Exception as error:  # Chat templates may raise anything.
            self._report(error)
        self._expect_no_more(obj, meta)

    def _expect_no_more(self, obj: Any, meta: dict[str, Any]) -> None:
        """Tell the scheduler that the agent of a stream's request does not return from tools."""
        if client_requests.has_stream(obj):
            self._engine.release(meta["id"])

    def _report(self, error: Exception) -> None:
        log = logger.debug if self._has_failed else logger.warning
        self._has_failed = True
        log("A prompt is not pinned while tools run: %s: %s", type(error).__name__, error)

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


async def _watch(
    outputs: AsyncGenerator[Any], note: Callable[[dict[str, Any]], None]
) -> AsyncGenerator[Any]:
    """Yield outputs, and note the ``meta_info`` of each answer that the model itself has ended."""
    async with aclosing(outputs):
        async for output in outputs:
            # The output is a list if the request asks for several answers.
            for answer in output if isinstance(output, list) else [output]:
                if _has_stopped(answer):
                    note(answer["meta_info"])
            yield output


def _is_chat(chat: Any) -> bool:
    """Return whether the messages of a request are known."""
    # SGLang makes a chat of a request of the Responses API, but not for models of Harmony.
    return hasattr(chat, "messages")


def _returns_thoughts(answer: _Answer) -> bool:
    """Return whether a client is likely to send the thoughts of an answer back with it.

    The client's earlier messages tell; without any, the habit of most clients of the API.
    """
    earlier = [message for message in answer.chat.messages if message.role == "assistant"]
    if not earlier:
        return answer.api.returns_thoughts
    return any(getattr(message, "reasoning_content", None) for message in earlier)


def _has_stopped(output: dict[str, Any]) -> bool:
    """Return whether the model has ended an answer, as it does after tool calls."""
    return (output["meta_info"].get("finish_reason") or {}).get("type") == "stop"
