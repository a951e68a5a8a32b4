"""Test the figures of ``flashmoa bench staircases``."""

from argparse import Namespace

import pytest
from flashmoa_bench.moa.staircases import (
    StaircaseAnswer,
    StaircaseWay,
    Written,
    aggregator_prefill_seconds,
    first_token_by_formula,
    summarise,
)

from flashmoa.errors import EngineError
from flashmoa.moa import AgentAnswer, Steps

# A token takes 0.1 s and 0.2 s.
PROPOSERS = [Written(1.0, 2.0, 11), Written(0.5, 2.3, 10)]


@pytest.mark.parametrize(
    ("chunk", "seconds"),
    [(0, 2.3 + 0.25), (1, 1.0 + 0.25), (6, 1.5 + 0.25), (10, 2.3 + 0.25), (99, 2.3 + 0.25)],
)
def test_the_formula_adds_the_slowest_chunk_and_a_prefill(chunk: int, seconds: float) -> None:
    assert first_token_by_formula(PROPOSERS, chunk, 0.25) == pytest.approx(seconds)
    assert first_token_by_formula([Written(1.0, 1.0, 1)], chunk, 0.0) == 1.0


def test_times_of_a_proposer_count_from_the_first_request() -> None:
    agent = AgentAnswer(0, 0, "m", text="ab", started=100.5, first_token=101.0, finished=103.0)
    assert Written.of(agent, 100.0) == Written(1.0, 3.0, 2)


def test_the_aggregators_prefill_takes_the_time_of_its_gpu() -> None:
    options = Namespace(device=None, device_tp=1, device_weights="bfloat16")
    assert aggregator_prefill_seconds(options) is None
    options.device, options.device_model = "h200_sxm", ["Qwen/Qwen3-8B", "large=Qwen/Qwen3-32B"]
    large = aggregator_prefill_seconds(options)
    options.device_model = ["Qwen/Qwen3-8B"]
    small = aggregator_prefill_seconds(options)
    assert large is not None and small is not None
    assert 2 * small(1000) < large(1000) < large(4000) < 1.0
    options.device = "abacus"
    with pytest.raises(EngineError, match="no times of Qwen/Qwen3-8B on abacus"):
        aggregator_prefill_seconds(options)


def test_ways_are_compared_with_whole_answers() -> None:
    whole, stairs = StaircaseWay("mixture", 3), StaircaseWay("mixture", 3, "prefix-cached", 8)
    assert stairs.base == whole.name == "mixture of 3: whole answers"
    assert stairs.name == "mixture of 3: prefix-cached, 8" and stairs.steps == Steps(8)
    answers = [
        StaircaseAnswer(whole.name, 1, 4.0, 5.0, 20, 1, 0.0, 4.5),
        StaircaseAnswer(stairs.name, 1, 1.0, 4.0, 24, 3, 0.0, 1.5),
        StaircaseAnswer(stairs.name, 2, 3.0, 4.0, 24, 3, 0.5, None),
    ]
    base, row = summarise([whole, stairs], answers)
    assert (base.relative_first, base.relative_rate, base.formula) == (1.0, 1.0, 4.5)
    assert (row.first_token, row.relative_first, row.formula) == (2.0, 0.25, 1.5)
    assert row.relative_rate == pytest.approx(6 / 4) and row.overran == 1
