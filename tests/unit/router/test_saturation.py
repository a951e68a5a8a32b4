"""Test from how much work on an engine is full, with figures of Qwen3-235B-A22B and 30B-A3B."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.cache_tables import EngineTraits
from flashmoa.router.flops import PROMPT_TOKENS, TOKENS, Measure, true_flops
from flashmoa.router.policy import PrefixAware, WaitingRequest
from flashmoa.router.saturation import ForwardSizes, FullLoad, full_load
from tests.unit.router.support import MEASURES, SIZE, blocks
from tests.unit.router.test_cache_tables import QWEN3_235B

QWEN3_30B = QWEN3_235B | {
    "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "moe_intermediate_size": 768,
}  # fmt: skip
SIZES = st.builds(
    ForwardSizes,
    largest=st.integers(1, 60),
    needed=st.integers(0, 120),
    waits_for=st.integers(0, 60),
).filter(lambda sizes: sizes.waits_for <= sizes.largest)


@pytest.mark.parametrize(
    ("config", "tokens", "milliseconds", "peak"),
    [
        (QWEN3_235B, 30_219, 6.5, 1979e12),  # FP8 on an H100, experts over NVLink
        (QWEN3_235B, 203_338, 87.9, 989e12),  # BF16 on an H100, over PCIe
        (QWEN3_30B, 122_793, 48.3, 312e12),  # BF16 on an A100, over PCIe
        (QWEN3_30B, 13_566, 5.3, 312e12),  # BF16 on an A100, over NVLink
    ],
)
def test_a_forward_that_hides_its_transfers_is_equation_1(
    config: dict[str, int], tokens: int, milliseconds: float, peak: float
) -> None:
    """The paper's T for one layer is 1.2 times the transfer's time times the peak FLOP/s."""
    found = full_load(true_flops(config), ForwardSizes(8192, needed=tokens)).work
    expected = 1.2 * milliseconds / 1000 * peak
    assert found / config["num_hidden_layers"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("needed", "forwards"),
    [
        (0, 1.2),  # Not measured.
        (9_518, 1.2),  # Transfers are hidden in the largest forward.
        (2 * 19_660, 2 * 2.4),  # The slowest layer takes four times its computation.
    ],
)
def test_equation_3_is_a_number_of_largest_forwards(needed: int, forwards: float) -> None:
    measure = true_flops(QWEN3_235B)
    largest = 2 * measure.work(0, 4096)
    found = full_load(measure, ForwardSizes(8192, needed)).work
    assert found == pytest.approx(forwards * largest, rel=0.001)


def test_a_forwards_work_is_that_of_its_prompts() -> None:
    measure = Measure(linear=5, pair=2)
    whole = measure.work(0, PROMPT_TOKENS)
    assert measure.forward_work(2 * PROMPT_TOKENS + 1) == 2 * whole + measure.work(0, 1)
    assert (TOKENS.forward_work(8192), TOKENS.forward_work(0)) == (8192, 0)


@given(measure=MEASURES, sizes=SIZES, margin=st.floats(1e-6, 3))
def test_threshold_is_no_less_than_prefills_wait_for(
    measure: Measure, sizes: ForwardSizes, margin: float
) -> None:
    full = full_load(measure, sizes, margin)
    # An idle engine takes requests.
    assert full.work >= max(1, measure.forward_work(sizes.waits_for))


@given(
    measure=MEASURES,
    sizes=SIZES,
    margin=st.floats(1e-6, 3),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=60),
    runs=st.floats(0, 1),
)
def test_an_engine_waits_for_nothing_that_the_router_withholds(
    measure: Measure,
    sizes: ForwardSizes,
    margin: float,
    prompts: list[list[int]],
    runs: float,
) -> None:
    routing = PrefixAware(block_tokens=SIZE, patience=0)
    routing.join("engine", EngineTraits(measure, full_load(measure, sizes, margin)))
    queue = [WaitingRequest(str(number), blocks(prompt)) for number, prompt in enumerate(prompts)]
    placed = routing.route(queue)
    engine = routing.engines["engine"]
    if len(placed) < len(queue):
        assert engine.is_saturated
        # A forward runs already. The rest of the load, in the queue, opens the engine's gate.
        running = min(engine.load.tokens, runs * sizes.largest)
        assert engine.load.tokens - running >= sizes.waits_for


def test_long_prompts_are_fewer_tokens_than_a_gate_waits_for() -> None:
    """One prompt of 40 tokens is more work than 60 tokens of short prompts."""
    measure = Measure(linear=1, pair=1)
    full = FullLoad(work=15 * measure.work(0, 4), tokens=60)
    routing = PrefixAware(block_tokens=SIZE)
    routing.join("engine", EngineTraits(measure, full))
    queue = [WaitingRequest(str(number), blocks([number] * 40)) for number in range(3)]
    assert list(routing.route(queue)) == ["0", "1"]


@pytest.mark.parametrize(("waits_for", "tokens"), [(50, 150), (0, 0)])
def test_tokens_of_a_full_engine(waits_for: int, tokens: int) -> None:
    sizes = ForwardSizes(largest=100, needed=80, waits_for=waits_for)
    assert full_load(Measure(linear=7, pair=3), sizes).tokens == tokens
