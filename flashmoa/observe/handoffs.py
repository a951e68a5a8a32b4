"""Which call's text flowed into which call's prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import Event, LinkOpened


@dataclass(frozen=True, slots=True)
class Handoff:
    """Text of ``writer``, a ``call_id``, flowed from ``start`` to ``end``; Unix seconds."""

    writer: str
    start: float
    end: float


def handoffs(events: Sequence[Event]) -> dict[str, list[Handoff]]:
    """By ``call_id`` of a call that was linked: what its link has had text of.

    A link names the agents it gets text of, in the order of its prompt. Of each, that is the last
    call that had begun to write before the linked call went out, and not ended before the link
    was opened. Its text flows on as it is written once all text before it is complete.
    """
    opened = {event.stream_id: event for event in events if isinstance(event, LinkOpened)}
    by_agent: defaultdict[str, list[Call]] = defaultdict(list)
    found = calls(events)
    for call in found:
        by_agent[call.agent].append(call)
    result: dict[str, list[Handoff]] = {}
    for call in found:
        link = opened.get(call.started.stream_id or "")
        if link is None:
            continue
        names = dict.fromkeys(link.upstream)
        writers = [_writer(by_agent[name], link, call) for name in names]
        result[call.started.call_id] = _in_turn([one for one in writers if one is not None])
    return result


def _writer(candidates: Sequence[Call], link: LinkOpened, reader: Call) -> Call | None:
    for call in reversed(candidates):
        token, ended = call.first_token, call.ended
        if token is None or call is reader or token > reader.started.at:
            continue
        if ended is None or ended.at >= link.at:
            return call
    return None


def _in_turn(writers: Sequence[Call]) -> list[Handoff]:
    complete = 0.0
    found: list[Handoff] = []
    for call in writers:
        start = max(call.first_token or 0.0, complete)
        end = call.ended.at if call.ended is not None else start
        complete = max(start, end)
        found.append(Handoff(call.started.call_id, start, complete))
    return found
