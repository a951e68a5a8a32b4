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

    def mixed(self, prompts: tuple[tuple[int, int], ...], requests: int, context: int) -> float:
        return max(self.prefill(prompts), self.decode(requests, context))


def find_ends(
    agents: list[PlannedAgent], engines: list[str], *, overlap: bool = False, **serving: bool
) -> dict[str, float]:
    given = {"pair": False, **serving}
    spans = least_times(agents, {name: Steps() for name in engines}, overlap=overlap, **given)
    return {name: span.end for name, span in spans.items()}


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
    ends = find_ends(chain(), ["one", "two"], overlap=overlap)
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
    ends = find_ends(agents, ["one", "other"], pair=pair)
    # The reader's prefill takes 20 seconds. One GPU begins it after the step that it is in, and the
    # answer that it has begun waits.
    assert ends == {"1.1": stopped, "1.2": 12, "2.1": reader}


def test_agents_that_are_not_needed_are_cancelled() -> None:
    quick, slow = (PlannedAgent(f"1.{n}", "one", 10, (), 5 * n) for n in (1, 2))
    reader = PlannedAgent("2.1", "one", 20, ("1.1", "1.2"), 2, suffice=lambda complete: True)
    ends = find_ends([quick, slow, reader], ["one"])
    # The prefills, four steps of two requests, the reader's prefill of both texts that it has.
    assert ends == {"1.1": 26, "2.1": 26 + 25 + 1}


def test_agent_that_is_not_needed_is_not_asked_later() -> None:
    quick, slow = (PlannedAgent(f"1.{n}", f"{n}", 10, (), 5 * n) for n in (1, 2))
    second = [PlannedAgent(f"2.{n}", f"{n}", 20, (f"1.{n}",), 1) for n in (1, 2)]
    reader = PlannedAgent("3.1", "1", 20, ("2.1", "2.2"), 1, suffice=lambda complete: True)
    assert "2.2" not in find_ends([quick, slow, *second, reader], ["1", "2"])


def test_prefill_joins_a_decode_step_in_mixed_chunks() -> None:
    agents = [
        PlannedAgent("1.1", "one", 10, (), 10),
        PlannedAgent("1.2", "other", 10, (), 3),
        PlannedAgent("2.1", "one", 17, ("1.2",), 1),
    ]
    # The reader's prefill takes 20 seconds, as without mixing, and makes a token of the first, too.
    assert find_ends(agents, ["one", "other"], mixed=True) == {"1.1": 38, "1.2": 12, "2.1": 33}
