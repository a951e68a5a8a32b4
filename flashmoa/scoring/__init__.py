"""Compute how likely a model finds given answers, from prefills alone: :class:`Scorer`."""

from flashmoa.scoring.contexts import Candidate, CandidateRefused, Context
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import PrefillUsage, RankedDocument, Ranking, Scores, Selection

__all__ = [
    "Candidate",
    "CandidateRefused",
    "Context",
    "PrefillUsage",
    "RankedDocument",
    "Ranking",
    "Scorer",
    "Scores",
    "Selection",
]
