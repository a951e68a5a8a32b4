"""The sampler can always sample a token, whatever bans tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.scheduler import logits
from hypothesis import given
from hypothesis import strategies as st

inf, nan = float("inf"), float("nan")
numbers = st.sampled_from([inf, -inf, nan, 1e35, -1e35, 0.0, 20.0, -3.0])


def info(**fields: Any) -> Any:
    names = "grammars logit_bias acc_additive_penalties acc_scaling_penalties"
    none = dict.fromkeys(names.split())
    orchestrator = SimpleNamespace(is_required=fields.pop("is_required", False))
    return SimpleNamespace(**{**none, "penalizer_orchestrator": orchestrator, **fields})


@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4))
def test_any_row_can_be_sampled(rows: list[list[float]]) -> None:
    torch = pytest.importorskip("torch")
    kept = logits.keep_finite(lambda _, x, __: x, None, torch.tensor(rows), info(grammars=["a"]))
    for row, now in zip(rows, kept, strict=True):
        probabilities = torch.softmax(now / 1e-6, dim=-1)
        assert probabilities.isfinite().all() and probabilities.sum() > 0.9, (row, now)
        if all(one == one and one <= 1e30 for one in row) and max(row) >= -1e30:
            assert now.tolist() == torch.tensor(row).tolist()


@pytest.mark.parametrize(
    ("fields", "is_looked_at"),
    [
        ({}, False),
        ({"is_required": True}, True),
        ({"grammars": []}, False),
        ({"grammars": [None, "a"]}, True),
        ({"logit_bias": 1}, True),
        ({"acc_additive_penalties": 1}, True),
        ({"acc_scaling_penalties": 1}, True),
        ({"penalizer_orchestrator": None}, False),
    ],
    ids=str,
)
def test_only_changed_logits_are_bounded(fields: dict[str, Any], is_looked_at: bool) -> None:
    torch = pytest.importorskip("torch")
    given = torch.full((1, 3), -inf)
    kept = logits.keep_finite(lambda _, x, __: x, None, given, info(**fields))
    assert (kept is not given) == is_looked_at
