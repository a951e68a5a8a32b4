"""What the HTTP process and the scheduler processes say to each other beside requests.

Prefill itself travels as ordinary SGLang requests (tensor parallelism, chunking, metrics and
abort then work as for any request), marked through ``sampling_params.custom_params``, which
SGLang carries to the scheduler untouched. These messages are for control only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashmoa_sglang.saturation import LayerTimes

CUSTOM_PARAMS_KEY = "flashmoa"
# Why a scheduler sends an increment back; :class:`RoomAgain` says when its stream may try again.
NO_ROOM = "no room in the KV pool"


@dataclass(frozen=True, slots=True)
class RequestMark:
    """Why the plugin sent, or touched, a request.

    ``stream``: the prompt stream it belongs to, if any. ``final``: it is the real request
    that uses the stream, not an increment of it; ``late``: how many tokens it has to compute.
    ``expected_output``: how many tokens its client expects it to decode, if it said.
    ``timed``: a prefill that measures the engine.
    """

    stream: str | None = None
    final: bool = False
    late: int = 0
    expected_output: int | None = None
    timed: bool = False

    def to_custom_params(self) -> dict[str, Any]:
        return {CUSTOM_PARAMS_KEY: asdict(self)}


def mark_of(req: Any) -> RequestMark | None:
    """The mark of a request in a scheduler; users may put anything else beside it."""
    custom_params = req.sampling_params.custom_params
    if not isinstance(custom_params, dict):
        return None
    fields = custom_params.get(CUSTOM_PARAMS_KEY)
    try:
        return RequestMark(**fields) if isinstance(fields, dict) else None
    except TypeError:  # Not ours.
        return None


def is_increment(req: Any) -> bool:
    """Whether a scheduler's request prefills a prompt stream: nobody waits for its answer."""
    mark = mark_of(req)
    return mark is not None and mark.stream is not None and not mark.final


@dataclass(frozen=True, slots=True)
class ReleaseStream:
    """To every scheduler: the stream is over, give its KV back to the cache."""

    stream: str


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """To every scheduler: what this engine's forwards cost; as in ``costs.Costs``."""

    points: tuple[tuple[int, float], ...]
    decode_step: float
    # Tokens from which a forward is worth waiting for; ``None``: no prefill is held back.
    waits_for: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """From a scheduler: how long the forward of a timed request took, in seconds.

    ``layers``: what its layers took, where their experts are in host memory.
    """

    rid: str
    seconds: float
    layers: LayerTimes | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    """From a scheduler, for the metrics: what has happened since its last message."""

    duplicates_avoided: int
    gave_way: int


@dataclass(frozen=True, slots=True)
class RoomAgain:
    """From a scheduler: the KV pool has room for what these streams were refused."""

    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvQuery:
    """To every scheduler: report how the KV pool stands."""

    query: int


@dataclass(frozen=True, slots=True)
class KvReport:
    """From one rank per data-parallel group; in tokens.

    ``pinned_streams`` and ``gave_way`` count streams. Since the start: ``gave_way``,
    ``duplicates_avoided``, and ``rode_along``, what streams prefilled beside decode steps of
    others. ``shares``: whether requests that come at once compute a common prefix once;
    ``None`` where no KV of prompts is kept, and they never do.
    """

    query: int
    dp_rank: int
    total: int
    free: int
    evictable: int
    protected: int
    pinned_streams: int
    gave_way: int
    duplicates_avoided: int
    rode_along: int
    # Where the experts are, as asdict(ExpertMemory); ``None`` where SGLang keeps them.
    experts: dict[str, int] | None = None
    # In bytes: of the pool, and the most that the scheduler's process has had on its device.
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    shares: bool | None = None
