"""Make the forwards of an SGLang engine on a CPU take the time of a modelled GPU.

The engine computes each forward at once with its small model, and the scheduler gets the result
when the GPU would have it. Under the overlap schedule, the scheduler prepares the next batch
meanwhile, as on a GPU; otherwise it waits. In a PD pair, KV transfers take the time of the link
between two modelled GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from flashmoa_bench.modelled_gpu.experts import virtual_gpu
from flashmoa_bench.modelled_gpu.gpu import Forward, ModelledGpu, Prefills, modelled_gpu
from flashmoa_bench.modelled_gpu.virtual_gpu import VirtualGpu

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@cache
def install() -> None:
    """Apply the hooks to this process's scheduler, if its engine takes a modelled GPU's time.

    These hooks wrap the hooks of all plugins.
    """
    modelled = modelled_gpu()
    if modelled is None:
        return
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    timed = TimedForwards(modelled, gpu=virtual_gpu())
    ModelRunner.forward = timed.notice(ModelRunner.forward)
    Scheduler.run_batch = timed.delay(Scheduler.run_batch)
    Scheduler.get_internal_state = timed.report(Scheduler.get_internal_state)
    transfers = TimedTransfers(modelled, KVPoll)
    DecodeTransferQueue.extend = transfers.delay(DecodeTransferQueue.extend)


@dataclass(slots=True)
class Clock:
    """Keeps the modelled GPU's time, and counts how far a run can be trusted.

    A forward begins when it is launched and the GPU is free. This machine's CPU computes it at
    once. If that takes longer than on the GPU, the forward is an overrun.

    Args:
        now, sleep: the machine's clock, in seconds.

    Attributes:
        free_at: when the GPU has computed all launched forwards.
        forwards, overruns: numbers of forwards.
        device_seconds: time of all forwards.
        overrun_seconds: delay of results.
        starved_seconds: time that the idle GPU waited for the scheduler to prepare the next batch.
        computing_seconds: CPU time of the real computation, which a GPU's host does not spend.
    """

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    free_at: float = 0.0
    forwards: int = 0
    overruns: int = 0
    device_seconds: float = 0.0
    overrun_seconds: float = 0.0
    starved_seconds: float = 0.0
    computing_seconds: float = 0.0

    def launch(
        self, seconds: float, launched: float, computed: float, *, follows: bool = False
    ) -> float:
        """Add a forward of ``seconds``; return when its result is there.

        Args:
            launched, computed: when its real computation began and ended.
            follows: whether the scheduler was not idle since the previous forward.
        """
        begins = max(self.free_at, launched)
        if follows:
            self.starved_seconds += begins - self.free_at
        self.free_at = begins + seconds
        self.forwards += 1
        self.device_seconds += seconds
        if computed > self.free_at:
            self.overruns += 1
            self.overrun_seconds += computed - self.free_at
        return self.free_at

    def wait_until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            self.sleep(left)


class TimedForwards:
    """Hooks that note the work of a scheduler's forwards, and delay their results.

    Args: gpu: the GPU that experts are copied to, if they are.
    """

    def __init__(
        self, modelled: ModelledGpu, clock: Clock | None = None, gpu: VirtualGpu | None = None
    ) -> None:
        self._modelled = modelled
        self._clock = clock or Clock()
        self._gpu = gpu
        # When the GPU can begin the batch that is being launched.
        self._begins = 0.0
        self._noticed: list[Forward] = []
        # The first query loads the tables, which takes up to a second.
        modelled.times.seconds(Forward(Prefills.of([(0, 1)]), 1, 1))
        modelled.times.seconds(Forward(decodes=1, context=1))

    def notice(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``ModelRunner.forward``, which knows the forward's work."""

        @wraps(original)
        def forward(model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._noticed.append(work := describe(forward_batch))
            if self._gpu is not None:
                self._gpu.begin(self._modelled.layer_seconds(work), self._begins)
            began = time.process_time()
            result = original(model_runner, forward_batch, *args, **kwargs)
            self._clock.computing_seconds += time.process_time() - began
            return result

        return forward

    def delay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Scheduler.run_batch``, which returns the result."""

        @wraps(original)
        def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            self._noticed.clear()
            launched, follows = clock.now(), scheduler.last_batch is not None
            self._begins = max(clock.free_at, launched)
            result = original(scheduler, batch, *args, **kwargs)
            if not self._noticed:
                return result
            seconds = sum(map(self._modelled.seconds, self._noticed))
            if self._gpu is not None:
                seconds = self._gpu.now - self._begins
            ends = clock.launch(seconds, launched, clock.now(), follows=follows)
            if scheduler.enable_overlap:
                result.copy_done = ResultEvent(clock, ends)
            else:
                clock.wait_until(ends)
            return result

        return run_batch

    def report(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Scheduler.get_internal_state``, which ``/server_info`` shows."""

        @wraps(original)
        def get_internal_state(scheduler: Any, request: Any) -> Any:
            result = original(scheduler, request)
            clock = self._clock
            result.internal_state["modelled_gpu"] = {
                "name": self._modelled.name,
                "slowdown": self._modelled.slowdown,
                "forwards": clock.forwards,
                "overruns": clock.overruns,
                "device_seconds": clock.device_seconds,
                "overrun_seconds": clock.overrun_seconds,
                "starved_seconds": clock.starved_seconds,
                "computing_seconds": clock.computing_seconds,
                "races": self._gpu.races if self._gpu is not None else 0,
            }
            return result

        return get_internal_state


class ResultEvent:
    """Stands for the CUDA event of a result's copy to the host."""

    def __init__(self, clock: Clock, moment: float) -> None:
        self._clock = clock
        self._moment = moment

    def record(self, *_stream: Any) -> None:
        """Do nothing: the moment is known."""

    def query(self) -> bool:
        return self._clock.now() >= self._moment

    def synchronize(self) -> None:
        self._clock.wait_until(self._moment)


def describe(forward_batch: ForwardBatch) -> Forward:
    """Return the work of SGLang's ``ForwardBatch``.

    In a mixed batch, SGLang prefills a single token for each request that decodes. Real prefills of
    a single token cost the same, so they count as decodes.
    """
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return Forward()
    if mode.is_decode():
        requests = forward_batch.batch_size
        return Forward(decodes=requests, context=round(forward_batch.seq_lens_sum / requests))
    cached, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    rows = list(zip(cached or [], new or [], strict=True))
    if not mode.is_mixed():
        return Forward(Prefills.of(rows))
    decoding = [cached + 1 for cached, new in rows if new == 1]
    prefills = Prefills.of((cached, new) for cached, new in rows if new > 1)
    context = round(sum(decoding) / len(decoding)) if decoding else 0
    return Forward(prefills, len(decoding), context)


class TimedTransfers:
    """Delays the end of KV transfers for the decode engine of a PD pair.

    Here a copy between two processes counts as no time. SGLang sends a chunk's KV when it is
    computed, and a link is much faster than a prefill. So earlier chunks have arrived when the last
    chunk is computed, and only the last chunk takes time, after other requests on the link.

    Args:
        states: SGLang's numbers of a transfer's states.
        clock: the link's clock; transfers follow each other.
    """

    def __init__(
        self, modelled: ModelledGpu, states: type[KVPoll], clock: Clock | None = None
    ) -> None:
        self._modelled = modelled
        self._states = states
        self._link = clock or Clock()

    def delay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DecodeTransferQueue.extend``, which takes the requests that wait for KV."""

        @wraps(original)
        def extend(queue: Any, decode_reqs: Any) -> Any:
            chunk = queue.scheduler.server_args.chunked_prefill_size
            for decode_req in decode_reqs:
                tokens = len(decode_req.req.origin_input_ids)
                if chunk and chunk > 0:
                    tokens = (tokens - 1) % chunk + 1
                receiver = decode_req.kv_receiver
                receiver.poll = self._later(receiver.poll, self._modelled.transfer_seconds(tokens))
            return original(queue, decode_reqs)

        return extend

    def _later(self, poll: Callable[[], Any], seconds: float) -> Callable[[], Any]:
        """Wrap a receiver's ``poll``; the transfer takes ``seconds`` on an idle link."""
        ends: float | None = None

        def poll_later() -> Any:
            nonlocal ends
            state = poll()
            if state != self._states.Success:
                return state
            now = self._link.now()
            if ends is None:
                ends = self._link.launch(seconds, now, now)
            return state if now >= ends else self._states.Transferring

        return poll_later
