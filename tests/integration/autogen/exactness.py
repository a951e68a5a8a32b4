"""Record how linked calls found their prompts, and count the outcomes over all tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from flashmoa.observe import Event
from flashmoa.observe.calls import calls


@dataclass(frozen=True)
class CallOutcome:
    """How one call found its prompt.

    Attributes:
        status: ``hit`` or ``mispredicted``, as the engine reports it; ``late`` if the call came
            before its link was made, since the tiny model is fast; ``None`` without a link.
        late_tokens: number of prompt tokens that were left to compute.
    """

    agent: str
    status: str | None
    late_tokens: int | None = None


def call_outcomes(events: Iterable[Event]) -> list[CallOutcome]:
    """Return the outcomes of finished calls, in the order of their ends."""
    ended = [(call.finished.at, call) for call in calls(events) if call.finished is not None]
    outcomes: list[CallOutcome] = []
    for _, call in sorted(ended, key=lambda pair: pair[0]):
        usage = call.usage
        status = usage.prompt_stream.status if usage and usage.prompt_stream else None
        if status is None and call.started.late:
            status = "late"
        outcomes.append(CallOutcome(call.agent, status, usage.late_tokens if usage else None))
    return outcomes


def mostly_hit(calls: list[CallOutcome]) -> bool:
    """Return whether at least half of the calls were hits; late links would be of no use."""
    return 2 * sum(call.status == "hit" for call in calls) >= len(calls)


@dataclass
class OutcomeCounts:
    """Numbers of calls that could be linked, by their outcome."""

    hit: int = 0
    late: int = 0
    wrong: int = 0
    unlinked: int = 0


# The counts by the kind of test; ``conftest.py`` prints them at the end.
counts: defaultdict[str, OutcomeCounts] = defaultdict(OutcomeCounts)


def count_outcomes(kind: str, calls: Iterable[CallOutcome]) -> None:
    """Count the outcomes of calls that could be linked."""
    for call in calls:
        name = {"hit": "hit", "late": "late", None: "unlinked"}.get(call.status, "wrong")
        setattr(counts[kind], name, getattr(counts[kind], name) + 1)


def as_rows() -> list[dict[str, object]]:
    return [{"kind": kind, **asdict(each)} for kind, each in sorted(counts.items())]
