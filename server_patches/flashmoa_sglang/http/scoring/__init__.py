"""Scores given answers by prefills alone: ``/v1/score``, ``/v1/rerank`` and ``/v1/classify``."""
