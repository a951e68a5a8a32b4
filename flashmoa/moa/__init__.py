"""Mixture-of-Agents, staircases and debates on self-hosted models."""

from flashmoa.moa.early_exit import Decision, EarlyExit, Embedder, EngineEmbedder, Quality
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.prompts import AggregationPrompt, DebatePrompt
from flashmoa.moa.results import (
    AgentAnswer,
    MixtureFailed,
    Result,
    Spending,
    StaircaseRound,
    Substitution,
)
from flashmoa.moa.settings import Limits, Quorum, Steps
from flashmoa.moa.systems import Debate, MixtureOfAgents, Staircase
from flashmoa.moa.topology import Topology

__all__ = [
    "AgentAnswer",
    "AggregationPrompt",
    "Debate",
    "DebatePrompt",
    "Decision",
    "EarlyExit",
    "Embedder",
    "EngineEmbedder",
    "Fallback",
    "Limits",
    "MixtureFailed",
    "MixtureOfAgents",
    "Model",
    "Quality",
    "Quorum",
    "Result",
    "Spending",
    "Staircase",
    "StaircaseRound",
    "Steps",
    "Substitution",
    "Topology",
]
