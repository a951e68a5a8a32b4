"""Make up the events of runs: a long one, and one whose texts are hostile."""

from flashmoa.engine import PromptUsage, Span, StreamUse
from flashmoa.observe import (
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkClosed,
    LinkDeclined,
    LinkOpened,
    LinkWaits,
    UpstreamFailed,
)

HOSTILE = """</script><script>alert(1)</script><img src=x onerror="alert(2)"><!-- ${alert(3)} & '"""
_AGENTS = 14


def hostile() -> list[Event]:
    """Return events whose every text is ``HOSTILE``."""
    one = {"agent": HOSTILE, "engine": f"http://{HOSTILE}"}
    two = {"agent": "quiet", "engine": "http://b"}
    return [
        CallStarted(**one, at=0.0, call_id=HOSTILE, model=HOSTILE),
        FirstToken(**one, at=1.0, call_id=HOSTILE),
        LinkWaits(**two, at=1.2, upstream=HOSTILE, reason=HOSTILE),
        CallFinished(**one, at=2.0, call_id=HOSTILE, text=HOSTILE),
        LinkDeclined(agent=HOSTILE, engine="", at=2.5, reason=HOSTILE),
        CallStarted(**two, at=3.0, call_id="f"),
        UpstreamFailed(**two, at=3.5, upstream=HOSTILE, failure=HOSTILE, action=HOSTILE),
        CallFailed(**two, at=4.0, call_id="f", error=HOSTILE),
        LinkClosed(**two, at=4.2, stream_id=None, reason=HOSTILE),
    ]


def long_run(calls: int) -> list[Event]:
    """Return calls of agents in turn, 1.2 s each, with six prefills ahead of each."""
    return [event for number in range(calls) for event in _turn(number)]


def _turn(number: int) -> list[Event]:
    at = number * 1.2
    agent = number % _AGENTS
    who = {"agent": f"agent {agent}", "engine": f"http://10.0.0.{agent % 3}:30000"}
    call = {**who, "call_id": f"c{number}"}
    prefills = [
        Span(start=at - 1 + i / 6, end=at - 0.9 + i / 6, tokens=i * number % 40) for i in range(6)
    ]
    use = StreamUse(id=f"s{number}", status="hit" if number % 41 else "expired", prefills=prefills)
    usage = PromptUsage(
        prompt_tokens=3000,
        completion_tokens=50,
        cached_tokens=2950,
        streamed_tokens=600,
        late_tokens=50,
        prompt_stream=use,
    )
    before = (f"agent {(number - 1) % _AGENTS}",)
    return [
        LinkOpened(**who, at=at - 1.1, upstream=before, stream_id=use.id),
        CallStarted(**call, at=at, model="a-model", stream_id=use.id, late=number % 97 == 5),
        FirstToken(**call, at=at + 0.15),
        CallFinished(**call, at=at + 1.19, text="words " * 100, usage=usage),
    ]
