"""Give a chat that asks for its usage so far (``continuous_usage_stats``) an event for each token.

A reader cuts the answer at a number of tokens, as staircases do. SGLang joins outputs that wait for
a slow reader, and then no event says which part of its text the first tokens wrote.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from flashmoa_sglang.http import asked
from flashmoa_sglang.http.hearing.written_text import WrittenText

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


def applies_to(obj: Any, chat: Any, http_request: Any) -> bool:
    """Return whether a ``GenerateReqInput`` streams a chat's answer with its usage so far."""
    # SGLang asks for it itself when it serves Anthropic's messages. Requests over gRPC have no URL.
    url = getattr(http_request, "url", None)
    if url is None or not url.path.endswith("/chat/completions"):
        return False
    options = getattr(chat, "stream_options", None)
    # A request for embeddings has no ``stream``, and no chat.
    is_asked = bool(getattr(options, "continuous_usage_stats", False) and obj.stream)
    # Log-probabilities already have an entry for each token.
    return is_asked and asked.has_one_answer(obj) and not obj.return_logprob


async def split(outputs: AsyncGenerator[Any], decode: Decode) -> AsyncGenerator[Any]:
    """Yield SGLang's outputs, each with the whole text so far.

    An output of several new tokens follows outputs of its first tokens.
    """
    length, count, written = 0, 0, WrittenText(decode)
    async with aclosing(outputs):
        async for output in outputs:
            if written is not None and isinstance(output, dict) and output.get("output_ids"):
                try:
                    ends = _ends(output["text"], output["output_ids"][count:], written)
                except Exception as error:  # The tokenizer's own code; the answer goes on.
                    logger.warning("Joined tokens are not split: %r", error)
                    ends, written = [], None
                for number, end in enumerate(ends, count + 1):
                    if end > length:
                        meta = {**output["meta_info"], "completion_tokens": number}
                        text = output["text"][:end]
                        yield {**output, "text": text, "meta_info": {**meta, "finish_reason": None}}
                        length = end
                length, count = len(output["text"]), len(output["output_ids"])
            yield output


def _ends(text: str, ids: Sequence[int], written: WrittenText) -> list[int]:
    """Return the length of the text after each new token but the last one.

    The list is empty if the text is not what the tokens say.
    """
    lengths: list[int] = []
    for token in ids:
        written.add(array("q", [token]).tobytes(), 0)
        lengths.append(len(written.text))
    # Without the prompt before it, the first token may have lost its space.
    start = int(text.startswith(f" {written.text}"))
    # SGLang removes a stop text from the last output.
    own = f"{text[:start]}{written.text}"[: len(text)]
    is_own = text.startswith(own)
    return [min(start + length, len(text)) for length in lengths[:-1]] if is_own else []


def watch(manager: Any, obj: Any, chat: Any, http_request: Any, outputs: Any) -> Any:
    """Return the outputs of a ``GenerateReqInput``, for each token if its chat asks for that.

    Not with ``--incremental-streaming-output``, where outputs have only the new text.
    """
    if manager.tokenizer is None or not applies_to(obj, chat, http_request):
        return outputs
    if manager.flashmoa_table.engine.streams_pieces(obj):
        return outputs
    params: dict[str, Any] = obj.sampling_params or {}
    names = ("skip_special_tokens", "spaces_between_special_tokens")
    options = {name: params.get(name, True) for name in names}
    return split(outputs, lambda ids: manager.tokenizer.decode([*ids], **options))
