"""Mixture-of-Agents, staircases and debates on self-hosted models."""

from flashmoa.moa.agents import Model
from flashmoa.moa.debate import Debate
from flashmoa.moa.early_exit import EarlyExit, Embedder, EngineEmbedder, Quality
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
    Quorum,
    Steps,
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
    "MixtureFailed",
    "MixtureOfAgents",
    "MixtureResult",
    "Model",
    "Quality",
    "Quorum",
    "Spending",
    "Staircase",
    "StaircaseResult",
    "Steps",
    "Substitution",
    "Topology",
    "Vote",
]
