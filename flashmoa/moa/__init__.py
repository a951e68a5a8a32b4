"""Mixture-of-Agents, staircases, debates and councils on self-hosted models."""

from flashmoa.moa.council import Council
from flashmoa.moa.early_exit import Decision, EarlyExit, Embedder, EngineEmbedder, Quality
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.prompts import AggregationPrompt, ChairPrompt, DebatePrompt, ReviewPrompt
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
    "ChairPrompt",
    "Council",
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
    "ReviewPrompt",
    "Spending",
    "Staircase",
    "StaircaseRound",
    "Steps",
    "Substitution",
    "Topology",
]
