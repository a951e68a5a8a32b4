"""How many tokens hide transfers, and how long prefills wait for that number."""

from collections.abc import Sequence

import pytest
from flashmoa_sglang.http.calibration import _waits_for
from flashmoa_sglang.moe.saturation import (
    MARGIN,
    LayerTimes,
    Saturation,
    SaturationGate,
    find_saturation,
)
from hypothesis import given
from hypothesis import strategies as st

LARGEST = 8192
TIMES = st.builds(LayerTimes, st.integers(1, 5000), st.floats(1e-6, 0.1), st.floats(1e-6, 1.0))


def test_saturation_is_where_a_layer_takes_as_long() -> None:
    # A layer takes 1 ms, and 1 us for each token; the slower of two rounds is noise.
    layers = [LayerTimes(n, 1e-3 + 1e-6 * n, 10e-3) for n in (1, 1000, 4000)]
    layers += [LayerTimes(4000, 1.0, 12e-3)]
    found = find_saturation(layers, LARGEST)
    assert found is not None and found.tokens is not None
    assert found.tokens == pytest.approx((MARGIN * 10e-3 - 1e-3) / 1e-6, abs=2)
    assert found.transfer == 10e-3 and found.largest_forward == LARGEST


@given(st.lists(TIMES, min_size=2, max_size=8, unique_by=lambda times: times.tokens))
def test_only_larger_forwards_hide_transfers(layers: list[LayerTimes]) -> None:
    found = find_saturation(layers, LARGEST)
    assert found is not None
    needed = MARGIN * min(times.transfer for times in layers)
    for tokens, window in found.windows:
        if found.tokens is None or tokens < found.tokens - 1:
            assert window <= needed + 1e-9
        if found.tokens is not None and tokens > found.tokens:
            assert window > needed - 1e-9


@pytest.mark.parametrize(
    "layers",
    [[], [LayerTimes(5, 0.1, 0.1)] * 3, [LayerTimes(5, 0.1, 0.0), LayerTimes(9, 0.1, 0.0)]],
)
def test_one_size_or_no_transfer_has_no_saturation(layers: list[LayerTimes]) -> None:
    assert find_saturation(layers, LARGEST) is None


def test_constant_times_hide_no_transfers() -> None:
    found = find_saturation([LayerTimes(1, 1e-3, 5e-3), LayerTimes(4096, 1e-3, 5e-3)], LARGEST)
    assert found is not None and found.tokens is None


@pytest.mark.parametrize(
    ("flags", "measured", "together", "expected"),
    [
        (("0", "0.2"), 4000, False, 4000),
        (("0", "0.2"), LARGEST + 1, False, "not held back"),
        (("0", "0.2"), None, False, "not held back"),
        (("0", "0"), 4000, False, None),
        (("500", "0.2"), LARGEST + 1, False, 500),
        (("9000", "0.2"), 4000, False, "not held back"),
        # All experts are on the device.
        (("0", "0.2"), "nothing", False, None),
        # Ranks step together.
        (("500", "0.2"), "nothing", True, "not held back"),
        (("0", "0.2"), "nothing", True, None),
    ],
)
def test_prefills_wait_for_given_or_measured_tokens(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: tuple[str, str],
    measured: int | str | None,
    together: bool,
    expected: int | str | None,
) -> None:
    monkeypatch.setenv("FLASHMOA_SATURATION", flags[0])
    monkeypatch.setenv("FLASHMOA_SATURATION_WAIT", flags[1])
    saturation = None if isinstance(measured, str) else Saturation(measured, LARGEST, 0.1, ())
    found = _waits_for(saturation, LARGEST, together=together)
    assert found == (None if isinstance(expected, str) else expected)
    assert ("not held back" in caplog.text) == isinstance(expected, str)


ARRIVALS = st.lists(st.lists(st.integers(1, 400), max_size=3), min_size=1, max_size=60)
LONGEST_WAIT, STEP, ENOUGH, ROOM = 0.02, 0.002, 1000, 8


@given(ARRIVALS, st.integers(1, ROOM), st.sampled_from([STEP, 5 * STEP, 2 * LONGEST_WAIT]))
def test_prefills_wait_briefly(arrivals: list[list[int]], taken: int, step: float) -> None:
    gate = SaturationGate(ENOUGH, LONGEST_WAIT)
    queue: dict[str, int] = {}
    waited: dict[str, float] = {}
    for number, arriving in enumerate(arrivals):
        queue |= {f"{number}-{at}": tokens for at, tokens in enumerate(arriving)}
        tokens = sum(queue.values())
        if gate.must_wait(list(queue), tokens, ROOM, step):
            assert 0 < tokens < ENOUGH and len(queue) < ROOM
            for rid in queue:
                waited[rid] = waited.get(rid, 0.0) + step
                assert waited[rid] <= LONGEST_WAIT + 1e-9
        else:
            for rid in list(queue)[:taken]:
                del queue[rid]


def steps_alone(gate: SaturationGate, rid: str, queue: Sequence[str] = ()) -> int:
    """Return in how many steps a request is held back."""
    steps = 0
    while gate.must_wait([rid, *queue], 10, ROOM, STEP):
        steps += 1
    return steps


def test_a_lone_request_runs_after_the_wait() -> None:
    gate = SaturationGate(ENOUGH, LONGEST_WAIT)
    assert steps_alone(gate, "a") == pytest.approx(LONGEST_WAIT / STEP, abs=1)
    # If it then finds no room, it does not wait again, even for another request.
    assert steps_alone(gate, "a", ["b"]) == 0
    assert steps_alone(gate, "b") == pytest.approx(LONGEST_WAIT / STEP, abs=1)
    assert not gate.must_wait([], 0, ROOM, STEP)
    assert gate._waited == {}
