"""Mixture-of-Agents: proposers answer, aggregators make one answer of theirs. And debates."""

from flashmoa.moa.answers import AgentAnswer, DebateResult, Decision, MixtureFailed, MixtureResult
from flashmoa.moa.debate import Debate
from flashmoa.moa.debate_prompt import DebatePrompt
from flashmoa.moa.early_exit import EarlyExit, Quality
from flashmoa.moa.embedding import Embedder, EngineEmbedder, LocalEmbedder
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.staircase import Staircase
from flashmoa.moa.steps import Schedule, Steps
from flashmoa.moa.topology import Topology
from flashmoa.moa.vote import Vote

__all__ = [
    "AgentAnswer",
    "AggregationPrompt",
    "Debate",
    "DebatePrompt",
    "DebateResult",
    "Decision",
    "EarlyExit",
    "Embedder",
    "EngineEmbedder",
    "LocalEmbedder",
    "MixtureFailed",
    "MixtureOfAgents",
    "MixtureResult",
    "Model",
    "Quality",
    "Schedule",
    "Staircase",
    "Steps",
    "Topology",
    "Vote",
]
