"""Mixture-of-Agents, staircases and debates on self-hosted models."""

from flashmoa.moa.agents import Model
from flashmoa.moa.chunks import Schedule, Steps
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
    StaircaseResult,
    Vote,
)
from flashmoa.moa.staircase import Staircase
from flashmoa.moa.topology import Topology

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
    "StaircaseResult",
    "Steps",
    "Topology",
    "Vote",
]
