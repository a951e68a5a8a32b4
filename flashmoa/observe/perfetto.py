"""A run in the trace event format that Perfetto and Chrome's tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoa.observe.events import Event, LinkAdvanced, LinkClosed, LinkOpened, UpstreamFailed
from flashmoa.observe.timeline import Bar, lanes

_NAMES = {"ahead": "prefill ahead", "waiting": "waiting for the first token", "decode": "decode"}


def perfetto(events: Sequence[Event]) -> dict[str, Any]:
    """``{"traceEvents": [...]}``: engines are processes, agents are threads; times in
    microseconds since the first event.

    Source: the Trace Event Format (complete, instant, counter and metadata events).
    """
    run = lanes(events)
    begin = min((event.at for event in events), default=0.0)
    begin = min([begin, *(bar.start for lane in run for bar in lane.bars)])
    engines = {url: number for number, url in enumerate(dict.fromkeys(x.engine for x in run), 1)}
    places = {
        lane.agent: {"pid": engines[lane.engine], "tid": number}
        for number, lane in enumerate(run, 1)
    }
    found: list[dict[str, Any]] = [
        _named("process_name", pid=number, tid=0, name=url) for url, number in engines.items()
    ]
    for lane in run:
        where = places[lane.agent]
        found.append(_named("thread_name", **where, name=lane.agent))
        found += [_complete(bar, begin, where) for bar in lane.bars]
    for event in events:
        if event.agent in places:
            found += _others(event, round((event.at - begin) * 1e6), places[event.agent])
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _named(what: str, *, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(bar: Bar, begin: float, where: dict[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": _NAMES[bar.kind],
        "cat": bar.kind,
        "ts": round((bar.start - begin) * 1e6),
        "dur": round((bar.end - bar.start) * 1e6),
        "args": {} if bar.tokens is None else {"tokens": bar.tokens},
        **where,
    }


def _others(event: Event, at: int, where: dict[str, int]) -> list[dict[str, Any]]:
    if isinstance(event, LinkAdvanced):
        tokens = {"certain": event.received_tokens, "prefilled": event.prefilled_tokens}
        name = f"prompt of {event.agent}, tokens"
        return [{"ph": "C", "name": name, "ts": at, "pid": where["pid"], "args": tokens}]
    if isinstance(event, LinkOpened):
        name = f"link opened, from {', '.join(event.upstream) or 'nobody'}"
    elif isinstance(event, LinkClosed):
        name = f"link closed: {event.reason}"
    elif isinstance(event, UpstreamFailed):
        name = f"{event.upstream} failed ({event.failure}): {event.action}"
    else:
        return []
    return [{"ph": "i", "s": "t", "name": name, "ts": at, **where}]
