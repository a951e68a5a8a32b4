"""How each linked call found its prompt stream, and the counts of that over all tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from flashmoa.observe import Event
from flashmoa.observe.calls import calls


@dataclass(frozen=True)
class CallOutcome:
    """One call.

    Attributes:
        status: ``hit`` or ``mispredicted`` as the engine reports it; ``late`` if the call came
            before its link was made, as the tiny model is quick; ``None`` if there was no link.
        late_tokens: number of prompt tokens that were left to compute.
    """

    agent: str
    status: str | None
    late_tokens: int | None = None


def finished_calls(events: Iterable[Event]) -> list[CallOutcome]:
    """Return the calls that were finished, in the order in which they finished."""
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
    """Return whether at least half of the calls hit; links that always come late are useless."""
    return 2 * sum(call.status == "hit" for call in calls) >= len(calls)


@dataclass
class Count:
    """Counts calls that could be linked, by their outcomes."""

    hit: int = 0
    late: int = 0
    wrong: int = 0
    unlinked: int = 0


# By the kind of team or test; printed at the end, see ``conftest.py``.
counts: defaultdict[str, Count] = defaultdict(Count)


def count_outcomes(kind: str, calls: Iterable[CallOutcome]) -> None:
    """Count calls that could be linked."""
    for call in calls:
        outcome = {"hit": "hit", "late": "late", None: "unlinked"}.get(call.status, "wrong")
        setattr(counts[kind], outcome, getattr(counts[kind], outcome) + 1)


def as_rows() -> list[dict[str, object]]:
    return [{"kind": kind, **asdict(total)} for kind, total in sorted(counts.items())]
