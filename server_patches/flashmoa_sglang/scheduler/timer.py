"""``ForwardTimer``: measures how long an engine's forwards take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from flashmoa_sglang.costs import FEWEST_RIDING, UNMEASURED, TimedForward
from flashmoa_sglang.messages import ForwardTimes
from flashmoa_sglang.moe import asyncep
from flashmoa_sglang.scheduler.request import state_of
from flashmoa_sglang.sglang.releases import RELEASE


class _Watched:
    """Stands for a device's event, and notes when the scheduler has waited for it."""

    def __init__(self, event: Any) -> None:
        import torch  # "flashmoa doctor" reads the hooks without it.

        self._event = event
        # Whether the event had occurred before the scheduler looked.
        self.is_late: bool = event.query()
        # A CPU's event says nothing: launched work is done.
        self.is_on_cpu = isinstance(event, torch.cpu.Event)
        self.at: float | None = None

    def synchronize(self) -> None:
        self._event.synchronize()
        self.at = self.at or time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


class _Launch(NamedTuple):
    """A launched forward: its result and content, and when and how long it was launched."""

    result: Any
    forward: TimedForward
    began: float
    launching: float


class ForwardTimer:
    """Times an engine's forwards. Tells the HTTP process the times until the costs are known.

    A device computes one forward after the other, and under the overlap schedule the next one is
    launched before a result is processed. So a forward takes the time from the previous result to
    its own. On a CPU, a forward is computed while it is launched.

    Apart from an interval of ``WrittenAnswers``, only this class reads a clock in a scheduler. The
    times decide nothing here.

    Attributes:
        seconds: duration of the last forward that has ended.
    """

    def __init__(self, scheduler: Any) -> None:
        self.seconds = 0.0
        self._scheduler = scheduler
        self._has_stages = RELEASE.pipeline_stages(scheduler) > 1
        self._launched: deque[_Launch] = deque(maxlen=64)
        # The forward whose result is being processed, until its end is noted.
        self._ending: _Launch | None = None
        self._done: _Watched | None = None
        self._ended_at, self._was_late = 0.0, False
        self._forwards: deque[TimedForward] = deque(maxlen=256)

    def launch(self, original: Callable[[], Any], batch: Any) -> Any:
        """Let SGLang launch the forward of a batch; return its result."""
        forward, offloader = describe(self._scheduler, batch), asyncep.own_offloader()
        # A step that also decodes does not tell how long a layer takes to prefill N tokens.
        if offloader and not forward.decodes and _is_timed(forward, batch.reqs):
            offloader.time_next(forward.tokens)
        began = time.perf_counter()
        result = original()
        self._launched.append(_Launch(result, forward, began, time.perf_counter() - began))
        return result

    def process(self, original: Callable[[], None], result: Any, reqs: list[Any]) -> None:
        """Let SGLang process a result; it calls :meth:`stop` once the forward has ended."""
        while self._launched and self._ending is None:
            launch = self._launched.popleft()
            # Pipeline stages copy a result into another object, but results keep their order.
            if launch.result is result or self._has_stages:
                self._ending = launch
        self._done = None
        if getattr(result, "copy_done", None) is not None:
            self._done = result.copy_done = _Watched(result.copy_done)
        original()
        self.stop(reqs)

    def stop(self, reqs: list[Any]) -> None:
        """Note once that the forward has ended whose result is processed; ``reqs``: its batch's."""
        if self._ending is None:
            return
        (_, forward, began, launching), self._ending = self._ending, None
        done = self._done
        now = done.at if done and done.at else time.perf_counter()
        before, self._ended_at = self._ended_at, now
        was_late, self._was_late = self._was_late, bool(done and done.is_late)
        self.seconds = now - max(began, before)
        # Its beginning is unknown if the end of the previous forward was noticed late.
        is_known = began >= before or not (self._has_stages or (was_late and not self._was_late))
        if done and done.is_on_cpu:
            self.seconds, is_known = launching, True
        if is_known and self._scheduler.flashmoa.costs is UNMEASURED:
            self._forwards.append(forward._replace(seconds=self.seconds))
        if _is_timed(forward, reqs):
            offloader = None if forward.decodes else asyncep.own_offloader()
            layers = offloader.take_times() if offloader else None
            report = ForwardTimes(tuple(self._forwards), layers)
            self._forwards.clear()
            RELEASE.to_tokenizer(self._scheduler, report)


def _is_timed(forward: TimedForward, reqs: list[Any]) -> bool:
    """Return whether a forward prefills a request that runs for the times of its forwards."""
    # Prefills come first in a batch.
    marks = (state_of(req).mark for req in reqs[: len(reqs) - forward.decodes])
    return forward.tokens > 0 and any(mark is not None and mark.timed for mark in marks)


def describe(scheduler: Any, batch: Any) -> TimedForward:
    """Return what a batch computes; nothing if its time says nothing about other forwards."""
    mode = batch.forward_mode
    if mode.is_extend():
        decodes = len(batch.decoding_reqs or ())
        rows = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
        prefills = rows[: len(rows) - decodes]
        tokens = sum(new for _, new in prefills)
        kv = sum(prefix + 1 for prefix, _ in rows[len(prefills) :])
        # With many requests of a few tokens, the overhead per request takes most of the time.
        if tokens >= FEWEST_RIDING * len(prefills) or len(prefills) == 1:
            pairs = sum(prefix * new for prefix, new in prefills)
            return TimedForward(decodes, kv, tokens, pairs, 0.0)
    # A rank that prefills delays the others, which step together with it.
    elif mode.is_decode() and not (scheduler.require_mlp_sync and batch.is_extend_in_batch):
        lengths = batch.seq_lens_cpu
        kv = 0 if lengths is None else int(lengths.sum())
        return TimedForward(len(batch.reqs), kv, 0, 0, 0.0)
    return TimedForward(0, 0, 0, 0, 0.0)
