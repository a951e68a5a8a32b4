"""``ToolGaps``: an agent's next prompt is held while its tools run, whatever its client is.

An answer that ends in tool calls leaves a prompt stream of the prompt that will come back with the
results, up to the first of them: rendered by the chat template from the answer as SGLang parses it,
not from the tokens that were decoded, which often differ. What the radix tree has of it is pinned,
and the rest is prefilled. The request is known by its prompt, so that every client gains and none
has to name the stream. They give way before streams that grow, but not to requests that are held
back (``scheduler/admission.py``).

Of a request of token ids, as one that came through a front end which renders chats itself, the next
prompt is not known. What is held is its own prompt with the tokens of its answer.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.http import client_requests, metrics, rendering
from flashmoa_sglang.http.errors import ApiError
from flashmoa_sglang.http.token_buffer import TokenBuffer, common_length
from flashmoa_sglang.options import Options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.rendering import ChatRenderer
    from flashmoa_sglang.http.stream import PromptStream
    from flashmoa_sglang.http.streams import StreamTable

logger = logging.getLogger(__name__)

# Stands for the first result in the rendered prompt, which is cut there.
_RESULT = "FLASHMOA-TOOL-RESULT-6f0c2a"
# What the next request asks in its own way, or what is of the answer and not of its prompt.
_OF_THE_ANSWER = {"continue_final_message", "stream_options", "logprobs", "top_logprobs"}


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
        return wanted and engine.role == "null" and engine.has_radix_cache

    def watch(self, obj: Any, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """Return the outputs of a ``GenerateReqInput``; hold its agent's next prompt at the end."""
        if not hasattr(obj, "stream"):
            return outputs  # This is a request for an embedding.
        for come in self._tasks.values():
            come.append(obj)
        chat = rendering.served.get()
        may_call = self._may_call(chat, obj)
        return (
            self._watch(chat, obj, outputs) if may_call else self._watch_without_calls(obj, outputs)
        )

    def _may_call(self, chat: Any, obj: Any) -> bool:
        """Return whether a request may be answered with calls, and the next prompt be known."""
        # Requests of a session find no streams by their prompts.
        if not client_requests.has_one_prompt(obj) or not client_requests.has_one_answer(obj):
            return False
        return bool(chat.tools) if _is_chat(chat) else self._renderer.knows_calls

    async def _watch(
        self, chat: Any, obj: Any, outputs: AsyncGenerator[Any]
    ) -> AsyncGenerator[Any]:
        pieces, text, ids = self._engine.streams_pieces(obj), "", list[int]()
        async with aclosing(outputs):
            async for output in outputs:
                if pieces:
                    text += output.get("text") or ""
                    ids += output.get("output_ids") or ()
                if _has_stopped(output):
                    whole = {**output, "text": text, "output_ids": ids} if pieces else output
                    come: list[Any] = []
                    task = asyncio.create_task(self._hold(chat, obj, whole, come))
                    self._tasks[task] = come
                    task.add_done_callback(self._tasks.pop)
                yield output

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

    async def _hold(self, chat: Any, obj: Any, output: dict[str, Any], come: list[Any]) -> None:
        def has_come(stream: PromptStream) -> bool:
            return any(client_requests.has_prompt_of(request, stream) for request in come)

        is_held, meta = False, output["meta_info"]
        try:
            # A long prompt takes tens of milliseconds, in which no other token would go out.
            next_tokens = partial(self._next_tokens, chat, array("q", obj.input_ids), output)
            tokens = await asyncio.to_thread(next_tokens)
            if tokens is not None:
                since = common_length(array("q", obj.input_ids), tokens)
                # A tool may have ended before, and its result can take no stream any more.
                is_held = self._table.hold(obj, meta, tokens, self._seconds, since, has_come)
        except ApiError as error:
            logger.debug("A prompt is not held while tools run: %s", error)
        except Exception as error:
            # SGLang's parsers and chat templates may raise anything.
            log = logger.debug if self._has_failed else logger.warning
            self._has_failed = True
            log("A prompt is not held while tools run: %s: %s", type(error).__name__, error)
        if is_held:
            metrics.count("tool_calls_held")
        else:
            self._expect_no_more(obj, meta)

    def _next_tokens(
        self, chat: Any, prompt: array[int], output: dict[str, Any]
    ) -> array[int] | None:
        """Return what is known of the next prompt, or ``None`` without tool calls."""
        if _is_chat(chat):
            buffer = self._next_prompt(chat, output)
            return buffer.tokens if buffer is not None else None
        ids = output["output_ids"]
        return prompt + array("q", ids) if self._renderer.calls_tools(ids) else None

    def _next_prompt(self, chat: Any, output: dict[str, Any]) -> TokenBuffer | None:
        """Return the next prompt up to its first result, or ``None`` without tool calls."""
        message = self._renderer.parse(chat, output)
        if message is None or not message.tool_calls:
            return None
        body = chat.model_dump(exclude_none=True, exclude=_OF_THE_ANSWER)
        answer = message.model_dump(exclude_none=True)
        earlier = [m for m in body["messages"] if m["role"] == "assistant" and m.get("tool_calls")]
        # Many clients do not send an agent's thoughts back.
        if not any(m.get("reasoning_content") for m in earlier):
            answer.pop("reasoning_content", None)
        call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": _RESULT}
        body |= {"messages": [*body["messages"], answer, result], "stream": False}
        *before, last = self._renderer.render(body).pieces
        text, mark, _ = last.text.partition(_RESULT)
        tokenizer = self._engine.tokenizer
        if before or not mark or tokenizer is None:
            return None
        buffer = TokenBuffer(tokenizer, last.add_special_tokens)
        buffer.append(text)
        return buffer


def _is_chat(chat: Any) -> bool:
    """Return whether a request's messages are known, which is then SGLang's chat."""
    # SGLang makes one of a request of the Responses API, but not for models of Harmony.
    return hasattr(chat, "messages")


def _has_stopped(output: dict[str, Any]) -> bool:
    """Return whether an answer has ended by itself, as one does that calls tools."""
    return (output["meta_info"].get("finish_reason") or {}).get("type") == "stop"
