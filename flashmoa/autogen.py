"""Use FlashMoA with AutoGen: a drop-in model client, and ``link(team)``."""

from importlib import import_module

from flashmoa._extras import from_extra

with from_extra("autogen", __name__, "AutoGen"):
    for _module in ("autogen_agentchat.teams", "autogen_ext.models.openai"):
        import_module(_module)

from flashmoa.frameworks.autogen.calls import EngineUsage
from flashmoa.frameworks.autogen.client import FlashMoAChatCompletionClient
from flashmoa.frameworks.autogen.team_link import TeamLink, link
from flashmoa.frameworks.autogen.team_members import SELECTOR_PROMPT

__all__ = [
    "SELECTOR_PROMPT",
    "EngineUsage",
    "FlashMoAChatCompletionClient",
    "TeamLink",
    "link",
]
