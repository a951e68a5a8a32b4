"""The usage of a chat answer, extended by what a prompt stream did for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flashmoa_sglang.http.finals import Final


def annotate_chat(result: Any, final: Final) -> Any:
    """Add the stream's figures to the usage of a chat answer, streaming or not."""
    if hasattr(result, "body_iterator"):
        result.body_iterator = _annotate_events(result.body_iterator, final)
        return result
    if getattr(result, "usage", None) is None or final.usage is None:
        return result
    from fastapi.responses import JSONResponse

    payload = json.loads(result.model_dump_json())
    _extend(payload["usage"], final.usage)
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
        _extend(payload["usage"], final.usage)
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def _extend(usage: dict[str, Any], figures: dict[str, Any]) -> None:
    details = dict(usage.get("prompt_tokens_details") or {})
    for name in ("cached_tokens", "streamed_tokens", "late_tokens"):
        details[name] = figures[name]
    usage["prompt_tokens_details"] = details
    usage["prompt_stream"] = figures["prompt_stream"]
