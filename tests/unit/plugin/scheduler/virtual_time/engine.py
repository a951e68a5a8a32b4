"""``Engine``: SGLang's overlap loop on a modelled GPU, with the plugin's scheduler or without."""

from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Prefills
from flashmoa_sglang.costs import STEP_SIZES, Costs
from flashmoa_sglang.messages import RequestMark, StreamTokens
from flashmoa_sglang.scheduler import apply, streams
from flashmoa_sglang.scheduler.admission import allocatable_requests, order_queue
from flashmoa_sglang.scheduler.request import is_increment, state_of
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE

from tests.unit.plugin.scheduler.fakes import PIN, FakeScheduler, opening, request
from tests.unit.plugin.scheduler.virtual_time.clock import Clock, Event

# Seconds from a client to the scheduler, and from a result to the client.
TO_SCHEDULER, TO_CLIENT = 0.006, 0.003
# More tokens than any workload needs.
POOL = 1 << 30
# The numbers of decodes in the steps that an engine measures.
DECODES = (1, 8, 32, 128)


class CpuTimes:
    """The times of forwards of a small model on a CPU core: each token takes 1 ms."""

    def seconds(self, forward: Forward) -> float:
        return 0.012 + 0.001 * (forward.prefills.tokens + forward.decodes)


Times = CpuTimes | MeasuredTables


@cache
def tables(gpu: str, model: str = "") -> Times:
    return CpuTimes() if gpu == "cpu" else MeasuredTables(gpu, model)


def measured_costs(times: Times) -> Costs:
    """Return the costs that an engine measures when it starts."""

    def seconds(decodes: int, context: int, tokens: int, cached: int = 0) -> float:
        prefills = Prefills.of([(cached, tokens)] if tokens else [])
        return times.seconds(Forward(prefills, decodes, context))

    rows = [
        (decodes, tokens, seconds(decodes, 10, tokens))
        for decodes in DECODES
        for tokens in (0, *(size - decodes for size in STEP_SIZES))
        if not tokens or tokens >= 16
    ]
    read = 8192
    return Costs(
        tuple((n, seconds(0, 0, n)) for n in (1, 16, 64, 128, 256, 512, 1024, 4096, 8192)),
        seconds(1, 10, 0),
        tuple(rows),
        per_kv_token=(seconds(32, read, 0) - seconds(32, 10, 0)) / (32 * read),
        per_pair=(seconds(0, 0, 1024, read) - seconds(0, 0, 1024)) / (1024 * read),
    )


@contextmanager
def overlapping_release() -> Generator[None]:
    """Publish and pin KV as the overlap schedule does, on the fixture ``fake_release``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RELEASE, "cached_tokens", lambda req: req.cached)
        patch.setattr(RELEASE, "uncached_tokens", lambda tree, req: tree.engine.uncached(req))
        patch.setattr(RELEASE, "key_of", lambda *_: None)
        patch.setattr(RELEASE, "publish", lambda *_: None)
        patch.setattr(streams, "pin_published", lambda *_: PIN)
        patch.setattr(streams, "match_and_pin", lambda *_: (PIN, 0))
        yield


@dataclass(slots=True)
class Answer:
    """An answer that is being decoded: its tokens and their times at the client, and its end."""

    times: list[float] = field(default_factory=list)
    over: Event = field(default_factory=Event)
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """A forward: ``rows`` of (cached tokens, new tokens), and requests that get a token by it."""

    rows: list[tuple[int, int]]
    decoding_reqs: list[Any]
    complete: list[Any] = field(default_factory=list)
    reqs: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def extend_num_tokens(self) -> int:
        return sum(new for _, new in self.rows)


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is started."""

    plugin: bool = True
    chunk: int = 8192  # --chunked-prefill-size
    mixed: bool = False  # --enable-mixed-chunk
    max_running: int = 64  # --max-running-requests
    told: bool = True  # Clients say how long answers will be.
    options: Options = field(default_factory=lambda: Options(intra_turn="off"))
    no_rides: str = ""  # Why SGLang mixes nothing with decodes.
    costs: Costs | None = None  # Of forwards; None: as measured.


