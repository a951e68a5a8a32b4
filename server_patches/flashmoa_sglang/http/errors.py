"""Errors of the plugin's routes.

Clients recognise an error by its ``code``, and most have the same name there (``flashmoa.errors``).
Three differ: ``engine_busy`` is ``EngineDraining``, too, because in both cases the client should
use another engine; ``decodes_only`` is ``PluginMissing``, and ``engine_failed`` ``RequestRefused``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError


class ApiError(Exception):
    """Raised when a route cannot do what the request asks for.

    Args: details: further fields of the error in the JSON answer.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details

    def body(self) -> dict[str, object]:
        return {"error": {"code": self.code, "message": str(self), **self.details}}


class MalformedRequest(ApiError):
    """Raised when the body is not what the route takes."""

    status, code = 400, "malformed"


class CandidateRefused(ApiError):
    """Raised when an answer cannot be scored after its prompt; the message says what to do."""

    status, code = 400, "candidate_refused"


class StreamUnknown(ApiError):
    """Raised when there is no such prompt stream."""

    status, code = 404, "unknown_stream"


class DecodesOnly(ApiError):
    """Raised when a decode engine of a PD pair is asked to prefill."""

    status, code = 404, "decodes_only"


class StreamOutOfOrder(ApiError):
    """Raised when an append skips ahead, or the stream has ended."""

    status, code = 409, "out_of_order"


class StreamGone(ApiError):
    """Raised when the stream expired, was deleted or has been used."""

    status, code = 410, "stream_gone"


class PromptTooLarge(ApiError):
    """Raised when a prompt is over the context length or the buffer limit."""

    status, code = 413, "too_large"


class TooManyStreams(ApiError):
    """Raised when the server's limit of open streams is reached."""

    status, code = 429, "too_many_streams"


class EngineFailed(ApiError):
    """Raised when SGLang cannot run the prefill."""

    status, code = 500, "engine_failed"


class EngineBusy(ApiError):
    """Raised when SGLang takes no more requests at the moment."""

    status, code = 503, "engine_busy"


class EngineDraining(ApiError):
    """Raised when the server is shutting down."""

    status, code = 503, "draining"


def explain(error: ValidationError) -> str:
    """Return what is wrong with the first fields that do not fit a model."""
    parts = [
        f"{'.'.join(str(step) for step in problem['loc']) or 'body'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)[:3]
    ]
    return "; ".join(parts) + "."
