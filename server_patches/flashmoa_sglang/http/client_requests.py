"""Clients' ordinary requests: their hints, and how one uses its prompt stream.

A stream prepares the prompt of its *final request*. The request has its whole prompt itself, so the
stream's id is only a hint, which never changes the answer. The request takes its tokens from the
stream while the two texts agree, and its answer says how the stream was used. Front ends may
drop the id. So a request that names no stream is known by its prompt (:func:`find_by_prompt`).
"""

from __future__ import annotations

import json
import logging
from array import array
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.http import guard, metrics
from flashmoa_sglang.http.asked import decodes, has_one_answer, is_list, list_params
from flashmoa_sglang.http.engine import PREFILL_ONLY
from flashmoa_sglang.http.errors import ApiError, MalformedRequest, shown
from flashmoa_sglang.http.hints import read_hints
from flashmoa_sglang.messages import CUSTOM_PARAMS_KEY, RequestMark

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from flashmoa_sglang.costs import Costs
    from flashmoa_sglang.http.stream import PromptStream
    from flashmoa_sglang.http.streams import StreamTable

logger = logging.getLogger(__name__)

# SGLang refuses a request, or has no room for it in its queue.
_REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE)


def refuse_reserved(obj: Any) -> None:
    """Raise MalformedRequest for a client's request with a mark of the plugin.

    Such a mark could pin KV for a stream that was never opened, and so is never released.
    """
    for params in list_params(getattr(obj, "sampling_params", None)):
        custom = params.get("custom_params")
        if custom is not None and not isinstance(custom, dict):
            raise MalformedRequest(f"custom_params must be an object, not {shown(custom)}.")
        if custom and CUSTOM_PARAMS_KEY in custom:
            name = CUSTOM_PARAMS_KEY
            raise MalformedRequest(f"{name!r} in custom_params is reserved; leave it out.")


def sent_tokens(obj: Any) -> array[int] | None:
    """Return a request's prompt as an array, which is fast to compare, if it has only tokens."""
    return _tokens(obj.input_ids) if has_one_prompt(obj) else None


def _tokens(ids: list[int]) -> array[int] | None:
    try:
        return array("q", ids)
    except (OverflowError, TypeError):
        return None  # SGLang refuses the request.


def put_mark(obj: Any, mark: RequestMark) -> None:
    """Put a mark on a request for the scheduler, without changing the client's dictionaries."""

    def marked(params: dict[str, Any]) -> dict[str, Any]:
        custom = params.get("custom_params") or {}
        return {**params, "custom_params": {**custom, **mark.to_custom_params()}}

    given = obj.sampling_params
    if isinstance(given, list):
        obj.sampling_params = [marked(params) for params in given]
    else:
        obj.sampling_params = marked(given or {})


def has_stream(obj: Any) -> bool:
    """Return whether a request has a prompt stream, as its scheduler knows it."""
    marks = (RequestMark.read(p.get("custom_params")) for p in list_params(obj.sampling_params))
    return any(mark is not None and mark.final for mark in marks)


