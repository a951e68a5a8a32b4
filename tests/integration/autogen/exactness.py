"""How each linked call found its prompt, and the count of it over all tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from flashmoa.observe import Event
from flashmoa.observe.calls import calls


@dataclass(frozen=True)
class Found:
    """One call.

    Attributes:
        status: ``hit`` and ``mispredicted`` as the engine says; ``late`` where the call came
            before its link was made: the tiny model is quick. ``None``: no link.
        late_tokens: prompt tokens that were left to compute.
    """

    agent: str
    status: str | None
    late_tokens: int | None = None


def found(events: Iterable[Event]) -> list[Found]:
    """Return the calls that were finished, in that order."""
    ended = [(call.finished.at, call) for call in calls(events) if call.finished is not None]
    found: list[Found] = []
    for _, call in sorted(ended, key=lambda pair: pair[0]):
        usage = call.usage
        status = usage.prompt_stream.status if usage and usage.prompt_stream else None
        if status is None and call.started.late:
            status = "late"
        found.append(Found(call.agent, status, usage.late_tokens if usage else None))
    return found


def mostly_hit(calls: list[Found]) -> bool:
    """Links that always came late would be of no use."""
    return 2 * sum(call.status == "hit" for call in calls) >= len(calls)


@dataclass
class Count:
    """Calls that could be linked, by what became of them."""

    hit: int = 0
    late: int = 0
    wrong: int = 0
    unlinked: int = 0


# By what was tested; printed at the end, see ``conftest.py``.
counts: defaultdict[str, Count] = defaultdict(Count)


def count(kind: str, calls: Iterable[Found]) -> None:
    """Count calls that could be linked."""
    for call in calls:
        named = {"hit": "hit", "late": "late", None: "unlinked"}.get(call.status, "wrong")
        setattr(counts[kind], named, getattr(counts[kind], named) + 1)


def as_rows() -> list[dict[str, object]]:
    return [{"kind": kind, **asdict(one)} for kind, one in sorted(counts.items())]
