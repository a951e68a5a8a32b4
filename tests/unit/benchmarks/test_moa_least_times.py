"""Test what a mixture takes on GPUs that only compute."""

from __future__ import annotations

import pytest
from flashmoa_bench.moa.least_times import PlannedAgent, least_times


class Steps:
    """A prefill takes a second for each new token, a decode step one for each request."""

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        return float(sum(new for _, new in prompts))

    def decode(self, requests: int, context: int) -> float:
        assert context >= 10
        return float(requests)


def chain(known: int = 20) -> list[PlannedAgent]:
    return [
        PlannedAgent("1.1", "one", known, (), 3),
        PlannedAgent("1.2", "one", known, (), 5),
        PlannedAgent("2.1", "two", known, ("1.1", "1.2"), 4),
    ]


@pytest.mark.parametrize(("overlap", "prefill"), [(False, 28), (True, 8)])
def test_readers_wait_for_what_they_read_and_overlap_leaves_the_end_of_a_prompt(
    overlap: bool, prefill: int
) -> None:
    ends = least_times(chain(), {"one": Steps(), "two": Steps()}, overlap=overlap, pair=False)
    # The second proposer's prompt is that of the first, of which 8 tokens are computed again. The
    # prefill makes one token of each, two steps of both end one, two of the other end that, too.
    assert ends["1.1"] == 20 + 8 + 2 * 2
    assert ends["1.2"] == ends["1.1"] + 2
    assert ends["2.1"] == ends["1.2"] + prefill + 3


@pytest.mark.parametrize(("pair", "stopped", "reader"), [(False, 39, 33), (True, 19, 32)])
def test_a_pair_decodes_while_it_prefills(pair: bool, stopped: int, reader: int) -> None:
    agents = [
        PlannedAgent("1.1", "one", 10, (), 10),
        PlannedAgent("1.2", "other", 10, (), 3),
        PlannedAgent("2.1", "one", 17, ("1.2",), 1),
    ]
    steps = {"one": Steps(), "other": Steps()}
    ends = least_times(agents, steps, overlap=False, pair=pair)
    # The reader's prefill takes 20 seconds. One GPU begins it after the step that it is in, and the
    # answer that it has begun waits.
    assert ends == {"1.1": stopped, "1.2": 12, "2.1": reader}


def test_agents_that_are_not_needed_are_cancelled() -> None:
    quick, slow = (PlannedAgent(f"1.{n}", "one", 10, (), 5 * n) for n in (1, 2))
    reader = PlannedAgent("2.1", "one", 20, ("1.1", "1.2"), 2, needs=1)
    ends = least_times([quick, slow, reader], {"one": Steps()}, overlap=False, pair=False)
    # The prefills, four steps of two requests, the reader's prefill of both texts that it has.
    assert ends == {"1.1": 26, "2.1": 26 + 25 + 1}
