"""Texts are compared as Faster-MoA's Algorithm 1 says, whatever forwards compute their states."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flashmoa_sglang.messages import CompareTexts, RequestMark
from flashmoa_sglang.scheduler import token_states
from flashmoa_sglang.scheduler.token_states import TokenStates
from hypothesis import given
from hypothesis import strategies as st

Array = np.ndarray[Any, Any]


def cosine_as_published(one: Array, other: Array) -> float:
    """Compute lines 1, 2, 8 and 9 as they are printed."""

    def correlation(states: Array) -> Array:
        gram = states.T @ states
        lengths = np.sqrt(np.diag(gram))
        return gram / np.outer(lengths, lengths)

    u, v = correlation(one), correlation(other)
    return float(np.trace(u.T @ v) / (np.linalg.norm(u) * np.linalg.norm(v)))


def request(rid: str, *, compared: bool = True) -> Any:
    params = RequestMark(compared=compared).to_custom_params()
    return SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(custom_params=params))


def forward(texts: TokenStates, batch: list[tuple[Any, Array]], padding: int = 0) -> None:
    """Pass the states of some requests' next tokens to the pooler's hook."""
    reqs, rows = zip(*batch, strict=True)
    states = np.concatenate([*rows, np.full((padding, rows[0].shape[1]), 7.0)])
    forward_batch = SimpleNamespace(extend_seq_lens_cpu=[*map(len, rows)])
    # SGLang's forwards run in this mode, and its handlers of messages do not.
    with texts.collecting(reqs), torch.inference_mode():
        token_states.pool(None, None, torch.tensor(states, dtype=torch.float32), forward_batch)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[Array], list[list[int]]]:
    """Return the states of texts, and the places where a scheduler cuts each text."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    scale = 10.0 ** draw(st.integers(-3, 4))
    states = [dice.normal(size=(length, width)) * scale for length in lengths]
    cuts = [draw(st.lists(st.integers(1, length - 1), unique=True)) if length > 1 else []
            for length in lengths]  # fmt: skip
    return states, [[0, *sorted(own), length] for own, length in zip(cuts, lengths, strict=True)]


@given(cut_texts(), st.integers(0, 3))
def test_similarities_equal_the_papers_formula(
    made: tuple[list[Array], list[list[int]]], padding: int
) -> None:
    states, cuts = made
    texts = TokenStates()
    reqs = [request(f"text {index}") for index in range(len(states))]
    for req in reqs:
        texts.expect(req)
    pieces = [[rows[a:b] for a, b in pairwise(own)] for rows, own in zip(states, cuts, strict=True)]
    stranger = request("stranger", compared=False), np.ones((2, states[0].shape[1]))
    for step in range(max(map(len, pieces))):
        # The next piece of every text that has one.
        own = [(req, cut[step]) for req, cut in zip(reqs, pieces, strict=True) if step < len(cut)]
        forward(texts, [stranger, *own], padding)
    found = texts.compare(CompareTexts(3, tuple(req.rid for req in reqs)))
    assert found.query == 3 and found.tokens == tuple(map(len, states))
    expected = [[cosine_as_published(one, other) for other in states] for one in states]
    assert np.allclose(found.rows, expected, atol=1e-4)
    assert all(0 <= value <= 1 for row in found.rows for value in row)
    assert not texts.compare(CompareTexts(4, (reqs[0].rid,))).rows  # It is forgotten.


def test_texts_without_states_have_no_similarities() -> None:
    texts = TokenStates()
    for req in (one := request("one"), other := request("other"), request("third")):
        texts.expect(req)
    assert one.extra_key == "one" != other.extra_key
    forward(texts, [(one, np.ones((2, 3)))])
    # A rank that has a part of the states takes none.
    with texts.collecting([other]):
        token_states.pool(None, None, torch.ones(2, 3), SimpleNamespace(extend_seq_lens_cpu=[4]))
    found = texts.compare(CompareTexts(1, ("one", "other", "unknown")))
    assert found.tokens == (2, 0, 0) and found.rows == []
    # A text that nobody waits for any more is forgotten before its states come.
    assert texts.compare(CompareTexts(None, ("third",))).query is None
    forward(texts, [(request("third"), np.ones((2, 3)))])
    assert texts.compare(CompareTexts(2, ("third",))).tokens == (0,)


def test_zeros_are_similar_to_nothing() -> None:
    grams = [torch.zeros(3, 3), torch.eye(3)]
    assert np.allclose(token_states.frobenius_cosines(grams), [[0, 0], [0, 1]])
