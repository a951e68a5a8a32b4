"""``TimedRequests``: forwards and answers whose time is taken, with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from flashmoa_sglang.cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http.calibration import TimedRequests  # noqa: E402
from flashmoa_sglang.http.errors import EngineBusy, EngineFailed  # noqa: E402
from flashmoa_sglang.messages import MEASURED_STEPS, ForwardTime, RequestMark  # noqa: E402

pytestmark = pytest.mark.anyio


class FakeEngine:
    """An engine whose answers grow until they are aborted.

    ``refuses``: how many answers it has no place for.
    """

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.marks: list[RequestMark] = []
        self.answers: dict[str, int] = {}
        self.finish_reason: dict[str, str] | None = None

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        assert kind is ForwardTime
        self._report = handler

    def abort(self, rid: str) -> None:
        self.answers.pop(rid, None)

    async def generate(
        self,
        input_ids: list[int],
        mark: RequestMark,
        *,
        rid: str,
        new_tokens: int = 0,
        on_token: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        self.marks.append(mark)
        if on_token is not None:
            await self._decode(rid, new_tokens, on_token)
        else:
            self._report(ForwardTime("another", 9.0))
            self._report(ForwardTime(rid, 0.1))
        tokens = len(input_ids)
        return {"finish_reason": self.finish_reason, "prompt_tokens": tokens, "cached_tokens": 0}

    async def _decode(
        self, rid: str, tokens: int, on_token: Callable[[dict[str, Any]], None]
    ) -> None:
        if self.refuses:
            self.refuses -= 1
            raise EngineBusy("no place")
        assert tokens > 2 * MEASURED_STEPS
        self.answers[rid] = 0
        while rid in self.answers:
            self.answers[rid] += 1
            on_token({"completion_tokens": self.answers[rid]})
            await asyncio.sleep(0)


async def test_the_time_of_a_forward_is_the_one_that_the_scheduler_reports() -> None:
    engine: Any = FakeEngine()
    timed = TimedRequests(engine)
    forward = await timed.time_forward([1, 2, 3], rides=True)
    assert forward.seconds == 0.1
    assert engine.marks == [RequestMark(timed=True, rides=True)]


async def test_a_forward_that_was_aborted_has_no_time() -> None:
    engine: Any = FakeEngine()
    engine.finish_reason = {"type": "abort", "message": "too late"}
    with pytest.raises(EngineFailed, match="too late"):
        await TimedRequests(engine).time_forward([1, 2, 3])


async def test_answers_decode_for_some_steps_before_something_rides_with_them() -> None:
    engine: Any = FakeEngine()
    timed = TimedRequests(engine)
    with anyio.fail_after(5):
        async with timed.decoding(3):
            assert len(engine.answers) == 3
            assert all(steps > MEASURED_STEPS for steps in engine.answers.values())
    assert engine.answers == {}


async def test_answers_that_find_no_place_hold_up_nothing() -> None:
    engine: Any = FakeEngine(refuses=2)
    timed = TimedRequests(engine)
    with anyio.fail_after(5):
        async with timed.decoding(3):
            assert len(engine.answers) == 1
    assert engine.answers == {}


async def test_answers_end_if_what_rides_with_them_fails() -> None:
    engine: Any = FakeEngine()
    with anyio.fail_after(5), pytest.raises(ExceptionGroup):
        async with TimedRequests(engine).decoding(3):
            raise EngineFailed("it failed")
    assert engine.answers == {}