class StreamRequest:
    """A request that uses a prompt stream, which it names or which has its prompt.

    Attributes:
        status: after :meth:`use`, ``hit`` (the stream is a prefix of the prompt), ``mispredicted``
            (the prompt departs from the stream), or why no stream could be used: ``used``,
            ``deleted``, ``expired``, ``drained``, ``unknown``, or ``other_namespace`` (the request
            has another cache salt, extra key or adapter, and cannot read the stream's KV).
        usage: the fields that :meth:`annotate` added to the answer.
    """

    def __init__(self, table: StreamTable, stream_id: str, *, is_named: bool = True) -> None:
        self.stream_id = stream_id
        self._is_named = is_named
        self._table = table
        self._stream, self.status = table.find(stream_id)
        # The text that SGLang has encoded so far. It encodes some prompts in two pieces.
        self._text = ""
        # SGLang may encode in another thread, while the stream gets more text.
        buffer = self._stream.buffer if self._stream is not None and is_named else None
        self._buffer = buffer.snapshot() if buffer is not None else None
        self._claimed = False
        self.usage: dict[str, Any] | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """Return the tokens of a piece of the prompt; ``None`` if the stream has no text."""
        if self._buffer is None:
            return None
        first, self._text = not self._text, self._text + text
        return self._buffer.encode_piece(text, add_special_tokens, first)

    def use(
        self,
        obj: Any,
        multimodal: bool,
        expected_output: int | None = None,
        prompt: array[int] | None = None,
    ) -> None:
        """Claim the stream for a ``GenerateReqInput``, and give the request the stream's tokens.

        Args:
            obj: a request with one prompt, which may be the only one of a list.
            multimodal: whether the model's processor tokenises the text, which stays as it is.
            prompt: the prompt's tokens, if they are known and the whole prompt.
        """
        stream = self._claim()
        if stream is not None and not _shares_kv(obj, stream):
            stream, self.status = None, "other_namespace"
        if stream is None:
            _put_expectation(obj, expected_output)
            return
        is_listed = is_list(obj)
        # SGLang reads no text beside token ids.
        if obj.input_ids is None and obj.text is not None and not multimodal:
            ids = self.encode(obj.text[0] if is_listed else obj.text, add_special_tokens=True)
            if ids is not None:
                obj.text, obj.input_ids = None, [ids] if is_listed else ids
        computed: Any = obj.input_ids
        if prompt is None and computed is not None:
            prompt = _tokens(computed[0] if is_listed else computed)
        self.status = "hit" if self._is_prefix(stream, prompt) else "mispredicted"
        if obj.routed_dp_rank is None:
            obj.routed_dp_rank = stream.terms.dp_rank
        put_mark(obj, RequestMark(stream.id, final=True, expected_output=expected_output))

    def use_late(self) -> None:
        """Claim the stream for a request that runs already, and begins with its whole prompt."""
        self._claim()
        self.status = "hit"

    def _claim(self) -> PromptStream | None:
        if self._stream is not None and (self._stream.claimed or self._stream.closed is not None):
            # Another request has claimed the stream since, or it has ended.
            self.status = "used" if self._stream.claimed else str(self._stream.closed)
            self._stream = None
        if self._stream is not None:
            self._table.claim(self._stream)
            self._claimed = True
        return self._stream

    def _is_prefix(self, stream: PromptStream, prompt: array[int] | None) -> bool:
        # Texts are compared, because the buffer may not have tokens for the end of its text yet.
        buffer, expected = stream.buffer, stream.known()
        if buffer is not None and self._text and not self._text.startswith(buffer.whole_text):
            return False
        if buffer is not None and (self._text or stream.ended_at is None):
            expected = buffer.tokens[: buffer.certain_tokens]
        return prompt is not None and prompt[: len(expected)] == expected

    def annotate(self, output: dict[str, Any]) -> None:
        """Note how the prompt was computed; add that to the answer if the request names the stream.

        The stream computed ``streamed_tokens`` of the ``cached_tokens`` before the request came.
        ``late_tokens`` were computed with the request.
        """
        meta = output.get("meta_info") or {}
        if "cached_tokens" not in meta:
            return
        cached, late = meta["cached_tokens"], meta["prompt_tokens"] - meta["cached_tokens"]
        stream = self._stream if self.status != "other_namespace" else None
        streamed = min(cached, stream.computed) if stream is not None else 0
        if self.usage is None:
            metrics.count("finals", status=self.status)
            metrics.count("final_late_tokens", late)
        self.usage = {
            "cached_tokens": cached,
            "streamed_tokens": streamed,
            "late_tokens": late,
            "prompt_stream": {
                "id": self.stream_id,
                "status": self.status,
                "prefills": [asdict(span) for span in stream.spans] if stream else [],
                "saved_seconds": _saved_seconds(self._table.engine.costs, streamed, late),
            },
        }
        if self._is_named:
            meta.update(self.usage)

    def meet(self, other: StreamRequest) -> None:
        """Use a stream that the server itself pins for this prompt, if the named stream is gone.

        Otherwise close the pinned stream, since no other request is likely to want it.
        """
        pinned = other._stream
        if pinned is None or pinned.pinned_from is None:
            return
        if self._stream is None:
            self._stream, self.stream_id = pinned, pinned.id
        else:
            self._table.close(pinned, "used")

    def give_stream_back(self) -> None:
        """Leave the stream to the next request, because SGLang has refused this one."""
        if self._claimed and self._stream is not None and self._stream.closed is None:
            self._table.unclaim(self._stream)
            self._claimed = False

    def close_stream(self) -> None:
        """Close the stream, because the request has locked the KV itself or has ended."""
        if self._claimed and self._stream is not None:
            # The answer of a request that did not ask for a stream has no figures.
            keeps_figures = not self._is_named and self._stream.pinned_from is None
            self._table.close(self._stream, "used", self.usage if keeps_figures else None)


