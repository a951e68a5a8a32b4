"""Asking an engine where AutoGen's interface is synchronous."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import httpx
from autogen_ext.models.openai._openai_client import CreateParams

from flashmoa.engine import EngineError

_TIMEOUT_SECONDS = 10.0


class SynchronousEngine:
    """An engine for whoever cannot await; each question waits for its answer.

    Every method raises EngineError where the engine could not be asked.
    """

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def count_tokens(self, model: str, params: CreateParams) -> int:
        """Tokens of a chat completion's prompt."""
        body: dict[str, Any] = {"model": model, "messages": params.messages, "max_tokens": 1}
        if params.tools:
            body["tools"] = params.tools
        return int(self._ask("/tokenize", body)["count"])

    @cached_property
    def context_length(self) -> int:
        """Tokens the served model can hold."""
        return int(self._ask("/v1/models")["data"][0]["max_model_len"])

    def model_info(self, timeout_seconds: float) -> dict[str, Any]:
        """What SGLang's ``/model_info`` says."""
        return self._ask("/model_info", timeout_seconds=timeout_seconds)

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        try:
            answer = httpx.request(
                "GET" if body is None else "POST",
                self._url + path,
                json=body,
                headers=self._headers,
                timeout=timeout_seconds,
            )
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"{self._url}{path} could not be asked: {error}") from error
