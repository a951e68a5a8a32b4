"""Say why prompts of a recorded run did not share their prefixes (``check_prefixes``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flashmoa.doctor.findings import Finding, fix, note, ok
from flashmoa.engine import Costs, EngineClient, EngineError, MalformedRequest, engine_url
from flashmoa.observe import PromptSent
from flashmoa.observe.calls import Call, calls
from flashmoa.observe.prefix_breaks import (
    HOW_TO_RECORD,
    NO_BREAK,
    PrefixBreak,
    RenderedPrompt,
    find_breaks,
    group_breaks,
)
from flashmoa.observe.trace import TraceError, read

_TIMEOUT_SECONDS = 30.0
# What follows it in a prompt is what the chat template opens an answer with.
_TEXT = "Plan a trip to Nepal."


async def check_prefixes(
    file: Path, engine: str | None = None, api_key: str | None = None
) -> list[Finding]:
    """Say where prompts in a trace stopped sharing a prefix, why, and what that cost.

    Args:
        engine: the URL of an engine that renders and tokenises the prompts. These are the prompts
            that were sent to it, or all if none was. ``None``: messages and tools are compared as
            they were sent.
    """
    try:
        prompted = [call for call in calls(read(file)) if call.prompt is not None]
    except (OSError, TraceError) as error:
        return [fix("trace", str(error), HOW_TO_RECORD)]
    if not prompted:
        return [fix("trace", f"{file} has no prompts", HOW_TO_RECORD)]
    problems: list[Finding] = []
    groups: list[PrefixBreak] | None = None
    if engine is not None:
        try:
            groups = await _find_rendered(prompted, engine_url(engine), api_key)
        except ValueError as error:
            problems.append(fix("engine", str(error), "--engine http://HOST:PORT"))
        except EngineError as error:
            problems.append(fix("engine", str(error), f"flashmoa doctor --engine {engine}"))
    if groups is None:
        groups = group_breaks(find_breaks(prompted))
    findings = [note("prefix", one.describe(), one.remedy) for one in groups]
    if not findings:
        findings.append(ok("prefix", f"{NO_BREAK}, of {len(prompted)} prompts"))
    return problems + findings


async def _find_rendered(
    prompted: Sequence[Call], url: str, api_key: str | None
) -> list[PrefixBreak]:
    """Return the breaks in prompts as an engine renders them. Raises: EngineError."""
    sent = {call.started.call_id: call.prompt for call in prompted if call.prompt is not None}
    sent_there = {call_id: prompt for call_id, prompt in sent.items() if prompt.engine == url}
    async with EngineClient(url, api_key=api_key, timeout=_TIMEOUT_SECONDS) as client:
        rendered = await _render(client, sent_there or sent)
        costs = (await client.info()).costs
        groups = group_breaks(find_breaks(prompted, rendered))
        return [await _measure(client, one, costs) for one in groups]


async def _render(
    client: EngineClient, prompts: Mapping[str, PromptSent]
) -> dict[str, RenderedPrompt]:
    """Return prompts as the engine renders them, without those that it cannot, as with images."""
    rendered: dict[str, RenderedPrompt] = {}
    openings: dict[str, str] = {}
    for call_id, sent in prompts.items():
        fields = {**sent.options, "chat_template_kwargs": sent.template_args}
        # A choice of a tool would be refused without tools.
        plain = {name: value for name, value in fields.items() if name != "tool_choice"}
        if repr(plain) not in openings:
            example = await client.render([{"role": "user", "content": _TEXT}], **plain)
            openings[repr(plain)] = example.rpartition(_TEXT)[2]
        try:
            text = await client.render(sent.messages, tools=sent.tools, **fields)
        except MalformedRequest:
            continue
        before = text.removesuffix(openings[repr(plain)])
        rendered[call_id] = RenderedPrompt(before, text[len(before) :])
    return rendered


async def _measure(client: EngineClient, one: PrefixBreak, costs: Costs | None) -> PrefixBreak:
    """Return a break with the token at which it is, and how long computing it again takes."""
    if not one.is_rendered:
        return one
    old, new = await client.tokenize([one.old, one.new], add_special_tokens=False)
    pairs = enumerate(zip(old, new, strict=False))
    least = min(len(old), len(new))
    token = next((number for number, (was, now) in pairs if was != now), least) if one.at else 0
    again, points = one.again_tokens, costs.points if costs is not None else []
    if again is None or not points:
        return replace(one, token=token)
    tokens, seconds = points[-1]
    estimate = again * seconds / tokens
    usage, finished = one.call.usage, one.call.finished
    if usage is not None and finished is not None and not usage.streamed_tokens:
        # All of it was computed between the request and its first token.
        answered = one.call.first_token or finished.at
        estimate = min(estimate, answered - one.call.started.at)
    return replace(one, token=token, prefill_seconds=estimate)
