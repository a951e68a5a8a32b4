"""The messages between the HTTP process and the schedulers, and the marks on requests.

An ordinary SGLang request opens a prompt stream. So SGLang checks the stream's fields, chooses its
adapter and sends it to its data-parallel rank. The stream's tokens follow in messages, and each is
sent once. Marks are in ``sampling_params.custom_params``, which SGLang passes to the scheduler
unchanged.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flashmoa_sglang.costs import Costs, TimedForward
from flashmoa_sglang.moe.saturation import LayerTimes

CUSTOM_PARAMS_KEY = "flashmoa"
# How a scheduler ends the request that opens a prompt stream.
STREAM_OPENED = "the prompt stream is open"


@dataclass(frozen=True, slots=True)
class RequestMark:
    """What the scheduler must know about a request that the plugin makes or changes.

    Attributes:
        stream: id of the request's prompt stream.
        opens: the request opens the stream, and is never computed.
        final: the request is the stream's final request. Otherwise it is an increment, which the
            scheduler makes.
        expected_output: number of tokens that the client expects the request to decode.
        timed: the request runs only for the times of its forwards.
        rides: the request shall ride along with a decode step, in the same forward.
        compared: the text's token states will be compared with the states of other texts.
        own: the plugin has made the request, or needs no text of its answer.
    """

    stream: str | None = None
    opens: bool = False
    final: bool = False
    expected_output: int | None = None
    timed: bool = False
    rides: bool = False
    compared: bool = False
    own: bool = False

    def to_custom_params(self) -> dict[str, Any]:
        return {CUSTOM_PARAMS_KEY: asdict(self)}

    @classmethod
    def read(cls, custom_params: Any) -> RequestMark | None:
        """Return the mark in a request's ``custom_params``, where users may put anything."""
        if not isinstance(custom_params, dict):
            return None
        fields = custom_params.get(CUSTOM_PARAMS_KEY)
        try:
            return cls(**fields) if isinstance(fields, dict) else None
        except TypeError:  # A mark has other fields.
            return None


def unsent() -> dict[str, Any]:
    """Return fields that keep a PD pair's prefill engine from sending a request's KV.

    SGLang's own warm-up has them, too.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    # SGLang requires a room; any number does.
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": secrets.randbelow(1 << 30)}


def handle(dispatcher: Any, message_type: type, handler: Callable[[Any], None]) -> None:
    dispatcher._mapping[message_type] = handler


@dataclass(frozen=True, slots=True)
class ReleaseStream:
    """Tells every scheduler that a stream's KV need not be kept.

    ``stream``: the stream's id, or the id of its request if the request calls no tools.
    """

    stream: str


@dataclass(frozen=True, slots=True)
class StreamTokens:
    """Hands new tokens of prompt streams over to every scheduler.

    Attributes:
        tokens: for each stream, its id, the new tokens as the bytes of an ``array("q")``, and
            whether the stream has been appended to since it was opened.
        ended: streams that get no more tokens. Their last tokens are worth an increment.
        unclaimed: streams whose final request was refused. Increments go on.
        kept: for each stream whose last tokens were taken back, its id and how many tokens stay
            before the new ones.
    """

    tokens: tuple[tuple[str, bytes, bool], ...]
    ended: tuple[str, ...] = ()
    unclaimed: tuple[str, ...] = ()
    kept: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """Tells the HTTP process what a scheduler has done for streams since the last message.

    Attributes:
        increments: for each, the stream's id, the number of its tokens that have KV now, the number
            of tokens that the increment computed, the seconds from its batch to its result, and by
            how many seconds it lengthened decoding (see ``RequestState.delay``).
        waiting: streams that begin (``True``) or cease to wait for room in the KV pool.
        duplicates_avoided, gave_way: how much these counts of ``KvReport`` have grown.
    """

    increments: tuple[tuple[str, int, int, float, float | None], ...] = ()
    waiting: tuple[tuple[str, bool], ...] = ()
    duplicates_avoided: int = 0
    gave_way: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Tells every scheduler the costs of this engine's forwards.

    ``costs``: ``None`` if they are not known (yet).
    ``waits_for``: prefills wait for a forward of this many tokens; ``None``: they do not wait.
    """

    costs: Costs | None
    waits_for: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Tells the HTTP process how many seconds the last forwards took.

    ``layers``: the times of the last forward's layers, if their experts are copied to the device.
    """

    forwards: tuple[TimedForward, ...]
    layers: LayerTimes | None = None


@dataclass(frozen=True, slots=True)
class KvQuery:
    """Asks every scheduler for a ``KvReport``."""

    query: int


@dataclass(frozen=True, slots=True)
class KvReport:
    """Describes the KV pool of a data-parallel rank; sizes in tokens.

    Attributes:
        total, free, evictable, protected: slots of the pool. Protected slots are in use or pinned.
        pinned_streams: prompt streams whose KV is pinned now.
        gave_way: streams that were unpinned for want of room, since the start.
        duplicates_avoided: tokens that several requests share and one computed, since the start.
        rode_along: tokens of streams that shared a forward with a decode step, since the start.
        experts: where the experts are, as ``asdict(ExpertMemory)``; ``None`` if SGLang keeps them.
        kv_bytes: bytes of the pool.
        peak_bytes: the most bytes that the scheduler's process has had on its device.
        max_running: the most requests that decode together.
        shares: whether requests that arrive together compute a common prefix once; ``None`` if the
            engine keeps no KV of prompts, so that nothing is shared at all.
        no_rides: why no tokens ride along with decode steps; empty if some do.
        late_kv: why KV enters the radix tree only with the result of its forward; empty if it does
            so at the forward's launch.
        steps_together: whether ranks with different requests may have to be in the same forward.
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
    max_running: int
    experts: dict[str, int] | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    shares: bool | None = None
    no_rides: str = ""
    late_kv: str = ""
    steps_together: bool = False


@dataclass(frozen=True, slots=True)
class CompareTexts:
    """Asks every scheduler for the ``Similarities`` of texts, and lets it forget these texts.

    Attributes:
        query: the number of the question; ``None`` if nobody waits for an answer.
        rids: ids of the texts' requests, whose marks are ``compared``.
    """

    query: int | None
    rids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Similarities:
    """Tells the HTTP process how similar texts are.

    Attributes:
        tokens: for each text, the number of tokens whose states were compared.
        rows: for each text, its similarity to each text; empty if a text has no states.
    """

    query: int | None
    tokens: tuple[int, ...]
    rows: list[list[float]]


@dataclass(frozen=True, slots=True)
class HearAnswers:
    """Tells every scheduler whose answers the HTTP process hears while they are written.

    Attributes:
        begun: ids of requests to report from now on, with all earlier tokens.
        ended: ids of requests to report no more.
    """

    begun: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenTokens:
    """Tells the HTTP process what running requests have written since the last message.

    Attributes:
        answers: for each request, its id, tokens as the bytes of an ``array("q")``, and the number
            of prompt tokens at their beginning. A request's first message begins with the last
            tokens of its prompt, because a detokenizer needs them.
    """

    answers: tuple[tuple[str, bytes, int], ...]
