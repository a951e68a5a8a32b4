"""Checks whether an engine's prompts can be predicted, and whether a link works there."""

from __future__ import annotations

from typing import Any

from flashmoa.doctor.findings import Finding, fix, note, ok
from flashmoa.engine import EngineClient, EngineError, RequestRefused, StreamUse
from flashmoa.linking.placeholders import StandIns
from flashmoa.linking.prompt import Prompt
from flashmoa.observe import Event, LinkClosed
from flashmoa.workflow import Workflow

# White space that templates may strip.
_TEXT = "  A plan.\n\n1. Walk.\n"
_SHORT = 8
# Tokens of the first answer: long enough for a stream to open meanwhile, the shorter first.
_ANSWERS = (16, 64, 256)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def check_templates(engine: EngineClient) -> list[Finding]:
    """Check whether the engine's chat template keeps texts as they are, at a stable place.

    Raises: EngineError where the engine stops answering.
    """
    try:
        problem = await _unstable(engine)
    except RequestRefused as error:
        return [fix("chat template", str(error), "start it with --chat-template FILE")]
    if problem is not None:
        text = f"it {problem}, so that prompts cannot be predicted"
        return [fix("chat template", text, "start it with --chat-template FILE")]
    try:
        await engine.render([_user("Plan a trip."), _user("A plan.")])
    except RequestRefused:
        text = "it refuses two user messages in a row, which AutoGen's teams send"
        remedy = "FlashMoAChatCompletionClient(merge_user_messages=True)"
        return [note("chat template", text, remedy)]
    return [ok("chat template", "it keeps texts as they are")]


async def _unstable(engine: EngineClient) -> str | None:
    """Return what is wrong with a predicted prompt, ``None`` where nothing is."""

    def messages(text: str) -> list[dict[str, str]]:
        return [_user(f"Shorten this:\n{text}\nBriefly.")]

    stand_ins = StandIns(["writer"])
    try:
        rendered = await engine.render(messages(stand_ins.padded("writer")))
        prompt = Prompt(stand_ins.segments(rendered))
    except ValueError as error:
        return str(error).removeprefix("the chat template ")
    if not prompt.slots:
        return "leaves texts out"
    for slot in prompt.slots:
        slot.append(_TEXT)
        slot.close()
    same = prompt.stable() == await engine.render(messages(_TEXT))
    return None if same else "changes texts, or what is around them"


async def check_link(engine: EngineClient, model: str) -> Finding:
    """Ask for a short answer and for one that reads it, linked to it."""
    use: StreamUse | None = None
    reason = ""
    for tokens in _ANSWERS:
        try:
            use, reason = await _linked(engine, model, tokens)
        except EngineError as error:
            return fix("link", f"a call failed: {error}", "see the engine's log")
        if use is not None:
            break
    if use is None:
        return fix("link", f"no link was made: {reason}", "docs/troubleshooting.md")
    if use.status != "hit":
        return fix("link", f"a linked call ended as {use.status!r}", "docs/troubleshooting.md")
    return ok("link", "hit: a call's prompt was prefilled before the call came")


async def _linked(engine: EngineClient, model: str, tokens: int) -> tuple[StreamUse | None, str]:
    """Make two calls; return what became of the second one's stream, and how its link ended.

    Raises: EngineError.
    """
    events: list[Event] = []
    async with Workflow(engine, listener=events.append) as flow:
        sampling: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}
        plan = flow.ask([_user("Plan a trip to Nepal.")], max_tokens=tokens, **sampling)
        short = flow.ask([_user(f"Shorten this:\n{plan}")], max_tokens=_SHORT, **sampling)
        await short
    ended = [event.reason for event in events if isinstance(event, LinkClosed)]
    usage = short.usage
    return usage.prompt_stream if usage is not None else None, ", ".join(ended)
