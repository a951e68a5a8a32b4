"""Streamed answers, step by step: what an engine sends, as :class:`Delta`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx

from flashmoa import errors
from flashmoa.engine.refusals import aborted
from flashmoa.engine.wire import Delta, PromptUsage


async def event_data(response: httpx.Response) -> AsyncGenerator[str]:
    """The data of each server-sent event of an answer, as it arrives.

    Only a line feed ends a line: ``Response.aiter_lines`` also breaks at separators like U+2028,
    which texts in JSON may hold.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode(errors="replace")


async def data_events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream. Raises: BadAnswer, RequestRefused."""
    async with aclosing(event_data(response)) as several:
        async for data in several:
            if data == "[DONE]":
                continue
            try:
                event = json.loads(data)
            except json.JSONDecodeError as error:
                raise errors.BadAnswer(f"not a server-sent event: {data[:200]!r}") from error
            if "error" in event:
                problem = event["error"]
                raise errors.RequestRefused(
                    str(problem.get("message", problem)),
                    int(problem.get("code") or 400),
                    "generation",
                )
            yield event


async def generation(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Delta]:
    """SGLang's ``/generate`` events repeat the whole text; give what is new."""
    seen, tokens = 0, 0
    async for event in events:
        text: str = event.get("text") or ""
        meta: dict[str, Any] = event["meta_info"]
        reason = meta.get("finish_reason")
        if reason and "prompt_tokens" not in meta:
            raise aborted(reason)
        yield Delta(
            text=text[seen:],
            token_ids=event["output_ids"][tokens:],
            usage=PromptUsage.model_validate(meta) if reason else None,
            finish_reason=reason["type"] if reason else None,
        )
        seen, tokens = len(text), len(event["output_ids"])


async def chat_completion(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Delta]:
    """OpenAI's chunks."""
    async for event in events:
        choices: list[dict[str, Any]] = event.get("choices") or []
        choice = choices[0] if choices else {}
        delta: dict[str, Any] = choice.get("delta") or {}
        usage: dict[str, Any] | None = event.get("usage")
        told: dict[str, list[dict[str, Any]] | None] = choice.get("logprobs") or {}
        yield Delta(
            text=delta.get("content") or "",
            logprobs=[token["logprob"] for token in told.get("content") or []],
            usage=PromptUsage.from_openai(usage) if usage else None,
            finish_reason=choice.get("finish_reason"),
        )
