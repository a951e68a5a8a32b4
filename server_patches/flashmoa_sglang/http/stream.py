"""``PromptStream``, a prompt that only grows, and the results of its prefills."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flashmoa_sglang.http.errors import MalformedRequest, PromptTooLarge, StreamGone
from flashmoa_sglang.http.tokens.token_buffer import common_length
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.http.hearing.following import Follower
    from flashmoa_sglang.http.tokens.token_buffer import TokenBuffer


@dataclass(frozen=True, slots=True)
class Terms:
    """The fields of a prefill besides its tokens.

    ``cache_salt``, ``extra_key`` and ``lora_path`` (an adapter's name) are the namespace of its KV:
    only requests in the same namespace find the KV. ``expected_output`` is the number of tokens
    that the answer to the stream's request is likely to have.
    """

    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    dp_rank: int | None = None
    expected_output: int | None = None

    def namespace(self) -> dict[str, Any]:
        return RELEASE.namespace_fields(self.cache_salt, self.extra_key, self.lora_path)


Ending = Literal["used", "deleted", "expired", "drained"]


@dataclass(frozen=True, slots=True)
class Span:
    """One increment: when it was computed (Unix seconds, with waiting), and how many tokens.

    ``delay_seconds`` estimates how much later the engine's answers got their next tokens for it;
    ``None`` if the engine has not measured its costs.
    """

    start: float
    end: float
    tokens: int
    delay_seconds: float | None


class CallText(NamedTuple):
    """A call whose text a stream gets while the engine writes the text."""

    call_id: str


@dataclass(slots=True, eq=False)
class PromptStream:
    """One growing prompt: of text, in ``buffer``, or of token ids, in ``ids``.

    Attributes:
        ids: the prompt's tokens; of a stream of text, once the stream has ended.
        last_append: a hash of the last append, which a client may repeat.
        sent, kept: numbers of tokens that the schedulers have, and that are still right.
        end_sent: whether the schedulers know that no more tokens come.
        claimed: whether the final request has come, and computes the rest of the prompt.
        closed: how the stream ended; ``None`` while it is open.
        prefilled: number of tokens at the beginning whose KV has been computed.
        computed: number of prefilled tokens that were not in the radix cache before.
        spans: the last increments, for timelines.
        failure: why the stream is not prefilled any more; ``None`` if it is.
        growing: locked while text is added.
        pace_seconds: how long the client should gather text before it appends.
        pinned_from: ``None`` for a client's stream. If the server itself pins the next prompt of an
            agent whose tools run: how many tokens that prompt shares with the agent's request. 0
            for a prewarmed prompt, which no request uses up.
        follower: adds the text of the call that the stream follows, if it follows one.
        counted_from: the place in the text where the client's count of characters begins.
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
    growing: asyncio.Lock = field(default_factory=asyncio.Lock)
    deadline: float = 0.0
    pace_seconds: float = 0.0
    waits_for_room: bool = False
    pinned_from: int | None = None
    follower: Follower | None = None
    counted_from: int = 0

    def require_unused(self) -> None:
        """Raise StreamGone if the stream has ended, or its final request has come."""
        if self.closed is not None:
            raise gone(self.id, self.closed)
        if self.claimed:
            raise StreamGone(
                f"Prompt stream {self.id} is in use by its request and takes no more text; open "
                "a new one.",
                reason="used",
            )

    def require_place(self, start: int | None) -> None:
        """Raise MalformedRequest if text cannot follow this place; ``None``: the end."""
        if start is None:
            if self.follower is not None and self.follower.written:
                raise MalformedRequest(
                    f"This stream has {self.follower.written} characters of the call that it "
                    "follows; give start, the number of characters before the call's text, and "
                    "the whole text from there on."
                )
            return
        if self.buffer is None:
            raise MalformedRequest("This stream was opened with input_ids; leave start out.")
        characters = len(self.buffer.text) - self.counted_from
        if start > characters:
            raise MalformedRequest(
                f"start is {start}, but the stream's text has only {characters} characters; give "
                "the number of characters that stay."
            )

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
        """Return how many tokens the stream has in common with a prompt that may be its own.

        A client's stream must have ended, and the prompt must begin with all its tokens. A prompt
        that the server pins must agree beyond ``pinned_from``. Otherwise return 0.
        """
        known, need = self.known(), self.pinned_from
        if need is None:
            need = len(known) if self.ended_at is not None else 0
        if not _may_share(known, need, prompt):
            return 0
        agreed = common_length(known, prompt)
        goes_on = self.pinned_from is None or agreed > need
        return agreed if agreed >= need and goes_on else 0

    def may_become(self, prompt: array[int]) -> bool:
        """Return whether the stream has not ended, and may end as the beginning of a prompt."""
        if self.ended_at is not None:
            return False
        known, certain = self.known(), len(self.ids)
        if self.buffer is not None:
            certain = self.buffer.certain_tokens
        return _may_share(known, certain, prompt) and known[:certain] == prompt[:certain]

    def beginning(self) -> str | array[int]:
        """Return the prompt so far: text, or token ids."""
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


def _may_share(known: array[int], length: int, prompt: array[int]) -> bool:
    """Return whether a prompt may begin with the first tokens of a stream; compare one token.

    Comparing all tokens of hundreds of streams would delay other answers.
    """
    return 0 < length <= len(prompt) and prompt[length - 1] == known[length - 1]


def gone(stream_id: str, ending: Ending) -> StreamGone:
    return StreamGone(
        f"Prompt stream {stream_id} is gone: {ending}. Open a new one.", reason=ending
    )


def over_context(room: int) -> PromptTooLarge:
    return PromptTooLarge(
        f"With this piece, the prompt would be too long: this server takes at most {room} tokens. "
        "The piece was not added; shorten the prompt.",
        max_tokens=room,
    )
