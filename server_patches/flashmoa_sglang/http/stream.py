"""``PromptStream``, a prompt that only grows, and the results of its prefills."""

from __future__ import annotations

import uuid
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashmoa_sglang.http.errors import EngineFailed
from flashmoa_sglang.http.token_buffer import common_length
from flashmoa_sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.http.token_buffer import TokenBuffer


@dataclass(frozen=True, slots=True)
class Terms:
    """The fields of a prefill besides its tokens.

    ``cache_salt``, ``extra_key`` and ``lora_path`` (the name of an adapter) are the namespace of
    its KV: only requests with the same values find the KV. ``dp_rank`` is the data-parallel rank
    that computes the stream, if there are several. ``expected_output`` is the number of tokens
    that are expected in the answer to a stream's request.
    """

    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    dp_rank: int | None = None
    expected_output: int | None = None

    def namespace(self) -> dict[str, Any]:
        return RELEASE.namespace_fields(self.cache_salt, self.extra_key, self.lora_path)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The result of one prefill. ``seconds`` includes waiting for the engine."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @classmethod
    def read(cls, meta: dict[str, Any], seconds: float = 0.0) -> Prefilled:
        """Read the result of a prefill from its ``meta_info``.

        Raises: EngineFailed if SGLang has aborted it.
        """
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            message = reason.get("message", "aborted")
            raise EngineFailed(
                f"SGLang has aborted the prefill: {message}. Send the whole request instead."
            )
        return cls(meta["prompt_tokens"], meta["cached_tokens"], seconds)


Ending = Literal["used", "deleted", "expired", "drained"]


@dataclass(frozen=True, slots=True)
class Span:
    """One increment: when it was computed (Unix seconds, with waiting), and how many tokens."""

    start: float
    end: float
    tokens: int


@dataclass(slots=True, eq=False)
class PromptStream:
    """One growing prompt: of text, in ``buffer``, or of token ids, in ``ids``.

    Attributes:
        ids: of a stream of text, its tokens once it has ended.
        next_seq: the number of the append that is expected next.
        last_append: a hash of the last one, which may be repeated.
        sent: number of tokens that have been handed over to the schedulers.
        kept: how many of these are still right.
        end_sent: whether they have been told that no more tokens come.
        claimed: whether the final request has come, and computes the rest of the prompt.
        closed: how the stream ended; ``None`` while it is open.
        prefilled: number of tokens at the beginning whose KV has been computed.
        computed: how many of these were not already in the radix cache.
        spans: the last increments, for timelines.
        failure: why the stream is not prefilled any more, if it is not.
        pace_seconds: how long the client was last asked to gather text before it appends.
        waits_for_room: whether the KV pool has no room for the stream's next tokens.
        held_from: of a stream that this server holds, the number of tokens that its prompt has in
            common with the one before it, if an agent's tools run; 0 of a prompt that is kept warm,
            which no request takes; ``None`` of a client's stream.
    """

    ttl_seconds: float
    buffer: TokenBuffer | None
    terms: Terms = field(default_factory=Terms)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ids: array[int] = field(default_factory=lambda: array("q"))
    next_seq: int = 0
    last_append: int | None = None
    ended_at: float | None = None
    sent: int = 0
    kept: int = 0
    end_sent: bool = False
    claimed: bool = False
    closed: Ending | None = None
    prefilled: int = 0
    computed: int = 0
    increments: int = 0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=256))
    failure: str | None = None
    deadline: float = 0.0
    pace_seconds: float = 0.0
    waits_for_room: bool = False
    held_from: int | None = None

    def known(self) -> array[int]:
        """Return the tokens so far; the last ones of a stream of text may be taken back."""
        if self.buffer is None:
            return self.ids
        if self.ended_at is None:
            return self.buffer.tokens
        if not self.ids:
            self.ids = array("q", self.buffer.all_tokens())
        return self.ids

    def agrees_with(self, prompt: array[int]) -> int:
        """Return how many tokens a prompt and this stream's have in common, if it may be its own.

        It may be if it begins with all tokens of a stream that has ended, or goes on after what a
        held stream has in common with the prompt before. Otherwise return 0.
        """
        known, need = self.known(), self.held_from
        if need is None:
            need = len(known) if self.ended_at is not None else 0
        # Most streams are told apart by one token, where comparing all would take a while.
        if not 0 < need <= len(prompt) or prompt[need - 1] != known[need - 1]:
            return 0
        agreed = common_length(known, prompt)
        goes_on = self.held_from is None or agreed > need
        return agreed if agreed >= need and goes_on else 0

    def may_become(self, prompt: array[int]) -> bool:
        """Return whether the stream has not ended, and may do so as the beginning of a prompt."""
        if self.ended_at is not None:
            return False
        known = self.ids if self.buffer is None else self.buffer.tokens
        certain = len(known) if self.buffer is None else self.buffer.certain_tokens
        # As above, to compare all tokens of hundreds of streams would hold up other answers.
        if not 0 < certain <= len(prompt) or prompt[certain - 1] != known[certain - 1]:
            return False
        return known[:certain] == prompt[:certain]

    def beginning(self) -> str | array[int]:
        """Return what was appended so far: text, or token ids."""
        return self.ids if self.buffer is None else self.buffer.text

    def known_tokens(self) -> int:
        return len(self.known())

    def may_grow(self) -> bool:
        """Return whether it is useful to prefill more of the stream."""
        return not (self.claimed or self.closed is not None or self.failure is not None)

    def state(self) -> dict[str, Any]:
        """Return the answer of ``GET /prompt_streams/{id}``."""
        return {
            "id": self.id,
            "kind": "input_ids" if self.buffer is None else "text",
            "received_tokens": self.known_tokens(),
            "prefilled_tokens": self.prefilled,
            "computed_tokens": self.computed,
            "increments": self.increments,
            "next_seq": self.next_seq,
            "ended": self.ended_at is not None,
            "prefilling": self.may_grow() and self.sent > self.prefilled,
            "waits_for_room": self.waits_for_room,
            "in_use": self.claimed,
            "ttl_seconds": self.ttl_seconds,
            "pace_seconds": self.pace_seconds,
            "failure": self.failure,
        }
