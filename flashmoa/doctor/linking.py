"""Check an engine's chat template (``check_templates``), and make a link (``check_link``)."""

from __future__ import annotations

from typing import Any

from flashmoa.doctor.findings import Finding, fix, note, ok
from flashmoa.engine import EngineClient, EngineError, RequestRefused, StreamUse
from flashmoa.linking.placeholders import NotForecastable, Placeholders
from flashmoa.observe import Event, LinkClosed
from flashmoa.workflow import Workflow

# A text with white space that a template may strip.
_TEXT = "  A plan.\n\n1. Walk.\n"
_TOKENS_OF_READER = 8
# Lengths of the text that is read. The next one is tried if no stream opened while it was written.
_TOKENS_OF_WRITER = (16, 64, 256)


def _user_message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def check_templates(engine: EngineClient) -> list[Finding]:
    """Check whether the chat template keeps texts unchanged, so that prompts can be predicted.

    Raises: EngineError if the engine stops answering.
    """
    try:
        problem = await _prediction_problem(engine)
    except RequestRefused as error:
        return [fix("chat template", str(error), "start the engine with --chat-template FILE")]
    if problem is not None:
        text = f"it {problem}, so that prompts cannot be predicted"
        return [fix("chat template", text, "start the engine with --chat-template FILE")]
    try:
        await engine.render([_user_message("Plan a trip."), _user_message("A plan.")])
    except RequestRefused:
        text = "it refuses two user messages in a row, which AutoGen's teams send"
        remedy = "FlashMoAChatCompletionClient(merge_user_messages=True)"
        return [note("chat template", text, remedy)]
    return [ok("chat template", "it keeps texts as they are")]


async def _prediction_problem(engine: EngineClient) -> str | None:
    """Return why prompts cannot be predicted, as the end of a sentence; ``None`` if they can."""

    def messages(text: str) -> list[dict[str, str]]:
        return [_user_message(f"Shorten this:\n{text}\nBriefly.")]

    placeholders = Placeholders(["writer"])
    try:
        rendered = await engine.render(messages(placeholders.padded("writer")))
        prompt = placeholders.build_prompt(rendered)
    except NotForecastable as error:
        return str(error).removeprefix("the chat template ")
    if not prompt.slots:
        return "leaves texts out"
    for slot in prompt.slots:
        slot.append(_TEXT)
        slot.close()
    same = prompt.stable() == await engine.render(messages(_TEXT))
    return None if same else "changes texts, or what is around them"


async def check_link(engine: EngineClient, model: str) -> Finding:
    """Check whether a call's prompt is prefilled while the text that it reads is written."""
    use: StreamUse | None = None
    reason = ""
    for tokens in _TOKENS_OF_WRITER:
        try:
            use, reason = await _make_linked_calls(engine, model, tokens)
        except EngineError as error:
            return fix("link", f"a call failed: {error}", "see the engine's log")
        if use is not None:
            break
    if use is None:
        return fix("link", f"no link was made: {reason}", "see docs/troubleshooting.md")
    if use.status != "hit":
        return fix("link", f"a linked call ended as {use.status!r}", "see docs/troubleshooting.md")
    return ok("link", "hit: a call's prompt was prefilled before the call came")


async def _make_linked_calls(
    engine: EngineClient, model: str, tokens: int
) -> tuple[StreamUse | None, str]:
    """Make two calls, of which the second reads the first one's text.

    Returns: how the second call used its stream, ``None`` without one; and why its link ended.

    Raises: EngineError if a call fails.
    """
    events: list[Event] = []
    async with Workflow(engine, listener=events.append) as flow:
        sampling: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}
        plan = flow.ask([_user_message("Plan a trip to Nepal.")], max_tokens=tokens, **sampling)
        question = [_user_message(f"Shorten this:\n{plan}")]
        summary = flow.ask(question, max_tokens=_TOKENS_OF_READER, **sampling)
        await summary
    reasons = [event.reason for event in events if isinstance(event, LinkClosed)]
    usage = summary.usage
    return usage.prompt_stream if usage is not None else None, ", ".join(reasons)
