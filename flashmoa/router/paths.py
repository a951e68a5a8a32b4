"""Which requests a router knows, and which of them may be sent twice; pure."""

from __future__ import annotations

import re
from enum import Enum

CHAT = "/v1/chat/completions"
GENERATE = "/generate"
STREAMS = "/prompt_streams"
# Requests with a prompt: they go where the policy says.
ROUTED = (
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    GENERATE,
    "/prefill_only",
    STREAMS,
)
# Any engine can answer these.
ANYWHERE = ("/render", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
# Doing it twice is doing it once (RFC 9110 §9.2.2).
_IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
# Appends are numbered; an engine that has one already says so and is as it was.
_NUMBERED = re.compile(r"/prompt_streams/[^/]+/(append|keep_alive)")
_COMPUTING = frozenset({*ROUTED, *ANYWHERE})


class Repeat(Enum):
    """When a request whose connection broke is sent to the same engine again, once."""

    ALWAYS = "always"
    # The engine may have closed a connection that was kept, before the request reached it. One that
    # did reach it costs computing, or a stream that expires.
    UNANSWERED = "if it was lost on a connection that had been used before"
    NEVER = "never"


def repeat(method: str, path: str) -> Repeat:
    """How often a request may be sent."""
    if method in _IDEMPOTENT or _NUMBERED.fullmatch(path):
        return Repeat.ALWAYS
    return Repeat.UNANSWERED if path in _COMPUTING else Repeat.NEVER