def _saved_seconds(costs: Costs, streamed: int, late: int) -> float | None:
    """Estimate how many seconds later a request's first token would come without its stream.

    Return ``None`` until the costs of forwards are measured.
    """
    if costs is UNMEASURED:
        return None
    return costs.prefill(streamed + late) - costs.prefill(late) if streamed else 0.0


def _shares_kv(obj: Any, stream: PromptStream) -> bool:
    # If the prompt is the only one of a list, these fields may be lists, too.
    return all(
        (getattr(obj, name) or None) in (value, [value])
        for name, value in stream.terms.namespace().items()
    )


# The request of this context, if it names a prompt stream.
current: ContextVar[StreamRequest | None] = ContextVar("flashmoa_stream_request", default=None)


def bind(table: StreamTable, http_request: Any) -> StreamRequest | None:
    """Find the stream that an HTTP request names, and remember it with the request."""
    stream_id = read_hints(http_request).stream
    if stream_id is None:
        return None
    request = http_request.state.flashmoa = StreamRequest(table, stream_id)
    current.set(request)
    return request


def convert_chat(
    original: Callable[..., Any], chat: Any, request: Any, raw_request: Any = None
) -> Any:
    """Make a chat's prompt in the context of its stream; wraps ``_convert_to_internal_request``.

    SGLang does so in a thread of a pool, which has no context of the request.
    """
    named = getattr(getattr(raw_request, "state", None), "flashmoa", None)
    token = current.set(named or current.get())
    try:
        return original(chat, request, raw_request)
    finally:
        current.reset(token)


def find_by_prompt(table: StreamTable, obj: Any, prompt: array[int] | None) -> StreamRequest | None:
    """Find the stream of a ``GenerateReqInput`` by its prompt and namespace.

    Of several streams, the one that agrees most is taken; among equals, the one opened first.
    """
    if prompt is None:
        return None
    agreed = {stream: stream.agrees_with(prompt) for stream in _usable(table, obj)}
    found = max(agreed, key=agreed.__getitem__, default=None)
    if found is None or not agreed[found]:
        return None
    return StreamRequest(table, found.id, is_named=False)


def watch_for_end(outputs: Any, table: StreamTable, obj: Any, prompt: array[int] | None) -> Any:
    """Return the outputs of a ``GenerateReqInput`` that may have overtaken the end of its stream.

    A front end may be faster than a stream's last text. Once the last text shows that the request
    is the stream's own, the stream is closed.
    """
    if prompt is None:
        return outputs
    growing = [stream for stream in _usable(table, obj) if stream.may_become(prompt)]
    return _watch_for_end(outputs, table, prompt, growing) if growing else outputs


async def _watch_for_end(
    outputs: Any, table: StreamTable, prompt: array[int], growing: list[PromptStream]
) -> AsyncGenerator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            if isinstance(output, dict) and not _is_refusal(output):
                usable = (s for s in growing if not s.claimed and s.closed is None)
                found = next((s for s in usable if s.agrees_with(prompt)), None)
                if found is not None:
                    growing = []
                    request = StreamRequest(table, found.id, is_named=False)
                    request.use_late()
                    request.annotate(output)
                    request.close_stream()
            yield output


