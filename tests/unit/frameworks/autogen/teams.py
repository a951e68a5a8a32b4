"""Clients and teams of AutoGen whose engine is none or a fake."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelFamily, ModelInfo

from flashmoa.autogen import FlashMoAChatCompletionClient as Client
from tests.unit.openai.fake_server import URL

# A client that is told what its model can do does not ask the engine.
INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, family=ModelFamily.UNKNOWN,
    structured_output=False,
)  # fmt: skip


def make_client(url: str = URL, **more: Any) -> Client:
    return Client(model="m", base_url=url, model_info=INFO, **more)


def make_team(client: Any, *names: str) -> RoundRobinGroupChat:
    """Return a team of assistants, by default one assistant. A run asks each once."""
    return team_of(*(AssistantAgent(name, client) for name in names or ("one",)))


def team_of(*members: Any) -> RoundRobinGroupChat:
    return RoundRobinGroupChat([*members], max_turns=len(members))
