"""What a client is made from: its configuration, and what its engine says of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import httpx
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai._model_info import get_info
from autogen_ext.models.openai._openai_client import CreateParams
from autogen_ext.models.openai.config import OpenAIClientConfigurationConfigModel

from flashmoa.engine import EngineError
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure

_TIMEOUT_SECONDS = 10.0
# Between the texts of user messages that are merged.
_BETWEEN = "\n\n"
# A client may be made before its engine is there.
_MODEL_INFO_SECONDS = 2.0


class FlashMoAClientConfigurationConfigModel(OpenAIClientConfigurationConfigModel):
    """The configuration ``dump_component`` writes; unlike the stock one it keeps extra_body."""

    extra_body: dict[str, Any] | None = None
    auto_link: bool = False
    merge_user_messages: bool = False
    on_failure: OnFailure = FailurePolicy()
    stream_ttl_seconds: float = 30.0


class SynchronousEngine:
    """An engine that is asked where AutoGen's interface is synchronous; each call blocks.

    Every method raises EngineError where the engine could not be asked.
    """

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def count_tokens(self, model: str, params: CreateParams) -> int:
        """Return the number of tokens of a chat completion's prompt."""
        body: dict[str, Any] = {"model": model, "messages": params.messages, "max_tokens": 1}
        if params.tools:
            body["tools"] = params.tools
        return int(self._ask("/tokenize", body)["count"])

    @cached_property
    def context_length(self) -> int:
        """Tokens that the served model can hold."""
        return int(self._ask("/v1/models")["data"][0]["max_model_len"])

    def model_info(self, timeout_seconds: float) -> dict[str, Any]:
        """Return what SGLang's ``/model_info`` says."""
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


def model_info(model: str | None, engine: SynchronousEngine) -> ModelInfo:
    """Return what AutoGen knows of a model of that name, else what its engine says of its own.

    Where the engine cannot be asked, that is what SGLang offers with any text model.
    """
    try:
        return get_info(model or "")
    except (KeyError, ValueError):
        pass
    try:
        served = engine.model_info(_MODEL_INFO_SECONDS)
    except EngineError:
        served = {}
    return ModelInfo(
        vision=bool(served.get("has_image_understanding", False)),
        # Without a parser, calls of tools would come as text.
        function_calling=bool(served.get("tool_call_parser", True)),
        json_output=True,
        family=ModelFamily.UNKNOWN,
        structured_output=True,
        multiple_system_messages=False,
    )


def merge_users(messages: Sequence[Any]) -> list[Any]:
    """Return OpenAI messages with each run of user messages of text made one.

    Names are lost, since there can be only one; ``add_name_prefixes`` keeps them in the text.
    """
    merged: list[Any] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is not None and _is_text_of_user(before) and _is_text_of_user(message):
            content = f"{before['content']}{_BETWEEN}{message['content']}"
            merged[-1] = {"role": "user", "content": content}
        else:
            merged.append(message)
    return merged


def _is_text_of_user(message: Any) -> bool:
    fields = cast("dict[str, Any]", message)
    return fields.get("role") == "user" and isinstance(fields.get("content"), str)
