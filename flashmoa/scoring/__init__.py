"""Prefill as a service: what a model thinks of given answers, without any of them being decoded."""

from flashmoa.scoring.answers import PrefillUsage, Scores, Selection
from flashmoa.scoring.candidates import Candidate, CandidateRefused
from flashmoa.scoring.contexts import Context
from flashmoa.scoring.scorer import Scorer

__all__ = [
    "Candidate",
    "CandidateRefused",
    "Context",
    "PrefillUsage",
    "Scorer",
    "Scores",
    "Selection",
]
