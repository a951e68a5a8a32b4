"""Test how prompt tokens are counted from what engines report and omit."""

from __future__ import annotations

import pytest
from flashmoa_bench.moa.rig import PromptListener, PromptTokens, group_by_layer

from flashmoa.engine import PromptUsage
from flashmoa.engine.wire import StreamUse
from flashmoa.observe import CallFinished

STREAM = StreamUse(id="s", status="hit")


@pytest.mark.parametrize(
    ("usage", "reports", "expected"),
    [
        # Stock SGLang does not report cached tokens, or omits their number if it is 0.
        ({}, False, PromptTokens(100, 0, None, None)),
        ({}, True, PromptTokens(100, 0, 0, 100)),
        ({"cached_tokens": 40}, True, PromptTokens(100, 0, 40, 60)),
        # The plugin always reports them for requests with a stream.
        (
            {"cached_tokens": 90, "streamed_tokens": 70, "prompt_stream": STREAM},
            False,
            PromptTokens(100, 70, 20, 10),
        ),
        ({"prompt_stream": STREAM}, True, PromptTokens(100, None, None, None)),
    ],
)
def test_tokens_that_an_engine_does_not_report_are_unknown(
    usage: dict[str, object], reports: bool, expected: PromptTokens
) -> None:
    told = PromptUsage.model_validate({"prompt_tokens": 100, "completion_tokens": 1, **usage})
    assert PromptTokens.from_usage(told, reports) == expected


def test_a_total_is_unknown_if_one_part_is() -> None:
    known, unknown = PromptTokens(10, 1, 2, 7), PromptTokens(20, 3, None, None)
    assert PromptTokens.total([known, known]) == PromptTokens(20, 2, 4, 14)
    assert PromptTokens.total([known, unknown]) == PromptTokens(30, 4, None, None)


def test_tokens_are_counted_by_agent_with_all_rounds_of_a_staircase() -> None:
    prompts = PromptListener({"http://telling"})

    def call(agent: str, engine: str) -> None:
        usage = PromptUsage(prompt_tokens=10, completion_tokens=1)
        prompts(CallFinished(agent=agent, engine=engine, call_id="", usage=usage))

    for agent, engine in (("2.1.1", "http://telling"), ("2.1.2", "http://telling")):
        call(agent, engine)
    call("1.2", "http://silent")
    found = prompts.by_agent
    assert found == {"1.2": PromptTokens(10, 0, None, None), "2.1": PromptTokens(20, 0, 0, 20)}
    assert group_by_layer(found) == {1: [found["1.2"]], 2: [found["2.1"]]}
