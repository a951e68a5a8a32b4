"""The messages between the HTTP process and the scheduler processes, and the marks on requests.

Prefill itself travels as ordinary SGLang requests (tensor parallelism, chunking, metrics and
abort then work as for any request), marked through ``sampling_params.custom_params``, which
SGLang carries to the scheduler untouched. These messages are for control only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flashmoa_sglang.saturation import LayerTimes

CUSTOM_PARAMS_KEY = "flashmoa"
# Why a scheduler sends an increment back; :class:`RoomAgain` says when its stream may try again.
NO_ROOM = "no room in the KV pool"


@dataclass(frozen=True, slots=True)
class RequestMark:
    """Why the plugin sent or touched a request.

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
        """Return the mark as an entry of ``sampling_params.custom_params``."""
        return {CUSTOM_PARAMS_KEY: asdict(self)}

    @classmethod
    def read(cls, custom_params: Any) -> RequestMark | None:
        """Return the mark among a request's parameters; users may put anything else beside it."""
        if not isinstance(custom_params, dict):
            return None
        fields = custom_params.get(CUSTOM_PARAMS_KEY)
        try:
            return cls(**fields) if isinstance(fields, dict) else None
        except TypeError:  # Not ours.
            return None


def unsent() -> dict[str, Any]:
    """Return what makes a ``GenerateReqInput`` one that a PD pair's prefill engine keeps to itself.

    It computes the request and sends it to no decode engine, like SGLang's own warm-up.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    # Its room says nothing, but that it is in one.
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": secrets.randbelow(1 << 30)}


def handle(dispatcher: Any, message_type: type, handler: Callable[[Any], None]) -> None:
    """Register a handler with SGLang's dispatcher of messages by type."""
    dispatcher._mapping[message_type] = handler


@dataclass(frozen=True, slots=True)
class ReleaseStream:
    """To every scheduler: the stream is over; give its KV back to the cache."""

    stream: str


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """To every scheduler: the costs of this engine's forwards, as in ``costs.Costs``."""

    points: tuple[tuple[int, float], ...]
    decode_step: float
    # Tokens from which a forward is worth waiting for; ``None``: no prefill is held back.
    waits_for: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """From a scheduler: the seconds that the forward of a timed request took.

    ``layers``: those of its layers, where their experts are in host memory.
    """

    rid: str
    seconds: float
    layers: LayerTimes | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    """From a scheduler, for the metrics: counts since its last message, as in ``KvReport``."""

    duplicates_avoided: int
    gave_way: int


@dataclass(frozen=True, slots=True)
class RoomAgain:
    """From a scheduler: the KV pool has room for what these streams were refused."""

    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvQuery:
    """To every scheduler: answer with a ``KvReport``."""

    query: int


@dataclass(frozen=True, slots=True)
class KvReport:
    """From one rank per data-parallel group: its KV pool, in tokens.

    ``pinned_streams`` and ``gave_way`` count streams. Since the start: ``gave_way``,
    ``duplicates_avoided``, and ``rode_along``, what streams prefilled beside decode steps of
    others. ``shares``: whether requests that come at once compute a common prefix once;
    ``None`` where no KV of prompts is kept, and they never do. ``experts``: where they are, as
    ``asdict(ExpertMemory)``; ``None`` where SGLang keeps them. In bytes: ``kv_bytes`` of the pool,
    ``peak_bytes``, the most that the scheduler's process has had on its device.
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
    experts: dict[str, int] | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    shares: bool | None = None
