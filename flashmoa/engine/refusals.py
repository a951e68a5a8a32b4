"""What went wrong with a request, as one of our exceptions."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx

from flashmoa.engine import errors


def not_an_engine(url: str, path: str) -> str:
    return (
        f"{url}{path} answered something else than an engine does. Is the URL right? "
        f"`flashmoa doctor --engine {url}` looks closer."
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
    try:
        problem = response.json()["error"]
        message, code = str(problem["message"]), str(problem["code"])
    except (ValueError, KeyError, TypeError):
        if response.status_code in (404, 405):
            return errors.PluginMissing(
                f"{url} does not have {response.request.url.path}: it runs without the "
                "flashmoa-sglang plugin, or is no engine (`flashmoa doctor --engine "
                f"{url}` tells)"
            )
        if response.status_code in (401, 403):
            return errors.RequestRefused(
                f"{url} takes another API key, or needs one; give it as api_key",
                response.status_code,
                "unauthorized",
            )
        message, code = _message(response), "error"
    kind = errors.BY_STATUS.get(response.status_code, errors.RequestRefused)
    if kind is errors.StreamUnknown and code != "unknown_stream":
        return errors.PluginMissing(f"{url} has no prompt streams: {message}")
    return kind(message, response.status_code, code)


def aborted(reason: dict[str, Any]) -> errors.RequestRefused:
    """SGLang took a request and ended it before it ran: a full queue, a server that shuts down.

    ``reason``: its ``finish_reason``.
    """
    status = int(reason.get("status_code") or 503)
    kind = errors.BY_STATUS.get(status, errors.RequestRefused)
    return kind(str(reason.get("message") or reason["type"]), status, "aborted")


def _message(response: httpx.Response) -> str:
    """SGLang says what is wrong as ``{"error": {"message"}}``, as ``{"message"}``, or as it is."""
    try:
        said: Any = response.json()
        return str(said.get("error", said)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return response.text[:500]