class Engine:
    """An engine whose forwards take the time of a GPU.

    While a forward runs, the next one is planned; it starts when the first one ends, and then the
    results of the first one are processed.
    """

    def __init__(self, clock: Clock, times: Times, setting: Setting) -> None:
        self.clock, self._times, self._setting = clock, times, setting
        self._scheduler = scheduler = FakeScheduler(free=POOL, total=POOL)
        scheduler.tree_cache.engine = self
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = setting.chunk, setting.mixed
        scheduler.max_running_requests = setting.max_running
        scheduler.policy = SimpleNamespace(
            enable_priority_scheduling=False, priority_sign=1, tree_cache=scheduler.tree_cache
        )
        self.state = scheduler.flashmoa
        self.state.options, self.state.no_rides = setting.options, setting.no_rides
        self.state.costs = setting.costs or measured_costs(times)
        self._running: Batch | None = None
        self._next: Batch | None = None
        # The requests whose prompts are complete, which decode from the next step on.
        self._prefilled: list[Any] = []

    def ask(
        self, prompt: int, output: int, stream: str | None = None, ids: Sequence[int] = ()
    ) -> Answer:
        """Send a request that decodes ``output`` tokens: ``ids``, and others after them."""
        answer = Answer()
        req = request(prompt, output if self._setting.told else 2048)
        told = output if self._setting.told else None
        mark = RequestMark(stream, final=stream is not None, expected_output=told)
        del req.flashmoa
        req.sampling_params.custom_params = mark.to_custom_params()
        req.rid, req.cached, req.computed, req.in_flight = id(req), 0, 0, 0
        req.answer, req.ids, req.output, req.priority = answer, ids, output, None

        def arrive() -> None:
            if stream is not None:
                self.state.streams.claim(stream)
            self._scheduler.waiting_queue.append(req)
            self._wake()

        self.clock.after(TO_SCHEDULER, arrive)
        return answer

    def open(self, stream: str, known: int, output: int) -> None:
        """Open a stream with ``known`` tokens."""

        def arrive() -> None:
            expected = output if self._setting.told else 0
            make = self._scheduler.make_request
            self.state.streams.open(stream, opening(stream), make, expected)
            self._extend(stream, range(known), grows=False)

        self.clock.after(TO_SCHEDULER, arrive)

    def append(self, stream: str, tokens: Sequence[int]) -> None:
        self.clock.after(TO_SCHEDULER, lambda: self._extend(stream, tokens, grows=True))

    def _extend(self, stream: str, tokens: Sequence[int], *, grows: bool) -> None:
        ids = array("q", tokens).tobytes()
        self.state.streams.extend(StreamTokens(((stream, ids, grows),)))
        self._wake()

    def prefilled(self, stream: str) -> int:
        """Return the number of a stream's tokens that have KV."""
        return self.state.streams._open[stream].prefilled

    def uncached(self, req: Any) -> int:
        return len(req.origin_input_ids) - self._prefix(req)

    def _prefix(self, req: Any) -> int:
        stream = self.state.streams._open.get(state_of(req).stream or "")
        return min(stream.prefilled, len(req.origin_input_ids) - 1) if stream else 0

    def _wake(self) -> None:
        if self._running is None and (batch := self._plan()) is not None:
            self._launch(batch)
            self._next = self._plan()

    def _launch(self, batch: Batch) -> None:
        self._running, self._next = batch, None
        self.clock.after(batch.seconds, self._finish)

    def _finish(self) -> None:
        done, following = self._running, self._next
        assert done is not None
        self._running = None
        if following is not None:
            self._launch(following)
        self._process(done)
        if following is not None:
            self._next = self._plan()
        else:
            self._wake()

    def _process(self, batch: Batch) -> None:
        running = self._scheduler.running
        for req in (*batch.complete, *batch.decoding_reqs):
            req.in_flight -= 1
            position = len(req.output_ids)
            token = req.ids[position] if position < len(req.ids) else 1
            req.output_ids.append(token)
            is_last = position + 1 == req.output
            if is_last:
                self._prefilled = [one for one in self._prefilled if one is not req]
                running.reqs[:] = [one for one in running.reqs if one is not req]
                running.batch_is_full = False
                if (stream := state_of(req).stream) is not None:
                    self.state.streams.end(stream)
            self.clock.after(TO_CLIENT, partial(self._deliver, req.answer, token, is_last))
        if any(map(is_increment, batch.reqs)):
            self.state.increments_ended = True

    def _deliver(self, answer: Answer, token: int, is_last: bool) -> None:
        answer.times.append(self.clock.now)
        answer.tokens.append(token)
        if is_last:
            answer.over.happen()

    def _plan(self) -> Batch | None:
        """Return the next forward, as SGLang's ``get_next_batch_to_run``."""
        scheduler = self._scheduler
        scheduler.running.reqs += self._prefilled
        self._prefilled = []
        if self._setting.plugin:
            batch, _ = apply.next_prefill_batch(self._build, scheduler)
        else:
            batch, _ = self._build(scheduler)
        if batch is None:
            decodes = self._decodes()
            if not decodes:
                return None
            batch = Batch([], decodes)
            self.state.work += self.state.costs.decode_weight
        self._prefilled = batch.complete
        kv = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.decoding_reqs)
        decodes = len(batch.decoding_reqs)
        forward = Forward(Prefills.of(batch.rows), decodes, round(kv / decodes) if decodes else 0)
        batch.seconds = self._times.seconds(forward)
        for req in (*batch.complete, *batch.decoding_reqs):
            req.in_flight += 1
        return batch

    def _decodes(self) -> list[Any]:
        """Return the requests that have tokens left to decode, after the forwards in flight."""
        running = self._scheduler.running.reqs
        return [req for req in running if len(req.output_ids) + req.in_flight < req.output]

    def _places(self, running: int) -> int:
        left = self._setting.max_running - running
        if not self._setting.plugin:
            return left
        return allocatable_requests(lambda *_: left, self._scheduler, running)

    def _build(self, scheduler: Any) -> tuple[Batch | None, Any]:
        """Build a prefill batch, as SGLang's ``_get_new_batch_prefill_raw`` and its adder."""
        running, queue = scheduler.running, scheduler.waiting_queue
        if (running.batch_is_full or not queue) and scheduler.chunked_req is None:
            return None, running
        places = self._places(len(running.reqs))
        if places <= 0 and scheduler.chunked_req is None:
            running.batch_is_full = True
            return None, running
        if self._setting.plugin:
            order_queue(None, scheduler.policy, queue)
        left = scheduler.chunked_prefill_size
        left -= len(running.reqs) if scheduler.is_mixed_chunk else 0
        batch = Batch([], self._decodes() if scheduler.is_mixed_chunk else [])
        if (chunked := scheduler.chunked_req) is not None and left > 0:
            left -= self._add(batch, chunked, chunked.computed, left)
        for req in list(queue):
            if left <= 0 or scheduler.chunked_req is not None:
                break
            if len(batch.reqs) >= places:
                running.batch_is_full = True
                break
            if is_increment(req) and self.uncached(req) > left:
                break
            left -= self._add(batch, req, self._prefix(req), left)
        joined = set(map(id, batch.reqs))
        scheduler.waiting_queue = [req for req in queue if id(req) not in joined]
        return (batch if batch.reqs else None), running

    def _add(self, batch: Batch, req: Any, cached: int, left: int) -> int:
        """Add a request's prompt up to ``left`` tokens; return the number of new tokens."""
        rest = len(req.origin_input_ids) - cached
        new = min(rest, left)
        req.cached, req.computed = cached, cached + new
        batch.rows.append((cached, new))
        batch.reqs.append(req)
        self._scheduler.chunked_req = None if new == rest else req
        if new == rest and not is_increment(req):
            batch.complete.append(req)
        return new
