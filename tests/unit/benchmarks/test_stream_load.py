"""What growing streams cost a scheduler, by increment."""

from __future__ import annotations

import pytest
from flashmoa_bench.linking.stream_load import StreamLoad, increment_ms


def test_an_increment_costs_what_steps_take_longer_than_with_streams_at_rest() -> None:
    at_rest = StreamLoad(0.3, 4.0, 200.0, 0.0, 1.0)
    growing = StreamLoad(0.5, 7.0, 100.0, 50.0, 1.0)
    # Each of 100 steps takes 3 ms longer, for 50 increments.
    assert increment_ms(growing, at_rest) == pytest.approx(6.0)
    assert increment_ms(at_rest, at_rest) is None
