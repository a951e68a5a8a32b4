"""Asking an engine where AutoGen's interface is synchronous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from flashmoa.engine import EngineError

_TIMEOUT_SECONDS = 10.0


class SynchronousEngine:
    """An engine for whoever cannot await; each question waits for its answer."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Raises: EngineError: the engine could not be asked."""
        try:
            answer = httpx.request(
                "GET" if body is None else "POST",
                self._url + path,
                json=body,
                headers=self._headers,
                timeout=_TIMEOUT_SECONDS,
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}{path} could not be asked: {error}") from error
        return answer.json()
