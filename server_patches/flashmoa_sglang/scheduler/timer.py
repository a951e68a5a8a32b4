"""Times the forwards of requests that ask for it.

The one place in a scheduler that looks at a clock: it reports, and decides nothing.
"""

from __future__ import annotations

import time
from typing import Any

from flashmoa_sglang import asyncep, releases
from flashmoa_sglang.messages import ForwardTime, mark_of


class ForwardTimer:
    """From the built batch to its result, for requests marked ``timed``."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._started: dict[str, float] = {}

    def start(self, reqs: list[Any], tokens: int) -> None:
        """A batch of so many tokens is about to run."""
        for req in reqs:
            mark = mark_of(req)
            if mark is not None and mark.timed:
                # The first chunk, where others' requests leave no room for it in one.
                self._started.setdefault(req.rid, time.perf_counter())
                asyncep.time_next(tokens)

    def stop(self, reqs: list[Any]) -> None:
        if not self._started:
            return
        for req in reqs:
            started = self._started.pop(req.rid, None)
            if started is not None:
                seconds = time.perf_counter() - started
                report = ForwardTime(req.rid, seconds, asyncep.times())
                releases.to_tokenizer(self._scheduler, releases.wrapped(report))
