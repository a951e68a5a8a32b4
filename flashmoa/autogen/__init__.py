"""Use FlashMoA with AutoGen: a drop-in model client, and ``link(team)``."""

from importlib import import_module

try:
    for _module in ("autogen_agentchat.teams", "autogen_ext.models.openai"):
        import_module(_module)
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"flashmoa.autogen needs AutoGen ({error}): pip install 'flashmoa[autogen]'",
        name=error.name,
    ) from error

from flashmoa.autogen._calls import EngineUsage
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._team_link import TeamLink, link
from flashmoa.autogen._team_members import SELECTOR_PROMPT

__all__ = [
    "SELECTOR_PROMPT",
    "EngineUsage",
    "FlashMoAChatCompletionClient",
    "TeamLink",
    "link",
]
