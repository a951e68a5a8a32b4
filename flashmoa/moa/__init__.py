"""Mixture-of-Agents, staircases and debates on self-hosted models."""

from flashmoa.moa.agents import Model
from flashmoa.moa.debate import Debate
from flashmoa.moa.early_exit import EarlyExit, Quality
from flashmoa.moa.embedding import Embedder, EngineEmbedder, LocalEmbedder
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.prompts import AggregationPrompt, DebatePrompt
from flashmoa.moa.results import (
    AgentAnswer,
    DebateResult,
    Decision,
    MixtureFailed,
    MixtureResult,
    Spending,
    StaircaseResult,
    Substitution,
    Vote,
)
from flashmoa.moa.settings import (
    Budget,
    Fallback,
    Limits,
    Price,
    Quorum,
    Schedule,
    Speed,
    Steps,
    Thinking,
)
from flashmoa.moa.staircase import Staircase
from flashmoa.moa.topology import Topology

__all__ = [
    "AgentAnswer",
    "AggregationPrompt",
    "Budget",
    "Debate",
    "DebatePrompt",
    "DebateResult",
    "Decision",
    "EarlyExit",
    "Embedder",
    "EngineEmbedder",
    "Fallback",
    "Limits",
    "LocalEmbedder",
    "MixtureFailed",
    "MixtureOfAgents",
    "MixtureResult",
    "Model",
    "Price",
    "Quality",
    "Quorum",
    "Schedule",
    "Speed",
    "Spending",
    "Staircase",
    "StaircaseResult",
    "Steps",
    "Substitution",
    "Thinking",
    "Topology",
    "Vote",
]