def _usable(table: StreamTable, obj: Any) -> list[PromptStream]:
    return [stream for stream in table.unclaimed() if _shares_kv(obj, stream)]


def has_prompt_of(obj: Any, stream: PromptStream) -> bool:
    """Return whether a ``GenerateReqInput`` could use a stream, by its tokens and namespace."""
    tokens = sent_tokens(obj)
    return tokens is not None and _shares_kv(obj, stream) and stream.agrees_with(tokens) > 0


def has_one_prompt(obj: Any) -> bool:
    """Return whether a request has one prompt, which has only tokens."""
    ids = obj.input_ids
    if not ids or isinstance(ids[0], list) or obj.session_params is not None:
        return False
    return not (obj.image_data or obj.video_data or obj.audio_data)


def _is_batch(obj: Any) -> bool:
    return is_list(obj) and len(obj.input_ids if obj.text is None else obj.text) != 1


def generate_request(
    original: Callable[..., Any], manager: Any, obj: Any, http_request: Any
) -> Any:
    """Run ``TokenizerManager.generate_request`` for a client's request.

    Raises: MalformedRequest if a hint or the named rank is invalid, or the client has set a mark.
    """
    guard.keep_abortable(obj)
    refuse_reserved(obj)
    original = partial(guard.answer, original)
    if not hasattr(obj, "stream"):  # This is a request for an embedding.
        return original(manager, obj, http_request)
    table: StreamTable = manager.flashmoa_table
    prompt = sent_tokens(obj)
    rank = table.named_rank(http_request)
    if rank is not None:
        obj.routed_dp_rank = rank
    hints = read_hints(http_request)
    if hints.priority is not None and obj.priority is None:
        obj.priority = table.engine.own_priority(hints.priority)
    # A prompt stream is for one prompt. A batch ignores the hint.
    request = None if _is_batch(obj) else current.get() or bind(table, http_request)
    if hints.prewarm is not None:
        outputs = prewarm(original, manager, obj, http_request, hints.prewarm)
        if request is None:
            return outputs
    else:
        by_prompt = find_by_prompt(table, obj, prompt)
        if request is None:
            request = by_prompt
        elif by_prompt is not None:
            request.meet(by_prompt)
        outputs = original(manager, obj, http_request)
        if request is None:
            _put_expectation(obj, hints.expected_output)
            return watch_for_end(outputs, table, obj, prompt)
    is_multimodal = manager.mm_processor is not None
    prepare = partial(request.use, obj, is_multimodal, hints.expected_output, prompt)
    return _run_with_stream(outputs, request, prepare, http_request)


async def prewarm(
    original: Callable[..., Any], manager: Any, obj: Any, http_request: Any, seconds: float
) -> AsyncGenerator[Any]:
    """Compute a chat's prompt only, yield SGLang's answer of no tokens, and pin the prompt's KV.

    Raises: MalformedRequest if the engine keeps no KV or is one of a PD pair.
    """
    table: StreamTable = manager.flashmoa_table
    if table.engine.role is not None:
        raise MalformedRequest(
            "This engine is one of a PD pair; POST /prefill_only warms its prompts."
        )
    if reason := table.engine.why_no_kv():
        raise MalformedRequest(f"{reason}, so that no prompt can be warmed; leave prewarm out.")
    if is_list(obj) or not has_one_answer(obj):
        raise MalformedRequest("Warm prompts one by one, each with one answer: leave n out.")
    if not has_stream(obj):
        put_mark(obj, RequestMark(own=True))
    obj.sampling_params = {**obj.sampling_params, **PREFILL_ONLY}
    async with aclosing(original(manager, obj, http_request)) as outputs:
        async for output in outputs:
            # Schedulers send no such answer through the detokenizer, which adds the text.
            output.setdefault("text", "")
            meta = output["meta_info"]
            if (meta.get("finish_reason") or {}).get("type") == "length" and obj.input_ids:
                try:
                    table.open(table.make_pinned(obj, meta, obj.input_ids, seconds))
                except ApiError as error:
                    logger.debug("A prompt is not pinned once it is warm: %s", error)
            yield output


