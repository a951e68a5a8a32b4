"""What a step prefills, by its view alone, and which streams get the tokens."""

from dataclasses import replace
from math import inf

import pytest
from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES, UNMEASURED, Costs
from flashmoa_sglang.scheduler.plan import (
    Budget,
    Growth,
    Rank,
    Step,
    StepView,
    choose_increments,
    fewest_tokens,
    plan,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.scheduler.fakes import COSTS
from tests.unit.plugin.test_costs import any_costs

PAGES = st.sampled_from([1, 16, 64])


@st.composite
def growing(draw: st.DrawFn) -> tuple[int, list[Growth]]:
    """Draw a page size and streams that have grown by whole pages."""
    page = draw(PAGES)
    pages = [st.integers(least, most).map(lambda n: n * page) for least, most in ((0, 50), (1, 40))]
    stream = st.builds(Growth, *pages, ended=st.booleans(), rank=st.sampled_from(Rank))
    return page, draw(st.lists(stream, max_size=8))


@given(growing=growing(), tokens=st.integers(0, 600), open_streams=st.integers(0, 500))
def test_increments_are_pages_in_rank_order(
    growing: tuple[int, list[Growth]], tokens: int, open_streams: int
) -> None:
    page, streams = growing
    fewest = fewest_tokens(open_streams, tokens, page)
    assert fewest == max(16, min(open_streams // 2, tokens - tokens % page))
    chosen = choose_increments(streams, tokens, fewest, page)
    sizes = {position: end - streams[position].prefilled for position, end in chosen}
    assert len(sizes) == len(chosen)
    left = tokens - sum(sizes.values())
    assert left >= 0

    def order(position: int) -> tuple[int, int]:
        return streams[position].rank, position

    def is_worth(stream: Growth, size: int) -> bool:
        return size > 0 and (size >= fewest or (stream.ended and size == stream.new))

    for position, size in sizes.items():
        assert is_worth(streams[position], size)
        assert size % page == 0 and size <= streams[position].new
    # Only the last stream may not be completed.
    assert [*sizes] == sorted(sizes, key=order)
    assert all(sizes[position] == streams[position].new for position in [*sizes][:-1])
    # The other streams come later, and the tokens that are left are not enough for them.
    for position, stream in enumerate(streams):
        if position not in sizes:
            most = min(stream.new, left)
            assert not is_worth(stream, most - most % page)
            assert not sizes or order(position) > order([*sizes][-1]) or not is_worth(stream, most)


@given(costs=any_costs(), itl_budget=st.floats(1.01, 5), decodes=st.integers(1, 700))
def test_budgets_have_all_allowed_sizes(costs: Costs, itl_budget: float, decodes: int) -> None:
    budget = Budget.of(costs, itl_budget, decodes)
    if decodes > 8:
        decodes = -(-decodes // 8) * 8
    below = decodes // 128 * 128
    sizes = sorted({size for each in STEP_SIZES for size in (each, below + each) if size > decodes})
    step = costs.decode(decodes)
    added = {size: costs.added(decodes, size - decodes) for size in sizes}
    # A mixed token costs at most 1.1 times a token of a large forward.
    rate = 1.1 * costs.per_token_at_best
    allowed = [
        size
        for size in sizes
        if added[size] <= (itl_budget - 1) * step and added[size] <= rate * (size - decodes)
    ]
    assert [*budget.mixed] == allowed
    if allowed:
        cheapest = min(added[size] / (size - decodes) for size in allowed)
        assert added[budget.cheap] / (budget.cheap - decodes) == cheapest


def test_streams_ride_where_that_saves_a_seventh() -> None:
    """These are the costs of SmolLM2 on a CPU core, where 512 tokens take 1.15 s."""
    alone = ((1, 0.077), (16, 0.135), (64, 0.216), (128, 0.34), (256, 0.572), (512, 1.15))
    one = ((1, 0, 0.068), (1, 31, 0.153), (1, 63, 0.208), (1, 127, 0.323), (1, 255, 0.576))
    eight = ((8, 0, 0.168), (8, 24, 0.202), (8, 56, 0.267), (8, 120, 0.374), (8, 248, 0.622))
    costs = Costs(alone, 0.068, (*one, *eight))
    for decodes, rides in ((1, False), (8, True), (16, True)):
        assert Budget.of(costs, 8.0, decodes).rides == rides
        view = replace(BUSY, decodes=decodes)
        assert bool(plan(view, costs, 8.0).mixed) == rides
        # Nor do streams lengthen a step that computes a prompt.
        assert bool(plan(replace(view, prompts=20), costs, 8.0).streams) == rides
    # In the time that a decode of 200 steps takes, they get one forward.
    busy = replace(BUSY, decodes=1, steps=200)
    assert plan(busy, costs, 8.0).only_streams


@given(costs=any_costs())
def test_own_forwards_are_the_smallest_efficient(costs: Costs) -> None:
    size, most = Budget.of(costs, 2.0, 1).alone, 1.1 * costs.per_token_at_best
    assert size in [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert size == 8192 or costs.prefill(size) <= most * size
    assert size == 64 or costs.prefill(size // 2) > most * size // 2


@pytest.mark.parametrize(
    ("longest", "decodes", "budget"),
    [
        (2.0, 1, Budget((32, 64, 128, 256), 128, 512, rides=True)),
        (4.0, 1, Budget((32, 64, 128, 256), 128, 512, rides=True)),
        # Sizes are smaller if steps may be shorter, and leave room beside many decodes.
        (1.5, 1, Budget((32, 64, 128), 128, 512, rides=True)),
        (1.25, 1, Budget((32, 64), 64, 512, rides=True)),
        (2.0, 241, Budget((256, 384), 256, 512, rides=True)),
    ],
)
def test_unmeasured_costs_have_fixed_sizes(longest: float, decodes: int, budget: Budget) -> None:
    assert Budget.of(UNMEASURED, longest, decodes) == budget
    assert Budget.of(UNMEASURED, 1.0, 1).mixed == ()
    waiting = replace(BUSY, prompts=1000)
    assert plan(waiting, UNMEASURED, 2.0).mixed == 126
    assert not plan(replace(waiting, limit=0.01), UNMEASURED, 2.0).mixed


# With eight decodes a step may have 128 tokens, and 64 are the cheapest.
BUSY = StepView(decodes=2, leading=5000, waiting=9000, before=inf)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # A backlog of 5,000 tokens is computed within 128 steps, and so is one of 20,000.
        ({}, 62),
        ({"leading": 20_000}, 126),
        ({"leading": 200_000}, 126),
        ({"leading": 32}, 62),
        ({"leading": 31}, 0),
        ({"leading": 31, "ended": True}, 62),
        ({"leading": 0}, 0),
        ({"page": 64}, 126),
        ({"chunk": 100, "leading": 20_000}, 100),
        ({"chunk": 40}, 40),
        ({"decodes": 8}, 56),
        # Fewer tokens than 16 are left of 64.
        ({"decodes": 50}, 78),
        ({"decodes": 60}, 68),
        # A step takes 10 ms, and 62 tokens add 1 ms.
        ({"limit": 0.0111}, 62),
        ({"limit": 0.0109}, 30),
        ({"limit": 0.0101}, 0),
        ({"limit": 0.0111, "leading": 20_000}, 62),
    ],
)
def test_streams_fill_a_block_of_a_decode_step(given: dict[str, int], expected: int) -> None:
    step = plan(replace(BUSY, **given), COSTS, 2.0)
    assert (step.streams, step.mixed) == (expected, expected)
    assert step.only_streams == step.builds == (expected > 0)


def test_decodes_are_no_tokens_of_streams() -> None:
    """A step of 200 decodes and 56 tokens is the cheapest: 32 tokens are enough for it."""
    mixed = ((200, 0, 0.02), (200, 56, 0.021), (200, 312, 0.06))
    costs = Costs(((1, 0.01), (1024, 0.11)), 0.01, mixed)
    assert Budget.of(costs, 2.0, 200).cheap == 256
    for leading, streams in ((32, 56), (31, 0)):
        view = replace(BUSY, decodes=200, leading=leading)
        assert plan(view, costs, 2.0).streams == streams


@pytest.mark.parametrize(
    ("given", "steps", "size"),
    [
        ({}, 90, 300),
        ({"leading": 2000}, 90, 512),
        ({"leading": 31}, 10_000, 0),
        ({"leading": 31, "ended": True}, 90, 31),
        ({"chunk": 200}, 90, 200),
        # A step takes 10 ms, and 300 tokens take 35 ms.
        ({"limit": 0.0451}, 90, 300),
        ({"limit": 0.0449}, 90, 299),
        ({"limit": 0.015}, 10_000, 0),
    ],
)
def test_streams_get_a_seventeenth_of_the_time(
    given: dict[str, int], steps: int, size: int
) -> None:
    costs = Costs(((1, 0.0051), (8192, 0.8242)), 0.01, ((8, 0, 0.01), (8, 56, 0.05)))
    assert Budget.of(costs, 2.0, 2) == Budget((), 0, 512, rides=False)
    view = replace(replace(BUSY, leading=300), **given)
    for done in (0, steps - 1):
        assert not plan(replace(view, steps=done), costs, 2.0).streams
    step = plan(replace(view, steps=steps), costs, 2.0)
    assert (step.streams, step.mixed, step.only_streams) == (size, 0, size > 0)


@pytest.mark.parametrize(
    ("given", "mixed"), [({}, 62), ({"kv": 2000}, 30), ({"kv": 3000}, 0), ({"context": 100_000}, 0)]
)
def test_a_limit_counts_contexts(given: dict[str, int], mixed: int) -> None:
    costs = replace(COSTS, per_kv_token=1e-6, per_pair=1e-9)
    far = replace(BUSY, limit=0.013, context=1000)
    assert plan(replace(far, **given), costs, 2.0).mixed == mixed


@pytest.mark.parametrize(
    ("given", "mixed", "streams"),
    [
        ({"prompts": 100}, 254, 26),
        ({"prompts": 1000}, 254, 0),
        ({"prompts": 100, "mixes": False}, 0, 0),
        ({"prompts": 100, "limit": 0.001}, 0, 0),
        ({"prompts": 100, "decodes": 0}, 0, 0),
        ({"prompts": 100, "has_streams": False}, 0, 0),
        ({"measures": True}, 512, 0),
    ],
)
def test_prompts_of_clients_come_before_streams(
    given: dict[str, int], mixed: int, streams: int
) -> None:
    step = plan(replace(BUSY, **given), COSTS, 2.0)
    assert step.builds and not step.only_streams
    assert (step.mixed, step.streams) == (mixed, streams)


def test_prompts_are_not_mixed_if_that_is_slow() -> None:
    """A large forward computes 800 tokens in the time of a step of 120."""
    fast = Costs(((1, 0.01), (8192, 0.1)), 0.01, ((8, 0, 0.01), (8, 120, 0.011)))
    assert plan(BUSY, fast, 2.0).mixed
    waiting = replace(BUSY, prompts=500)
    assert plan(waiting, fast, 2.0) == Step(before=inf)
    # Also with a limit of the operator's: a queue without end would help nobody.
    assert plan(replace(waiting, limit=0.02), fast, 2.0) == Step(before=inf)


@pytest.mark.parametrize("queued", [True, False])
def test_idle_steps_prefill_streams_alone(*, queued: bool) -> None:
    idle = StepView(waiting=5000, queued=queued)
    assert plan(idle, COSTS, 2.0) == Step(streams=512, only_streams=True)
    assert plan(replace(idle, page=1024), COSTS, 2.0).streams == 1024
    assert plan(replace(idle, waiting=31), COSTS, 2.0) == Step(builds=queued)
    assert plan(replace(idle, waiting=31, ended=True), COSTS, 2.0).streams == 512
    # At most 1: streams wait until nothing decodes.
    assert plan(idle, COSTS, 1.0).streams == 512


@pytest.mark.parametrize(
    ("given", "steps", "size"),
    [
        ({}, 11, 1024),
        ({"leading": 300}, 9, 300),
        # Text that is known before its writer begins comes if no stream grows.
        ({"leading": 31}, 11, 1024),
        ({"chunk": 200}, 9, 200),
        ({"ranks": 2, "leading": 300}, 18, 300),
        ({"decodes": 0, "elsewhere": 3}, 11, 1024),
        # A step takes 10 ms, and 300 tokens take 33.6 ms.
        ({"limit": 0.04361}, 9, 300),
        ({"limit": 0.011}, 10_000, 0),
        ({"leading": 0, "waiting": 0}, 10_000, 0),
    ],
)
def test_decodes_wait_for_unmixed_streams(given: dict[str, int], steps: int, size: int) -> None:
    view = replace(replace(BUSY, mixes=False), **given)
    for done in (0, steps - 1):
        assert plan(replace(view, steps=done), COSTS, 2.0) == Step(builds=False)
        assert plan(replace(view, steps=done, queued=True), COSTS, 2.0) == Step()
    step = plan(replace(view, steps=steps), COSTS, 2.0)
    assert (step.streams, step.mixed, step.only_streams) == (size, 0, size > 0)
    assert not plan(replace(view, steps=10_000), COSTS, 1.0).builds


def test_nothing_is_prefilled_while_prefills_wait() -> None:
    assert plan(StepView(waits=True, prompts=100, queued=True), COSTS, 2.0) == Step(builds=False)


@given(
    costs=any_costs(),
    view=st.builds(
        StepView,
        decodes=st.integers(0, 600),
        elsewhere=st.integers(0, 2),
        prompts=st.none() | st.integers(0, 9000),
        mixes=st.booleans(),
        waiting=st.integers(0, 20_000),
        leading=st.integers(0, 9000),
        ended=st.booleans(),
        steps=st.integers(0, 1000),
        limit=st.just(inf) | st.floats(1e-3, 1),
        page=PAGES,
        chunk=st.none() | st.integers(64, 8192),
    ),
)
def test_no_mixed_step_is_too_long(costs: Costs, view: StepView) -> None:
    step = plan(view, costs, 2.0)
    assert step.streams >= 0
    if not step.mixed:
        return
    assert (
        step.mixed >= max(FEWEST_RIDING, view.page)
        and view.decodes
        and view.mixes
        and step.streams <= step.mixed
    )
    assert view.chunk is None or step.mixed <= view.chunk
    seconds = costs.decode(view.decodes) + costs.added(view.decodes, step.mixed)
    assert seconds <= view.limit * (1 + 1e-9)
    # More decodes have the budget of the next multiple of eight, and prompts another rule.
    if view.decodes <= 8 and view.prompts is None:
        assert seconds <= 2.0 * costs.decode(view.decodes) * (1 + 1e-9)
