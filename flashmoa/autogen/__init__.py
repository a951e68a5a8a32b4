"""AutoGen: a drop-in model client, and one line that links a team."""

from flashmoa.autogen._calls import EngineUsage
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._config import FlashMoAClientConfigurationConfigModel
from flashmoa.autogen._selector import SELECTOR_PROMPT
from flashmoa.autogen._team import TeamLink, link, watch

__all__ = [
    "SELECTOR_PROMPT",
    "EngineUsage",
    "FlashMoAChatCompletionClient",
    "FlashMoAClientConfigurationConfigModel",
    "TeamLink",
    "link",
    "watch",
]
