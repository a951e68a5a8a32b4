"""Errors of the plugin's routes.

Clients recognise an error by its ``code``. In ``flashmoa.errors``, most errors have the same name
as here. Three differ: ``engine_busy`` is ``EngineDraining``, too, because in both cases the client
should use another engine; ``decodes_only`` is ``PluginMissing``, and ``engine_failed``
``RequestRefused``.
"""

from __future__ import annotations

import re
import reprlib
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


class MalformedRequest(ApiError, ValueError):
    """Raised for an invalid body or header. SGLang's own routes answer a ValueError with 400."""

    status, code = 400, "malformed"


class CandidateRefused(ApiError):
    """Raised when an answer cannot be scored after its prompt; the message says what to do."""

    status, code = 400, "candidate_refused"


class StreamUnknown(ApiError):
    status, code = 404, "unknown_stream"


class DecodesOnly(ApiError):
    """Raised when a decode engine of a PD pair is asked to prefill."""

    status, code = 404, "decodes_only"


class StreamOutOfOrder(ApiError):
    """Raised when an append skips ahead or differs from its repetition, or the stream has ended."""

    status, code = 409, "out_of_order"


class StreamGone(ApiError):
    """Raised when the stream expired, was deleted or has been used."""

    status, code = 410, "stream_gone"


class PromptTooLarge(ApiError):
    """Raised when a prompt is over the context length or the buffer limit."""

    status, code = 413, "too_large"


class TooManyStreams(ApiError):
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


_MAX_SHOWN_CHARACTERS = 40
_SHORT = reprlib.Repr()
_SHORT.maxlevel = _SHORT.maxdict = _SHORT.maxlist = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _MAX_SHOWN_CHARACTERS


def shown(value: object) -> str:
    """Return a client's value for a message, cut short however long or deeply nested it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[: _MAX_SHOWN_CHARACTERS - 3]}..."


# In the place of a problem, pydantic names fields and also the types that it has tried.
_FIELD = re.compile(r"(?!(?:str|int|float|bool|bytes)$)[a-z_0-9]+")
_PYTHONS_OBJECT = re.compile(r"dictionary( or instance of \w+)?")


def explain(error: ValidationError) -> str:
    """Name the first fields that do not fit a model, and the problems."""
    found = error.errors(include_url=False, include_input=False)
    parts = (f"{_place(one['loc'])}: {_PYTHONS_OBJECT.sub('object', one['msg'])}" for one in found)
    return "; ".join([*dict.fromkeys(parts)][:3]) + "."


def _place(steps: tuple[int | str, ...]) -> str:
    # The first step may be a field that a client has made up.
    rest = [str(step) for step in steps[1:] if isinstance(step, int) or _FIELD.fullmatch(step)]
    first = [str(step)[:_MAX_SHOWN_CHARACTERS] for step in steps[:1]]
    return ".".join([*first, *rest]) or "body"
