"""The messages between the HTTP process and the schedulers, and the marks on requests.

The messages are for control only. Prefills are sent as ordinary SGLang requests, so that tensor
parallelism, chunking, metrics and abort work as for any request. They carry a mark in
``sampling_params.custom_params``, which SGLang passes to the scheduler unchanged.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flashmoa_sglang.saturation import LayerTimes

CUSTOM_PARAMS_KEY = "flashmoa"
# The reason with which a scheduler refuses an increment if the KV pool has no room for it.
# :class:`RoomAvailable` later tells its stream to try again.
NO_ROOM = "no room in the KV pool"


@dataclass(frozen=True, slots=True)
class RequestMark:
    """What the scheduler must know about a request that the plugin sends or changes.

    Attributes:
        stream: id of the prompt stream to which the request belongs, if any.
        final: whether it is the stream's final request, and not an increment.
        late: of a final request, the tokens that it has to compute itself.
        expected_output: number of tokens that the client expects the request to decode, if given.
        timed: whether the request is a prefill that measures the engine.
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
        """Return the mark in a request's ``custom_params``, in which users may put anything."""
        if not isinstance(custom_params, dict):
            return None
        fields = custom_params.get(CUSTOM_PARAMS_KEY)
        try:
            return cls(**fields) if isinstance(fields, dict) else None
        except TypeError:  # The fields are not those of a mark.
            return None


def unsent() -> dict[str, Any]:
    """Return fields of a ``GenerateReqInput`` that a PD pair's prefill engine sends nowhere.

    The engine computes the request and keeps its KV, as it does with SGLang's own warm-up.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    # SGLang requires a room; any number does.
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": secrets.randbelow(1 << 30)}


def handle(dispatcher: Any, message_type: type, handler: Callable[[Any], None]) -> None:
    """Register a handler for a type of message with SGLang's dispatcher."""
    dispatcher._mapping[message_type] = handler


@dataclass(frozen=True, slots=True)
class ReleaseStream:
    """Tells every scheduler that a stream has ended, and that its KV need not be kept."""

    stream: str


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Tells every scheduler the costs of this engine's forwards, as in ``costs.Costs``.

    ``waits_for``: the number of tokens in a forward for which prefills wait; ``None``: they do not.
    """

    points: tuple[tuple[int, float], ...]
    decode_step: float
    waits_for: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """Tells the HTTP process how many seconds the forward of a timed request took.

    ``layers``: the times of its layers, if their experts are copied to the device.
    """

    rid: str
    seconds: float
    layers: LayerTimes | None = None


@dataclass(frozen=True, slots=True)
class CountUpdate:
    """Tells the HTTP process, for the metrics, how much two counts of ``KvReport`` have grown."""

    duplicates_avoided: int
    gave_way: int


@dataclass(frozen=True, slots=True)
class RoomAvailable:
    """Tells the HTTP process that the KV pool has room for increments that were refused."""

    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvQuery:
    """Asks every scheduler for a ``KvReport``."""

    query: int


@dataclass(frozen=True, slots=True)
class KvReport:
    """Describes the KV pool of a data-parallel rank; sizes in tokens.

    Attributes:
        total, free, evictable, protected: slots of the pool. Protected ones are in use or pinned.
        pinned_streams: prompt streams whose KV is pinned now.
        gave_way: pins that were given up for want of room, since the start.
        duplicates_avoided: tokens that several requests share and one computed, since the start.
        rode_along: tokens of streams that shared a forward with a decode step, since the start.
        experts: where the experts are, as ``asdict(ExpertMemory)``; ``None`` if SGLang keeps them.
        kv_bytes: bytes of the pool.
        peak_bytes: the most bytes that the scheduler's process has had on its device.
        shares: whether requests that arrive together compute a common prefix once; ``None`` if the
            engine keeps no KV of prompts, so that nothing is shared at all.
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
