"""Makes the forwards of an SGLang engine on a CPU take the time of a modelled GPU.

The engine computes each forward at once, with whatever small model it serves; its result is there
when the GPU's clock says so. Under the overlap schedule the scheduler prepares the next batch
meanwhile, as it does on a GPU; without it, the scheduler waits. In a PD pair, transfers of KV take
the time of the link between two modelled GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from flashmoa_bench.modelled_gpu.gpu import Forward, ModelledGpu, Prefills, modelled_gpu

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@cache
def install() -> None:
    """Apply the hooks to this process's scheduler, if its engine takes a modelled GPU's time.

    They are outside the hooks of all plugins.
    """
    modelled = modelled_gpu()
    if modelled is None:
        return
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    timed = TimedForwards(modelled)
    ModelRunner.forward = timed.notice(ModelRunner.forward)
    Scheduler.run_batch = timed.delay(Scheduler.run_batch)
    Scheduler.get_internal_state = timed.report(Scheduler.get_internal_state)
    transfers = TimedTransfers(modelled, KVPoll)
    DecodeTransferQueue.extend = transfers.delay(DecodeTransferQueue.extend)


@dataclass(slots=True)
class Clock:
    """Keeps when the modelled GPU is free, and how far the run can be trusted.

    A forward begins when it is launched and the GPU is free. Its real computation happens at once,
    on this machine's CPU, and has to be done before the forward would begin to be waited for: if it
    took longer than the GPU would, the forward is counted as an overrun.

    Args:
        now, sleep: the machine's clock, in seconds.

    Attributes:
        free_at: when the GPU has computed all that was launched.
        forwards, overruns: numbers of forwards.
        device_seconds, overrun_seconds: time of all forwards, and of those that overran.
        starved_seconds: time in which the GPU had nothing to compute because the scheduler was
            still preparing the next batch.
        computing_seconds: CPU time of the forwards' real computation, which no GPU's host has.
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
            launched, computed: when its real computation began and had ended.
            follows: whether the scheduler went on from the forward before without becoming idle.
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
    """Hooks that notice what a scheduler's forwards compute, and delay their results."""

    def __init__(self, modelled: ModelledGpu, clock: Clock | None = None) -> None:
        self._modelled = modelled
        self._clock = clock or Clock()
        self._noticed: list[Forward] = []
        # The first query loads the tables, which takes up to a second.
        modelled.times.seconds(Forward(Prefills.of([(0, 1)]), 1, 1))
        modelled.times.seconds(Forward(decodes=1, context=1))

    def notice(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``ModelRunner.forward``, which knows what is computed."""

        @wraps(original)
        def forward(model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._noticed.append(describe(forward_batch))
            began = time.process_time()
            result = original(model_runner, forward_batch, *args, **kwargs)
            self._clock.computing_seconds += time.process_time() - began
            return result

        return forward

    def delay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Scheduler.run_batch``, which returns the result that the scheduler waits for."""

        @wraps(original)
        def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            self._noticed.clear()
            launched, follows = clock.now(), scheduler.last_batch is not None
            result = original(scheduler, batch, *args, **kwargs)
            if not self._noticed:
                return result
            seconds = sum(map(self._modelled.seconds, self._noticed))
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
            }
            return result

        return get_internal_state


class ResultEvent:
    """Stands for the CUDA event of a result that is copied to the host when the GPU has it."""

    def __init__(self, clock: Clock, moment: float) -> None:
        self._clock = clock
        self._moment = moment

    def record(self, *_stream: Any) -> None:
        """Do nothing: the moment is known already."""

    def query(self) -> bool:
        return self._clock.now() >= self._moment

    def synchronize(self) -> None:
        self._clock.wait_until(self._moment)


def describe(forward_batch: ForwardBatch) -> Forward:
    """Return what a ``ForwardBatch`` of SGLang computes.

    In a mixed batch, SGLang prefills one token for each request that decodes. A prefill of one
    token costs the same, so it need not be told apart.
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
    """Delays what the decode engine of a pair learns of the end of its requests' transfers.

    Here KV is copied between two processes, which is counted as no time. SGLang sends the KV of a
    chunk as soon as it is computed, and a link is many times faster than a prefill. So when the
    last chunk is computed, the earlier ones have arrived, and it is the last one that takes time,
    after those of other requests that are still on the link.

    Args:
        states: SGLang's numbers of a transfer's states.
        clock: of the link, on which one transfer follows the other.
    """

    def __init__(
        self, modelled: ModelledGpu, states: type[KVPoll], clock: Clock | None = None
    ) -> None:
        self._modelled = modelled
        self._states = states
        self._link = clock or Clock()

    def delay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DecodeTransferQueue.extend``, which takes the requests whose KV is awaited."""

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
        """Wrap a receiver's ``poll``, which returns the state of its transfer.

        Args: seconds: time that the transfer takes on an idle link.
        """
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
