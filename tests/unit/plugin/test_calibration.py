"""How costs follow from measured times, with noise; without engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flashmoa_sglang.http.calibration import calibrate, measure
from flashmoa_sglang.messages import ForwardTime

pytestmark = pytest.mark.anyio


class FakeEngine:
    """An engine whose forwards take given times.

    ``seconds``: by the tokens of a forward, and how many of that length there were before.
    """

    max_unchunked_prompt = 2048
    vocabulary = 100
    role = "null"

    def __init__(
        self, seconds: Callable[[int, int], float], *, steps_together: bool = False
    ) -> None:
        self.steps_together = steps_together
        self._seconds = seconds
        self.asked: list[int] = []

    def others_active(self) -> bool:
        return False

    async def max_forward_tokens(self) -> int:
        return self.max_unchunked_prompt

    def use_costs(self, costs: Any, waits_for: int | None) -> None:
        self.costs, self.waits_for = costs, waits_for

    async def time_answer(self, tokens: int) -> float:
        return 0.01 + 0.002 * tokens

    async def time_forward(self, input_ids: Sequence[int]) -> ForwardTime:
        tokens = len(input_ids)
        self.asked.append(tokens)
        return ForwardTime("", self._seconds(tokens, self.asked.count(tokens) - 1), None)


async def costs(seconds: Callable[[int, int], float]) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(seconds)
    measured, layers = await measure(engine)  # type: ignore[arg-type]
    assert not layers
    return measured, engine


async def test_costs_are_those_without_a_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOA_DEVICE_SLOWDOWN", "4")
    found, _ = await costs(lambda tokens, _: 1e-4 * tokens)
    # All sizes are measured: the largest takes 0.1 s, and less than 0.03 without the slowdown.
    assert found.points == tuple((n, 1e-4 * n / 4) for n in (1, 4, 16, 64, 256, 1024))
    assert found.decode_step == pytest.approx(0.002 / 4)


async def test_costs_are_the_least_of_several_rounds() -> None:
    found, engine = await costs(lambda tokens, before: 1e-3 + 1e-5 * tokens + 0.001 * (before == 1))
    assert found.points == tuple((n, 1e-3 + 1e-5 * n) for n in (1, 4, 16, 64, 256, 1024))
    assert found.decode_step == pytest.approx(0.002)
    assert engine.asked == [1, 4, 16, 64, 256, 1024] * 3


async def test_forwards_of_a_slow_engine_are_measured_up_to_a_limit() -> None:
    found, engine = await costs(lambda tokens, _before: 1e-3 * tokens)
    assert [tokens for tokens, _ in found.points] == [1, 4, 16, 64, 256]
    found, engine = await costs(lambda _tokens, _before: 0.5)
    assert [tokens for tokens, _ in found.points] == [1, 4] and len(engine.asked) == 6


async def test_noisy_rounds_are_measured_again() -> None:
    # The first forward of each length takes a second.
    found, _ = await costs(lambda tokens, before: 1e-5 * tokens if before else 1.0)
    assert found.points == tuple((n, 1e-5 * n) for n in (1, 4, 16, 64, 256, 1024))


@pytest.mark.parametrize(("together", "expected"), [(False, 500), (True, None)])
async def test_an_engine_says_for_how_many_tokens_prefills_wait(
    monkeypatch: pytest.MonkeyPatch, together: bool, expected: int | None
) -> None:
    monkeypatch.setenv("FLASHMOA_SATURATION", "500")
    engine = FakeEngine(lambda tokens, _before: 1e-5 * tokens, steps_together=together)
    await calibrate(engine)  # type: ignore[arg-type]
    assert engine.waits_for == expected
