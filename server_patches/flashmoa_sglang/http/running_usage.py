"""Give a chat that asks for its usage so far (``continuous_usage_stats``) an event for each token.

A reader cuts the answer at a number of tokens, as staircases do. SGLang joins outputs that wait for
a slow reader, and then no event says which part of its text the first tokens wrote.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from flashmoa_sglang.http import asked
from flashmoa_sglang.http.hearing.written_text import WrittenText

Decode = Callable[[Sequence[int]], str]


def applies_to(obj: Any, chat: Any) -> bool:
    """Return whether a ``GenerateReqInput`` streams a chat's answer with its usage so far."""
    options = getattr(chat, "stream_options", None)
    # A request for embeddings has no ``stream``, and no chat.
    is_asked = bool(getattr(options, "continuous_usage_stats", False) and obj.stream)
    # Log-probabilities already have an entry for each token.
    return is_asked and asked.has_one_answer(obj) and not obj.return_logprob


async def split(
    outputs: AsyncGenerator[Any], decode: Decode, *, in_pieces: bool
) -> AsyncGenerator[Any]:
    """Yield SGLang's outputs. An output of several tokens follows outputs of its first tokens.

    Args: in_pieces: whether each output has only the new text and tokens.
    """
    text, count, written = "", 0, WrittenText(decode)
    async with aclosing(outputs):
        async for output in outputs:
            if not isinstance(output, dict) or not output.get("output_ids"):
                yield output
                continue
            ids, meta = output["output_ids"], output["meta_info"]
            new = [*ids] if in_pieces else ids[count:]
            whole = text + output["text"] if in_pieces else output["text"]
            lengths = [_length_after(token, written) for token in new]
            # Without the prompt before it, the first token may have lost its space.
            start = int(whole.startswith(f" {written.text}"))
            # SGLang removes a stop text from the last output.
            own = f"{whole[:start]}{written.text}"[: len(whole)]
            for number, length in enumerate(lengths[:-1] if whole.startswith(own) else (), 1):
                end = min(start + length, len(whole))
                if end <= len(text):
                    continue
                earlier = {**meta, "completion_tokens": count + number, "finish_reason": None}
                part = whole[len(text) : end] if in_pieces else whole[:end]
                token = new[number - 1 : number] if in_pieces else ids
                yield {**output, "text": part, "output_ids": token, "meta_info": earlier}
                text = whole[:end]
            yield {**output, "text": whole[len(text) :]} if in_pieces else output
            text, count = whole, count + len(new)


def _length_after(token: int, written: WrittenText) -> int:
    written.add(array("q", [token]).tobytes(), 0)
    return len(written.text)


def watch(manager: Any, obj: Any, chat: Any, outputs: Any) -> Any:
    """Return the outputs of a ``GenerateReqInput``, for each token if its chat asks for that."""
    if manager.tokenizer is None or not applies_to(obj, chat):
        return outputs
    params: dict[str, Any] = obj.sampling_params or {}
    names = ("skip_special_tokens", "spaces_between_special_tokens")
    decode = partial(manager.tokenizer.decode, **{name: params.get(name, True) for name in names})
    in_pieces = manager.flashmoa_table.engine.streams_pieces(obj)
    return split(outputs, decode, in_pieces=in_pieces)
