"""Makes the transfers of KV in a PD pair take the time of the link between two modelled GPUs."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.modelled_gpu.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.disaggregation.base.conn import KVPoll

    from flashmoa_sglang.modelled_gpu.gpu import ModelledGpu


class TimedTransfers:
    """Delays what the decode engine of a pair learns of the end of its requests' transfers.

    Here KV is copied between two processes, which is counted as no time. SGLang sends the KV of a
    chunk as soon as it is computed, and a link is many times faster than a prefill. So when the
    last chunk is computed, the earlier ones have arrived, and it is the last one that takes time,
    after those of other requests that are still on the link.

    Args: states: SGLang's numbers of a transfer's states.
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
                decode_req.kv_receiver = TimedReceiver(
                    decode_req.kv_receiver,
                    self._states,
                    self._modelled.transfer_seconds(tokens),
                    self._link,
                )
            return original(queue, decode_reqs)

        return extend


class TimedReceiver:
    """Stands for SGLang's receiver of a request's KV, and reports its success later.

    Args:
        seconds: time that the transfer takes on an idle link.
        link: clock of the link, on which one transfer follows the other.
    """

    def __init__(self, receiver: Any, states: type[KVPoll], seconds: float, link: Clock) -> None:
        self._receiver = receiver
        self._states = states
        self._seconds = seconds
        self._link = link
        self._ends: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def poll(self) -> Any:
        """Return the state of the transfer."""
        state = self._receiver.poll()
        if state != self._states.Success:
            return state
        now = self._link.now()
        if self._ends is None:
            self._ends = self._link.launch(self._seconds, now, now)
        return state if now >= self._ends else self._states.Transferring