async def _run_with_stream(
    outputs: Any, request: StreamRequest, prepare: Callable[[], None], http_request: Any
) -> AsyncGenerator[Any]:
    """Yield the outputs of a stream's final request, annotated, and close its stream."""
    # ``prepare`` claims the stream, and is called here because a generator runs its ``finally``
    # only if it was started.
    async with using_stream(request, http_request), aclosing(outputs):
        prepare()
        async for output in outputs:
            # The output is a list if the request asks for several answers to the prompt.
            answers = output if isinstance(output, list) else [output]
            for answer in answers:
                request.annotate(answer)
            if all(map(_is_refusal, answers)):
                request.give_stream_back()
            else:
                request.close_stream()
            yield output


@asynccontextmanager
async def using_stream(request: StreamRequest, http_request: Any) -> AsyncGenerator[None]:
    """Close a request's stream at the end, or leave it to the next one if this one is refused."""
    try:
        yield
    except (ValueError, HTTPException, ApiError) as error:
        # SGLang raises the first two for a request that it refuses or has no room for, and a
        # ValueError also if the client has disconnected. The plugin's own requests raise ApiErrors.
        status = error.status if isinstance(error, ApiError) else getattr(error, "status_code", 400)
        is_refused = status in _REFUSALS
        if is_refused and (http_request is None or not await http_request.is_disconnected()):
            request.give_stream_back()
        raise
    finally:
        request.close_stream()


def _is_refusal(answer: dict[str, Any]) -> bool:
    """Return whether an answer says that a scheduler has refused its request."""
    meta = answer.get("meta_info") or {}
    reason = meta.get("finish_reason")
    return (
        isinstance(reason, dict)
        and reason.get("type") == "abort"
        and reason.get("status_code") in _REFUSALS
        and not meta.get("completion_tokens")
    )


def _put_expectation(obj: Any, expected_output: int | None) -> None:
    if expected_output is not None and decodes(obj):
        put_mark(obj, RequestMark(expected_output=expected_output))


def annotate_chat(result: Any, request: StreamRequest) -> Any:
    """Add the stream's figures to the usage of a chat's answer, whether it is streamed or not."""
    if hasattr(result, "body_iterator"):
        result.body_iterator = _annotate_events(result.body_iterator, request)
        return result
    if hasattr(result, "__aiter__"):  # The Responses API streams its events itself.
        return _annotate_events(result, request)
    if getattr(result, "usage", None) is None or request.usage is None:
        return result
    from fastapi.responses import JSONResponse

    payload = json.loads(result.model_dump_json(by_alias=True))
    _add_figures(payload["usage"], request.usage)
    return JSONResponse(payload)


async def _annotate_events(events: Any, request: StreamRequest) -> AsyncGenerator[Any]:
    async for event in events:
        text = event if isinstance(event, str) else event.decode()
        yield _annotate_event(text, request) if '"usage":{' in text.replace(" ", "") else event


def _annotate_event(event: str, request: StreamRequest) -> str:
    # Events of the Responses API have their type before their data.
    before, found, data = event.partition("data: {")
    if not found or request.usage is None:
        return event
    payload = json.loads("{" + data)
    usage = payload.get("usage") or (payload.get("response") or {}).get("usage")
    if usage:
        _add_figures(usage, request.usage)
    return f"{before}data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def _add_figures(usage: dict[str, Any], figures: dict[str, Any]) -> None:
    place = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
    usage[place] = dict(usage.get(place) or {})
    for name in ("cached_tokens", "streamed_tokens", "late_tokens"):
        usage[place][name] = figures[name]
    usage["prompt_stream"] = figures["prompt_stream"]
