"""``ToolGaps``: an agent's next prompt is held while its tools run, whatever its client is.

An answer that ends in tool calls leaves a prompt stream of the prompt that will come back with the
results, up to the first of them: rendered by the chat template from the answer as SGLang parses it,
not from the tokens that were decoded, which often differ. What the radix tree has of it is pinned,
and the rest is prefilled. The request is known by its prompt, so that every client gains and none
has to name the stream. They give way before streams that grow, but not to requests that are held
back (``scheduler/admission.py``).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from contextlib import aclosing
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
        if hasattr(obj, "stream"):  # It is no request for an embedding.
            for come in self._tasks.values():
                come.append(obj)
        chat = rendering.served.get()
        # SGLang makes a chat of a request of the Responses API, but not for models of Harmony.
        if not hasattr(chat, "messages") or not chat.tools or (chat.n or 1) > 1:
            return outputs
        # Requests of a session find no streams by their prompts.
        if not obj.input_ids or obj.session_params is not None:
            return outputs
        return self._watch(chat, obj, outputs)

    async def _watch(
        self, chat: Any, obj: Any, outputs: AsyncGenerator[Any]
    ) -> AsyncGenerator[Any]:
        text = ""
        async with aclosing(outputs):
            async for output in outputs:
                text = (text if self._engine.streams_pieces(obj) else "") + output["text"]
                if (output["meta_info"].get("finish_reason") or {}).get("type") == "stop":
                    whole, come = {**output, "text": text}, list[Any]()
                    task = asyncio.create_task(self._hold(chat, obj, whole, come))
                    self._tasks[task] = come
                    task.add_done_callback(self._tasks.pop)
                yield output

    async def _hold(self, chat: Any, obj: Any, output: dict[str, Any], come: list[Any]) -> None:
        def has_come(stream: PromptStream) -> bool:
            return any(client_requests.has_prompt_of(request, stream) for request in come)

        try:
            # A long prompt takes tens of milliseconds, in which no other token would go out.
            buffer = await asyncio.to_thread(self._next_prompt, chat, output)
            if buffer is not None:
                since = common_length(array("q", obj.input_ids), buffer.tokens)
                meta = output["meta_info"]
                # A tool may have ended before, and its result can take no stream any more.
                tokens = buffer.tokens
                if self._table.hold(obj, meta, tokens, self._seconds, since, has_come):
                    metrics.count("tool_calls_held")
        except ApiError as error:
            logger.debug("A prompt is not held while tools run: %s", error)
        except Exception as error:
            # SGLang's parsers and chat templates may raise anything.
            log = logger.debug if self._has_failed else logger.warning
            self._has_failed = True
            log("A prompt is not held while tools run: %s: %s", type(error).__name__, error)

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
