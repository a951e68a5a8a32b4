"""What the plugin's routes answer when they cannot do what was asked.

ApiError                  any of these: a status, a stable ``code`` and what to do about it
 +-- Malformed        400  the body is not what the route takes
 +-- UnknownStream    404  no such prompt stream
 +-- DecodesOnly      404  the decode engine of a PD pair prefills nothing
 +-- OutOfOrder       409  ``seq`` skips ahead, or the stream has ended
 +-- StreamGone       410  the stream expired, was deleted or has been used
 +-- TooLarge         413  over the context length or the buffer limit
 +-- TooManyStreams   429  the server's limit of open streams is reached
 +-- EngineFailed     500  SGLang could not run the prefill
 +-- EngineBusy       503  SGLang takes no more requests at the moment
 +-- Draining         503  the server is shutting down
"""

from __future__ import annotations

from typing import ClassVar


class ApiError(Exception):
    """An answer that is not a success. ``details`` are extra JSON fields."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details

    def body(self) -> dict[str, object]:
        return {"error": {"code": self.code, "message": str(self), **self.details}}


class Malformed(ApiError):
    status, code = 400, "malformed"


class UnknownStream(ApiError):
    status, code = 404, "unknown_stream"


class DecodesOnly(ApiError):
    status, code = 404, "decodes_only"


class OutOfOrder(ApiError):
    status, code = 409, "out_of_order"


class StreamGone(ApiError):
    status, code = 410, "stream_gone"


class TooLarge(ApiError):
    status, code = 413, "too_large"


class TooManyStreams(ApiError):
    status, code = 429, "too_many_streams"


class EngineFailed(ApiError):
    status, code = 500, "engine_failed"


class EngineBusy(ApiError):
    status, code = 503, "engine_busy"


class Draining(ApiError):
    status, code = 503, "draining"
