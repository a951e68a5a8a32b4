"""``TimedRequests``: requests of the plugin that show how long this engine's forwards take."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.http.engine import new_rid
from flashmoa_sglang.http.errors import EngineBusy
from flashmoa_sglang.http.stream import Prefilled
from flashmoa_sglang.messages import MEASURED_STEPS, ForwardTime, RequestMark

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from flashmoa_sglang.http.engine import Engine

# How many tokens the answers have that decode while something else is measured.
MEASURED_ANSWER = 64


class TimedRequests:
    """Runs forwards and answers on an engine, and takes their time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._forwards: dict[str, ForwardTime] = {}
        engine.handle(ForwardTime, lambda report: self._forwards.update({report.rid: report}))

    async def time_forward(self, input_ids: Sequence[int], rides: bool = False) -> ForwardTime:
        """Run one forward with these tokens. Return its time as measured by the scheduler.

        Args: rides: whether the tokens ride along with a decode step, if one can be mixed with it.
        """
        rid = new_rid()
        mark = RequestMark(timed=True, rides=rides)
        try:
            meta = await self._engine.generate(list(input_ids), mark, rid=rid)
            Prefilled.read(meta)  # This raises if the request was aborted.
            return self._forwards[rid]
        finally:
            self._forwards.pop(rid, None)

    async def time_answer(self, tokens: int) -> float:
        """Return the seconds of a request that decodes ``tokens`` tokens, with waiting."""
        started = time.perf_counter()
        # A prompt of one token is never cached, so that each request computes the same.
        await self._engine.generate([0], RequestMark(), new_tokens=tokens)
        return time.perf_counter() - started

    @asynccontextmanager
    async def decoding(self, requests: int) -> AsyncGenerator[None]:
        """Let this many requests decode in the meantime, for a few dozen steps."""
        answers = {new_rid(): asyncio.Event() for _ in range(requests)}
        async with asyncio.TaskGroup() as group:
            for rid, decodes in answers.items():
                group.create_task(self._decode(rid, decodes))
            try:
                for decodes in answers.values():
                    await decodes.wait()
                yield
            finally:
                for rid in answers:
                    self._engine.abort(rid)

    async def _decode(self, rid: str, decodes: asyncio.Event) -> None:
        """Decode an answer; set ``decodes`` after some steps, or if it is refused."""

        def note(meta: dict[str, Any]) -> None:
            if meta["completion_tokens"] > MEASURED_STEPS:
                decodes.set()

        with suppress(EngineBusy):
            await self._engine.generate(
                [0], RequestMark(), new_tokens=MEASURED_ANSWER, rid=rid, on_token=note
            )
        decodes.set()
