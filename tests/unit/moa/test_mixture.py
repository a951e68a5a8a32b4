"""Test the arguments of a mixture."""

from __future__ import annotations

import pytest

from flashmoa import EngineClient
from flashmoa.moa import MixtureOfAgents, Model


def test_layers_must_match_the_topology() -> None:
    model = Model(EngineClient("http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"\(2, 1\) models for a topology of \(3, 1\)"):
        MixtureOfAgents([[model, model], [model]], "3-1")
