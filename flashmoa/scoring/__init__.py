"""Prefill as a service: how likely a model finds given answers, with nothing decoded."""

from flashmoa.scoring.candidates import Candidate, CandidateRefused, Context
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import PrefillUsage, Scores, Selection

__all__ = [
    "Candidate",
    "CandidateRefused",
    "Context",
    "PrefillUsage",
    "Scorer",
    "Scores",
    "Selection",
]
