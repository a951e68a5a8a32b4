"""The real request of a prompt stream.

It carries its whole own prompt; ``prompt_stream_id`` is only a hint. Here its tokens are
taken from the stream as far as the texts agree, and its answer is told what came of it.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import RequestMark

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from flashmoa_sglang.stream import PromptStream
    from flashmoa_sglang.streams import StreamTable

FIELD = "prompt_stream_id"


class Final:
    """One request that names a prompt stream.

    ``status`` after :meth:`use`: ``hit`` (the stream was a true prefix), ``mispredicted``
    (used up to where they part), or why there was no stream: ``used``, ``deleted``,
    ``expired``, ``unknown``.
    """

    def __init__(self, table: StreamTable, stream_id: str) -> None:
        self.stream_id = stream_id
        self._table = table
        self._stream, self.status = table.find(stream_id)
        self._agreeing_text: int | None = None
        self.usage: dict[str, Any] | None = None

    def encode(self, text: str, special: bool) -> list[int] | None:
        """Tokens of the prompt ``text``, or ``None`` where the stream cannot help."""
        if self._stream is None or self._stream.buffer is None:
            return None
        self._agreeing_text = self._stream.buffer.common_chars(text)
        return self._stream.buffer.encode(text, special)

    def use(self, obj: Any, multimodal: bool) -> None:
        """Tie a ``GenerateReqInput`` to the stream.

        ``multimodal``: the model's processor turns text into tokens, so it is left alone.

        Raises:
            ValueError: the request is a batch (SGLang answers 400).
        """
        if isinstance(obj.text, list) or (obj.input_ids and isinstance(obj.input_ids[0], list)):
            raise ValueError(f"{FIELD} goes with one prompt; send a batch without it.")
        params = obj.sampling_params or {}
        custom = params.get("custom_params") or {} if isinstance(params, dict) else None
        if not isinstance(custom, dict):
            raise ValueError("sampling_params, and custom_params in it, must be objects.")
        stream = self._stream
        if stream is None:
            return
        self._table.claim(stream)
        if obj.text is not None and not multimodal:
            ids = self.encode(obj.text, special=True)
            if ids is not None:
                obj.text, obj.input_ids = None, ids
        self.status = "hit" if self._is_prefix(stream, obj.input_ids) else "mispredicted"
        late = max(0, len(obj.input_ids or ()) - stream.prefilled)
        mark = RequestMark(stream.id, final=True, late=late).to_custom_params()
        obj.sampling_params = {**params, "custom_params": {**custom, **mark}}

    def _is_prefix(self, stream: PromptStream, ids: list[int] | None) -> bool:
        if stream.buffer is not None and self._agreeing_text is not None:
            return self._agreeing_text == len(stream.buffer.text)
        expected = stream.certain()
        return ids is not None and ids[: len(expected)] == list(expected)

    def annotate(self, output: dict[str, Any]) -> None:
        """Add to an answer how much of the prompt had been computed ahead.

        ``prompt_tokens`` = cached + late; of the cached, ``streamed_tokens`` were computed
        by this stream before the request came.
        """
        meta = output.get("meta_info") or {}
        if "cached_tokens" not in meta:
            return
        cached = meta["cached_tokens"]
        streamed = min(cached, self._stream.computed) if self._stream is not None else 0
        self.usage = {
            "cached_tokens": cached,
            "streamed_tokens": streamed,
            "late_tokens": meta["prompt_tokens"] - cached,
            "prompt_stream": {
                "id": self.stream_id,
                "status": self.status,
                "prefills": [asdict(span) for span in self._stream.spans] if self._stream else [],
            },
        }
        meta.update(self.usage)

    def done(self) -> None:
        """The request has the KV itself now, or is over."""
        if self._stream is not None:
            self._table.close(self._stream, "used")


_current: ContextVar[Final | None] = ContextVar("flashmoa_final", default=None)


def current() -> Final | None:
    return _current.get()


def bind(table: StreamTable, http_request: Any) -> Final | None:
    """The stream named by an HTTP request's body, for the rest of this request's context.

    Raises:
        ValueError: the field is not a string (SGLang answers 400).
    """
    # SGLang has parsed the body by now, and Starlette keeps the result.
    body = getattr(http_request, "_json", None)
    stream_id = body.get(FIELD) if isinstance(body, dict) else None
    if stream_id is None:
        return None
    if not isinstance(stream_id, str):
        raise ValueError(f"{FIELD} must be a string, as returned by POST /prompt_streams.")
    final = Final(table, stream_id)
    _current.set(final)
    return final


async def generate(
    original: Callable[..., Any], manager: Any, obj: Any, http_request: Any, final: Final
) -> AsyncIterator[dict[str, Any]]:
    """``TokenizerManager.generate_request`` for a request with a prompt stream."""
    try:
        final.use(obj, multimodal=manager.mm_processor is not None)
        async with aclosing(original(manager, obj, http_request)) as outputs:
            async for output in outputs:
                final.annotate(output)
                final.done()
                yield output
    finally:
        final.done()


def annotate_chat(result: Any, final: Final) -> Any:
    """Add the stream's figures to the usage of a chat answer, streaming or not."""
    if hasattr(result, "body_iterator"):
        result.body_iterator = _annotate_events(result.body_iterator, final)
        return result
    if getattr(result, "usage", None) is None or final.usage is None:
        return result
    from fastapi.responses import JSONResponse

    payload = json.loads(result.model_dump_json())
    _extend_usage(payload["usage"], final.usage)
    return JSONResponse(payload)


async def _annotate_events(events: Any, final: Final) -> AsyncIterator[Any]:
    async for event in events:
        text = event if isinstance(event, str) else event.decode()
        yield _annotate_event(text, final) if '"usage":{' in text.replace(" ", "") else event


def _annotate_event(event: str, final: Final) -> str:
    if not event.startswith("data: {") or final.usage is None:
        return event
    payload = json.loads(event[len("data: ") :])
    if payload.get("usage"):
        _extend_usage(payload["usage"], final.usage)
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def _extend_usage(usage: dict[str, Any], figures: dict[str, Any]) -> None:
    details = dict(usage.get("prompt_tokens_details") or {})
    for name in ("cached_tokens", "streamed_tokens", "late_tokens"):
        details[name] = figures[name]
    usage["prompt_tokens_details"] = details
    usage["prompt_stream"] = figures["prompt_stream"]
