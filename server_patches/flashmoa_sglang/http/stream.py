"""One prompt stream: a prompt that only grows, how much of it has its KV, and what prefilled it."""

from __future__ import annotations

import uuid
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashmoa_sglang.messages import NO_ROOM
from flashmoa_sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.http.token_buffer import TokenBuffer


@dataclass(frozen=True, slots=True)
class Terms:
    """What SGLang is told of a prefill beside its tokens.

    ``cache_salt``, ``extra_key`` and ``lora_path`` (an adapter's name) are the namespace of its
    KV: only requests with the same ones find it. ``dp_rank``: with several data-parallel ranks,
    the one that has the KV so far.
    """

    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    dp_rank: int | None = None

    def namespace(self) -> dict[str, Any]:
        """Return it as fields of a ``GenerateReqInput``."""
        return RELEASE.namespace_fields(self.cache_salt, self.extra_key, self.lora_path)


class Superseded(Exception):
    """The scheduler dropped a prefill because a longer one of its stream was queued."""


class NoRoom(Exception):
    """The KV pool has no room that requests do not need more."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What one prefill did. ``seconds`` includes waiting for the engine."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @classmethod
    def read(cls, meta: dict[str, Any], seconds: float = 0.0) -> Prefilled:
        """Read what a prefill did from its ``meta_info``. Raises: NoRoom, Superseded."""
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            message = reason.get("message", "aborted")
            raise NoRoom(message) if message == NO_ROOM else Superseded(message)
        return cls(meta["prompt_tokens"], meta["cached_tokens"], seconds)


Ending = Literal["used", "deleted", "expired", "drained"]


@dataclass(frozen=True, slots=True)
class Span:
    """One increment: when (Unix seconds, waiting included), and tokens computed."""

    start: float
    end: float
    tokens: int


@dataclass(slots=True, eq=False)
class PromptStream:
    """One growing prompt: of text, in ``buffer``, or of token ids, in ``ids``.

    A text stream's ``ids`` are filled once, when it has ended.
    """

    ttl_seconds: float
    buffer: TokenBuffer | None
    terms: Terms = field(default_factory=Terms)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ids: array[int] = field(default_factory=lambda: array("q"))
    next_seq: int = 0
    ended_at: float | None = None
    claimed: bool = False
    closed: Ending | None = None
    prefilled: int = 0
    # Of these, tokens that were not in the radix cache already.
    computed: int = 0
    increments: int = 0
    # The last ones, for timelines.
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=256))
    failure: str | None = None
    rid: str | None = None
    deadline: float = 0.0
    # What its client was last told of how long to gather text.
    pace_seconds: float = 0.0
    # The engine takes no requests: not before this time.
    stalled_until: float = 0.0
    # The KV pool is short of room; the scheduler says when there is some, and how often it has.
    waits_for_room: bool = False
    offers: int = 0

    def certain(self) -> array[int] | list[int]:
        """Return the tokens that no later append can change."""
        if self.buffer is None:
            return self.ids
        if self.ended_at is None:
            return self.buffer.tokens
        if not self.ids:
            self.ids = array("q", self.buffer.all_tokens())
        return self.ids

    def beginning(self) -> str | array[int]:
        """Return what was appended so far: text, or token ids."""
        return self.ids if self.buffer is None else self.buffer.text

    def certain_tokens(self) -> int:
        return len(self.certain())

    def may_grow(self) -> bool:
        """Return whether prefilling further is of use and possible."""
        over = self.claimed or self.closed is not None or self.failure is not None
        return not (over or self.waits_for_room)

    def state(self) -> dict[str, Any]:
        """Return what ``GET /prompt_streams/{id}`` answers."""
        return {
            "id": self.id,
            "kind": "input_ids" if self.buffer is None else "text",
            "received_tokens": self.certain_tokens(),
            "prefilled_tokens": self.prefilled,
            "computed_tokens": self.computed,
            "increments": self.increments,
            "next_seq": self.next_seq,
            "ended": self.ended_at is not None,
            "prefilling": self.rid is not None,
            "waits_for_room": self.waits_for_room,
            "in_use": self.claimed,
            "ttl_seconds": self.ttl_seconds,
            "pace_seconds": self.pace_seconds,
            "failure": self.failure,
        }
