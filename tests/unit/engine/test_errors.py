"""Test that engines' refusals become exceptions, and that all exceptions form one tree."""

import importlib
import pkgutil
from typing import Any

import httpx
import pytest
from flashmoa_sglang.http.errors import ApiError

import flashmoa
from flashmoa import errors
from flashmoa.engine.refusals import make_refusal

URL = "http://engine"
# Classes on the client for server errors without a class of the same name there.
CLIENT_CLASSES = {
    "CandidateRefused": errors.MalformedRequest,
    "DecodesOnly": errors.PluginMissing,
    "EngineBusy": errors.EngineDraining,
    "EngineFailed": errors.RequestRefused,
}


def refused(status: int, body: Any) -> errors.EngineError:
    request = httpx.Request("POST", f"{URL}/prompt_streams")
    return make_refusal(httpx.Response(status, json=body, request=request), URL)


@pytest.mark.parametrize("kind", ApiError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_server_errors_keep_their_names(kind: type[ApiError]) -> None:
    for status in (kind.status, 418):
        # The code decides: a proxy may change the status, and two errors may share one.
        error = refused(status, kind("Read this.").body())
        expected = CLIENT_CLASSES.get(kind.__name__)
        assert type(error) is expected or type(error).__name__ == kind.__name__
        assert "Read this." in str(error)
        if isinstance(error, errors.RequestRefused):
            assert (error.status, error.code) == (status, kind.code)


@pytest.mark.parametrize(
    ("status", "problem", "kind"),
    [
        # SGLang's own refusals have their status as their code.
        (400, {"code": 400}, errors.MalformedRequest),
        (413, {"code": 413}, errors.PromptTooLarge),
        (503, {"code": 503}, errors.EngineDraining),
        *((status, {"code": "rate_limit"}, errors.RequestRefused) for status in (409, 410, 429)),
        (404, {"code": "model_not_found"}, errors.RequestRefused),
        (404, {"code": 404, "param": "model"}, errors.RequestRefused),
        *((404, {"code": code}, errors.PluginMissing) for code in (None, "unknown_url", 404)),
    ],
)
def test_other_codes_and_the_status_decide(
    status: int, problem: dict[str, Any], kind: type[errors.EngineError]
) -> None:
    error = refused(status, {"error": {"message": "No.", **problem}})
    assert type(error) is kind
    if isinstance(error, errors.RequestRefused):
        assert "No." in str(error)
        if status == 404:
            assert error.code == "model_not_found" and f"{URL}/v1/models" in str(error)
        elif problem["code"] == status:
            flat = refused(status, {"message": "No.", **problem})
            assert type(flat) is kind and str(flat) == str(error) == "No."
        else:
            assert error.code == problem["code"]


def test_a_page_becomes_a_line_with_its_url() -> None:
    request = httpx.Request("POST", f"{URL}/prompt_streams")
    page = "<html>\n  <h1>Bad gateway</h1>\n" + "<!-- filler -->\n" * 100
    error = make_refusal(httpx.Response(502, text=page, request=request), URL)
    assert type(error) is errors.RequestRefused
    expected = f"{URL}/prompt_streams answers with status 502: <html> <h1>Bad gateway</h1>"
    assert str(error).startswith(expected)
    assert len(str(error)) < 300 and "\n" not in str(error)


def exceptions() -> set[type[BaseException]]:
    """Return every exception of every module that can be imported here."""
    found: set[type[BaseException]] = set()
    for module in pkgutil.walk_packages(flashmoa.__path__, "flashmoa.", onerror=lambda _: None):
        try:
            values = vars(importlib.import_module(module.name)).values()
        except ImportError:  # The module belongs to an extra that is not installed.
            continue
        found |= {
            value
            for value in values
            if isinstance(value, type)
            and issubclass(value, BaseException)
            and value.__module__.startswith("flashmoa.")
        }
    return found


# It ends a dry run once its request is captured. It reaches no user.
INTERNAL = {"RequestCaptured"}


def test_every_exception_is_a_flashmoa_error() -> None:
    found = {kind for kind in exceptions() if kind.__name__ not in INTERNAL}
    assert {"UpstreamCancelled", "EngineLost", "BadLine"} <= {kind.__name__ for kind in found}
    assert not [kind for kind in found if not issubclass(kind, errors.FlashMoAError)]
    assert not [kind for kind in found if not (kind.__doc__ or "").startswith("Raised when")]
