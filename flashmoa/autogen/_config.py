"""What a client is made from: its configuration, and what its model can do."""

from __future__ import annotations

from typing import Any

from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai._model_info import get_info
from autogen_ext.models.openai.config import OpenAIClientConfigurationConfigModel


class FlashMoAClientConfigurationConfigModel(OpenAIClientConfigurationConfigModel):
    """The configuration ``dump_component`` writes; unlike the stock one it keeps extra_body."""

    extra_body: dict[str, Any] | None = None
    auto_link: bool = False
    merge_user_messages: bool = False


def default_model_info() -> ModelInfo:
    """What SGLang offers with any text model."""
    return ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        family=ModelFamily.UNKNOWN,
        structured_output=True,
        multiple_system_messages=False,
    )


def model_info(model: str | None) -> ModelInfo:
    """What AutoGen knows of a model of that name, else what SGLang offers with any."""
    try:
        return get_info(model or "")
    except (KeyError, ValueError):
        return default_model_info()
