"""What a client is made from: its configuration, and what its model can do."""

from __future__ import annotations

from typing import Any

from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai._model_info import get_info
from autogen_ext.models.openai.config import OpenAIClientConfigurationConfigModel

from flashmoa.autogen._synchronous import SynchronousEngine
from flashmoa.engine import EngineError
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure

# A client may be made before its engine is there.
_PATIENCE_SECONDS = 2.0


class FlashMoAClientConfigurationConfigModel(OpenAIClientConfigurationConfigModel):
    """The configuration ``dump_component`` writes; unlike the stock one it keeps extra_body."""

    extra_body: dict[str, Any] | None = None
    auto_link: bool = False
    merge_user_messages: bool = False
    on_failure: OnFailure = FailurePolicy()
    stream_ttl_seconds: float = 30.0


def model_info(model: str | None, engine: SynchronousEngine) -> ModelInfo:
    """What AutoGen knows of a model of that name, else what its engine says of the one it has.

    Where the engine cannot be asked, what SGLang offers with any text model.
    """
    try:
        return get_info(model or "")
    except (KeyError, ValueError):
        pass
    try:
        served = engine.model_info(_PATIENCE_SECONDS)
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
