"""Turn what went wrong with a request into one of our exceptions."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx

from flashmoa import errors

# What an engine's ``code`` says is wrong; its other codes (``engine_failed``) have no class.
_BY_CODE: dict[str, type[errors.RequestRefused]] = {
    "malformed": errors.MalformedRequest,
    "unknown_stream": errors.StreamUnknown,
    "out_of_order": errors.StreamOutOfOrder,
    "stream_gone": errors.StreamGone,
    "too_large": errors.PromptTooLarge,
    "too_many_streams": errors.TooManyStreams,
    "engine_busy": errors.EngineDraining,
    "draining": errors.EngineDraining,
}
# SGLang's own refusals, and a router's, carry no code but their status. Only these statuses mean
# the same there; a 429 of a proxy, for one, is not about prompt streams.
_BY_STATUS: dict[int, type[errors.RequestRefused]] = {
    400: errors.MalformedRequest,
    413: errors.PromptTooLarge,
    503: errors.EngineDraining,
}


def not_an_engine(url: str, path: str) -> str:
    """Return the message for an answer that is not what the API promises."""
    return (
        f"the answer of {url}{path} is not an engine's. Is the URL right? "
        f"`flashmoa doctor --engine {url}` checks it."
    )


class translated:
    """Turn httpx's exceptions into ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, httpx.TimeoutException):
            raise errors.EngineTimeout(f"{self._url} did not answer in time") from error
        if isinstance(error, httpx.TransportError):
            reason = str(error) or type(error).__name__
            raise errors.EngineUnreachable(
                f"{self._url} cannot be reached ({reason}). Is the engine running? "
                "`flashmoa serve` starts one."
            ) from error


def refusal(response: httpx.Response, url: str) -> errors.EngineError:
    """Return the exception that an answer with an error stands for.

    The API's stable ``code`` in the body decides; the HTTP status only where there is none.
    """
    status = response.status_code
    code, message = _code_and_message(response)
    if code in _BY_CODE:
        return _BY_CODE[code](message, status, code)
    if code is None and status in (404, 405):
        return errors.PluginMissing(
            f"{url} does not have {response.request.url.path}: it runs without the "
            f"flashmoa-sglang plugin, or it is not an engine. `flashmoa doctor --engine {url}` "
            "tells which."
        )
    if code is None and status in (401, 403):
        return errors.RequestRefused(
            f"{url} refuses this API key, or needs one; give it as api_key", status, "unauthorized"
        )
    if status == 404:  # ``decodes_only``, or another server's code.
        return errors.PluginMissing(f"{url} has no prompt streams: {message}")
    return _by_status(status)(message, status, code or "error")


def aborted(reason: dict[str, Any]) -> errors.RequestRefused:
    """Return the exception for a request that SGLang took and ended before it ran.

    That happens when its queue is full or its server shuts down.

    Args:
        reason: the request's ``finish_reason``.
    """
    status = int(reason.get("status_code") or 503)
    return _by_status(status)(str(reason.get("message") or reason["type"]), status, "aborted")


def _by_status(status: int) -> type[errors.RequestRefused]:
    return _BY_STATUS.get(status, errors.RequestRefused)


def _code_and_message(response: httpx.Response) -> tuple[str | None, str]:
    """Return an error's code, ``None`` without one, and its message.

    SGLang writes it as ``{"error": {"message"}}``, as ``{"message"}``, or as plain text.
    """
    try:
        body: Any = response.json()
        problem: Any = body.get("error", body)
        code, message = problem.get("code"), str(problem["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, response.text[:500]
    return (None if code is None or problem is body else str(code)), message
