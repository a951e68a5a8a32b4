"""Read engines' answers, and turn failures of requests into FlashMoA's exceptions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from flashmoa import errors

Answer = TypeVar("Answer", bound=BaseModel)

# The exceptions for an engine's ``code``. Other codes (``engine_failed``) become RequestRefused.
_BY_CODE: dict[str, type[errors.RequestRefused]] = {
    "malformed": errors.MalformedRequest,
    "candidate_refused": errors.MalformedRequest,
    "unknown_stream": errors.StreamUnknown,
    "out_of_order": errors.StreamOutOfOrder,
    "stream_gone": errors.StreamGone,
    "too_large": errors.PromptTooLarge,
    "too_many_streams": errors.TooManyStreams,
    "engine_busy": errors.EngineDraining,
    "draining": errors.EngineDraining,
}


def bad_answer(url: str, path: str) -> errors.BadAnswer:
    """Return the exception for an answer that violates the API."""
    return errors.BadAnswer(
        f"the answer of {url}{path} is not an engine's. Is the URL right? "
        f"`flashmoa doctor --engine {url}` checks it."
    )


@contextmanager
def translate_errors(url: str) -> Generator[None]:
    """Raise EngineTimeout, EngineUnreachable and BadAnswer in place of httpx's exceptions."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise errors.EngineTimeout(
            f"{url} did not answer in time; see the engine's log, or give the client a longer "
            "timeout"
        ) from error
    except httpx.DecodingError as error:
        raise bad_answer(url, error.request.url.path) from error
    except httpx.RequestError as error:
        reason = str(error) or type(error).__name__
        raise errors.EngineUnreachable(
            f"{url} cannot be reached ({reason}). Is the engine running? "
            "`flashmoa serve` starts one."
        ) from error


def read_answer(response: httpx.Response, url: str, answer: type[Answer]) -> Answer:
    """Return an engine's answer as a value of the type ``answer``.

    Raises: EngineError for an error, and for an answer of another form.
    """
    if response.is_error:
        raise make_refusal(response, url)
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        raise bad_answer(url, response.request.url.path) from error


def make_refusal(response: httpx.Response, url: str) -> errors.EngineError:
    """Return the exception for an answer with an error status.

    The API's stable ``code`` in the body decides. Without a code, the HTTP status does.
    """
    status = response.status_code
    code, message = _code_and_message(response)
    if code in _BY_CODE:
        return _BY_CODE[code](message, status, code)
    if code == "model_not_found":
        return errors.RequestRefused(
            f"{url} does not serve this model ({message}); give one of the names that "
            f"{url}/v1/models lists",
            status,
            code,
        )
    if code in (None, "unknown_url") and status in (404, 405):
        return errors.PluginMissing(
            f"{url} does not have {response.request.url.path}: it runs without the "
            f"flashmoa-sglang plugin, or it is not an engine. `flashmoa doctor --engine {url}` "
            "tells which."
        )
    if code is None and status in (401, 403):
        return errors.RequestRefused(
            f"{url} refuses this API key, or needs one; give it as api_key", status, "unauthorized"
        )
    if code == "decodes_only" or status == 404:
        return errors.PluginMissing(f"{url} has no prompt streams: {message}")
    return _by_status(status)(message, status, code or "error")


def make_abort_refusal(reason: dict[str, Any]) -> errors.RequestRefused:
    """Return the exception for a request that SGLang accepted and aborted before it ran.

    SGLang does that if its queue is full, or if it shuts down. ``reason`` is the finish reason.
    """
    status = int(reason.get("status_code") or 503)
    return _by_status(status)(str(reason.get("message") or reason["type"]), status, "aborted")


def _by_status(status: int) -> type[errors.RequestRefused]:
    """Return the exception for a refusal without a code, as SGLang and routers send it.

    Other statuses may mean something else: a proxy's 429 is not about prompt streams.
    """
    kinds: dict[int, type[errors.RequestRefused]] = {
        400: errors.MalformedRequest,
        413: errors.PromptTooLarge,
        503: errors.EngineDraining,
    }
    return kinds.get(status, errors.RequestRefused)


def _code_and_message(response: httpx.Response) -> tuple[str | None, str]:
    """Return an error's code, ``None`` if it has none, and its message.

    SGLang's errors are ``{"error": {"message"}}``, ``{"message"}``, or plain text. For an unknown
    model, OpenAI and smg have the code ``model_not_found``, and vLLM names the parameter.
    """
    try:
        body: Any = response.json()
        problem: Any = body.get("error", body)
        code, message = problem.get("code"), str(problem["message"])
        if response.status_code == 404 and problem.get("param") == "model":
            code = "model_not_found"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # A proxy's page has many lines and does not name the proxy.
        text = " ".join(response.text.split())[:200]
        return None, f"{response.request.url} answers with status {response.status_code}: {text}"
    return (None if code is None or problem is body else str(code)), message
