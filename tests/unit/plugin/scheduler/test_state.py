"""What a scheduler does with messages, how results are sent, and how long forwards took."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.messages import KvQuery, MeasuredCosts, RequestMark, StreamProgress
from flashmoa_sglang.moe import asyncep
from flashmoa_sglang.moe.saturation import LayerTimes
from flashmoa_sglang.scheduler import results, state, timer
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE

from tests.unit.plugin.scheduler.fakes import COSTS, PIN, FakeScheduler, request

pytestmark = pytest.mark.usefixtures("fake_release", "any_increment")


class Streamer:
    """Stands for SGLang's output streamer: notes requests and the process they are sent to."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.tree_cache = scheduler.tree_cache
        self.send_to_detokenizer: Any = "detokenizer"
        self.sent: list[tuple[list[Any], bool, Any]] = []

    def stream_output(self, reqs: list[Any], return_logprob: bool, skip_req: Any) -> None:
        assert skip_req is None
        self.sent.append((reqs, return_logprob, self.send_to_detokenizer))

    def send(self, *reqs: Any, logprob: bool = False) -> list[tuple[list[Any], bool, Any]]:
        """Send the outputs of requests. Return the requests that SGLang sends for this."""
        self.sent.clear()
        results.stream_output(Streamer.stream_output, self, [*reqs], logprob)
        assert self.send_to_detokenizer == "detokenizer"
        return [*self.sent]


@pytest.fixture
def streamer(scheduler: FakeScheduler) -> Streamer:
    return Streamer(scheduler)


def prefill(output: int = 0, **mark: Any) -> Any:
    """Make a request with a mark."""
    req = request(10, output)
    req.flashmoa.mark, req.return_logprob = RequestMark(**mark), False
    return req


def test_increments_send_only_progress(scheduler: FakeScheduler, streamer: Streamer) -> None:
    scheduler.open_stream("a", 100)
    scheduler.sent.clear()
    (increment,) = scheduler.streams.make(1000, 1000, 16)
    scheduler.streams.settle(increment)
    chat = request(20, 5)
    assert streamer.send(chat, increment, logprob=True) == [([chat], True, "detokenizer")]
    assert scheduler.sent == [StreamProgress((("a", 100, 100, 0.0, 0.0),))]
    assert not scheduler.streams.can_prefill_more()
    assert streamer.send(increment) == []


def test_an_end_is_noted_once(scheduler: FakeScheduler, streamer: Streamer) -> None:
    """The overlap schedule sends an ended request twice. SGLang passes on only the first."""
    scheduler.flashmoa.options = Options(hold_tool_calls=60)
    req = request(20, 5, 5, stream="a", final=True)
    req.finished = lambda: True
    streamer.send(req)
    req.finished_output = True
    streamer.send(req)
    assert scheduler.streams.returning_tokens() == 25


@pytest.mark.parametrize(("seconds", "kept"), [(0, 0), (60, 256)])
def test_returning_agents_are_limited(scheduler: FakeScheduler, seconds: float, kept: int) -> None:
    scheduler.flashmoa.options = Options(hold_tool_calls=seconds)
    streams = scheduler.streams

    def end(rid: str, reason: str = "stop") -> None:
        req = request(20, 5, 5, stream="a", final=True)
        req.rid, req.finished_reason.to_json = rid, lambda: {"type": reason}
        streams.note_end(req)

    for number in range(300):
        end(str(number))
    assert streams.returning_tokens() == 25 * kept
    scheduler.flashmoa.work = 1000
    end("a")
    # These ends call no tool.
    for reason in ("length", "abort"):
        assert streams.returning_tokens() == 25 * min(kept, 1)
        end(reason, reason)
    assert streams.returning_tokens() == 25 * min(kept, 1)
    # The HTTP process says that no tool was called.
    streams.end("a")
    assert streams.returning_tokens() == 0


def test_answers_without_text_skip_the_detokenizer(
    scheduler: FakeScheduler, streamer: Streamer
) -> None:
    direct = scheduler.flashmoa.tokenizer_channel
    chat, silent, final = request(20, 5), prefill(own=True), prefill(stream="a", final=True)
    # A client's request with a hint.
    hinted = prefill(expected_output=5)
    assert streamer.send(chat, silent, final, hinted) == [
        ([chat, final, hinted], False, "detokenizer"),
        ([silent], False, direct),
    ]
    # A scored prompt is answered with log-probabilities.
    silent.return_logprob = True
    assert streamer.send(silent, logprob=True) == [([silent], True, direct)]
    # SGLang may have something else to send, without requests.
    assert streamer.send() == [([], False, "detokenizer")]
    # A pair's prefill engine samples a token.
    sampled, hinted = prefill(output=1, own=True), prefill(output=1, expected_output=5)
    assert streamer.send(sampled)[0][2] == "detokenizer"
    scheduler.flashmoa.role = "prefill"
    assert streamer.send(sampled)[0][2] == direct
    assert streamer.send(hinted)[0][2] == "detokenizer"
    sampled.return_logprob = True
    assert streamer.send(sampled, logprob=True)[0][2] == "detokenizer"


@pytest.mark.parametrize("prefills", [True, False], ids=["prefill", "decode"])
def test_increments_end_with_their_forward(prefills: bool) -> None:
    first, increment, second, done = (
        request(*sizes, stream=stream)
        for *sizes, stream in ((10, 5, None), (10, 0, "a"), (20, 5, None), (30, 5, None))
    )
    mode = SimpleNamespace(is_extend=lambda: prefills)
    batch = SimpleNamespace(reqs=[first, done, increment, second], forward_mode=mode)

    def keep(batch: Any, keep_indices: list[int] | None = None) -> None:
        if keep_indices is None:
            keep_indices = [n for n, req in enumerate(batch.reqs) if req is not done]
        batch.reqs = [batch.reqs[n] for n in keep_indices]

    results.drop_increments(keep, batch)
    assert batch.reqs == ([first, second] if prefills else [first, increment, second])
    calls: list[Any] = []
    batch.reqs = []
    results.drop_increments(lambda *_: calls.append(1), batch)
    assert calls == [1]


class Clock:
    """A clock that a test moves on by milliseconds."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now / 1000


@dataclass
class Event:
    """The event of a result ``at`` a moment in milliseconds. The scheduler can wait for it."""

    clock: Clock
    at: float

    def query(self) -> bool:
        return self.clock.now >= self.at

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)


@dataclass
class Device:
    """Computes forwards one after the other, as a GPU does; ``launching`` takes milliseconds."""

    scheduler: FakeScheduler
    clock: Clock
    launching: float = 1.0
    free_at: float = 0.0

    def run(self, batch: Any, milliseconds: float) -> Any:
        def launch(_scheduler: Any, _batch: Any) -> Any:
            self.free_at = max(self.free_at, self.clock.now) + milliseconds
            self.clock.now += self.launching
            return SimpleNamespace(copy_done=Event(self.clock, self.free_at))

        return results.run_batch(launch, self.scheduler, batch)

    def process(self, batch: Any, result: Any, output: float = 2.0) -> None:
        """Process a result, which takes ``output`` milliseconds after the forward's end."""

        def work(scheduler: Any, _batch: Any, result: Any) -> None:
            if result.copy_done is not None:
                result.copy_done.synchronize()
            self.clock.now += output
            scheduler.flashmoa.timer.stop(batch.reqs)

        results.process_result(work, self.scheduler, batch, result)

    def compute(self, *batches: Any, milliseconds: float = 10) -> None:
        """Run batches one after the other, and process each result at once."""
        for batch in batches:
            self.process(batch, self.run(batch, milliseconds))

    def told(self) -> list[tuple[int, ...]]:
        """Return the only report on forwards, with their milliseconds. A timed one is the last."""
        (report,) = self.scheduler.sent
        self.scheduler.sent.clear()
        return [(*forward[:4], round(1000 * forward.seconds)) for forward in report.forwards]


@pytest.fixture
def device(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> Device:
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    # It would import SGLang.
    monkeypatch.setattr(asyncep, "own_offloader", lambda: None)
    return Device(scheduler, clock)


def decodes(*kv: int) -> Any:
    """Make a batch of decoding requests with ``kv`` tokens each."""
    mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True)
    return SimpleNamespace(
        reqs=[request(tokens, 5) for tokens in kv],
        forward_mode=mode,
        seq_lens_cpu=torch.tensor(kv),
        is_extend_in_batch=False,
    )


def prefills(*rows: tuple[int, int], kv: Sequence[int] = (), timed: bool = False) -> Any:
    """Make a batch of prompts and decodes; ``rows`` have a prompt's cached and new tokens."""
    decoding = decodes(*kv).reqs
    return SimpleNamespace(
        reqs=[*(prefill(timed=timed) for _ in rows), *decoding],
        forward_mode=SimpleNamespace(is_extend=lambda: True, is_decode=lambda: False),
        decoding_reqs=decoding or None,
        prefix_lens=[cached for cached, _ in rows] + [tokens - 1 for tokens in kv],
        extend_lens=[new for _, new in rows] + [1] * len(kv),
    )


def test_forwards_take_from_result_to_result(scheduler: FakeScheduler, device: Device) -> None:
    batches = [
        (decodes(100, 200), 10),
        (prefills((0, 50), (100, 20)), 15),
        (prefills((70, 30), kv=[101, 201]), 12),
        (decodes(102, 202), 10),
        (prefills((0, 40), timed=True), 20),
    ]
    # The overlap schedule launches the next forward before it processes a result.
    before: Any = None
    for batch, milliseconds in [*batches, (None, 0)]:
        result = None if batch is None else device.run(batch, milliseconds)
        if before is not None:
            device.process(*before)
        before = batch, result
    assert device.told() == [
        (2, 300, 0, 0, 10),
        (0, 0, 70, 2000, 15),
        (2, 302, 30, 2100, 12),
        (2, 304, 0, 0, 10),
        (0, 0, 40, 0, 20),
    ]
    assert scheduler.flashmoa.timer.seconds == pytest.approx(0.02)


def test_idle_time_counts_for_no_forward(device: Device) -> None:
    for timed in (False, True):
        device.clock.now += 500
        device.compute(prefills((0, 40), timed=timed), milliseconds=20)
    assert device.told() == [(0, 0, 40, 0, 20)] * 2


@pytest.mark.parametrize(
    ("forwards", "waits", "told"),
    [
        # The scheduler looks late at the first result, but not at the second: its start is unknown.
        (10, (13, 0), [(100, 15), (0, 20)]),
        # The scheduler itself is late: its steps are told.
        (1, (13, 8), [(100, 15), (101, 10), (0, 20)]),
    ],
)
def test_late_schedulers_tell_known_times(
    device: Device, forwards: int, waits: tuple[int, int], told: list[tuple[int, int]]
) -> None:
    batches = decodes(100), decodes(101)
    results = [device.run(batch, forwards) for batch in batches]
    for batch, result, wait in zip(batches, results, waits, strict=True):
        device.clock.now += wait
        device.process(batch, result)
    device.compute(prefills((0, 40), timed=True), milliseconds=20)
    assert [(kv, took) for _, kv, _, _, took in device.told()] == told


def test_a_cpu_computes_while_it_launches(device: Device) -> None:
    device.launching = 30
    batches = [decodes(100), prefills((0, 40), timed=True)]
    results = [device.run(batch, 0) for batch in batches]
    for batch, result in zip(batches, results, strict=True):
        result.copy_done = torch.cpu.Event()
        device.process(batch, result)
    assert [forward[-1] for forward in device.told()] == [30, 30]


def test_without_overlap_a_launch_begins_it(device: Device) -> None:
    batch = prefills((0, 40), timed=True)
    result = device.run(batch, 20)
    result.copy_done = None
    device.process(batch, result, output=19)
    assert device.told() == [(0, 0, 40, 0, 20)]


def test_pipeline_stages_tell_lone_forwards(
    scheduler: FakeScheduler, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make new results, and other stages' microbatches run between two of their own."""
    monkeypatch.setattr(scheduler.flashmoa.timer, "_has_stages", True)
    batches = decodes(100), decodes(101)
    results = [device.run(batch, 10) for batch in batches]
    for batch, result in zip(batches, results, strict=True):
        device.process(batch, SimpleNamespace(copy_done=result.copy_done))
    device.clock.now += 50
    device.compute(prefills((0, 40), timed=True), milliseconds=20)
    assert [forward[1] for forward in device.told()] == [100, 0]


def test_atypical_forwards_are_not_described(scheduler: FakeScheduler) -> None:
    nothing = (0, 0, 0, 0, 0.0)
    # A batch of many short prompts takes the time of all tokens.
    assert timer.describe(scheduler, prefills((0, 1), (0, 1))) == nothing
    assert timer.describe(scheduler, prefills((0, 1)))[2] == 1
    held_up = decodes(100)
    held_up.is_extend_in_batch = scheduler.require_mlp_sync = True
    assert timer.describe(scheduler, held_up) == nothing
    idle = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False)
    assert timer.describe(scheduler, SimpleNamespace(forward_mode=idle, reqs=[])) == nothing


def test_known_costs_need_no_times(scheduler: FakeScheduler, device: Device) -> None:
    scheduler.flashmoa.costs = COSTS
    device.compute(decodes(100), prefills((0, 40), timed=True))
    assert not device.told()
    assert scheduler.flashmoa.timer.seconds == pytest.approx(0.01)


def test_layers_of_a_timed_forward_are_told(
    scheduler: FakeScheduler, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    layers = LayerTimes(40, 0.01, 0.002)
    offloader = SimpleNamespace(time_next=asked.append, take_times=lambda: layers)
    monkeypatch.setattr(asyncep, "own_offloader", lambda: offloader)
    timed = decodes(100)
    timed.reqs[0].flashmoa.mark = RequestMark(timed=True)
    device.compute(decodes(100), prefills((0, 30)), prefills((0, 40), timed=True), timed)
    assert asked == [40]
    assert [report.layers for report in scheduler.sent] == [layers]
    # Decodes lengthen the computing time of a layer.
    device.compute(prefills((0, 50), kv=[100], timed=True))
    assert asked == [40] and scheduler.sent[1].layers is None


def decode(prompt: int = 40, *, logprob: bool = False, result: bool = True) -> Any:
    """Make a request that decodes its fifth token, which is known if a ``result`` was processed."""
    return SimpleNamespace(return_logprob=logprob, result=result, length=prompt + 5)


def mixed(*reqs: Any, speculative: bool = False) -> Any:
    """Mix decodes with a prefill of 30 tokens behind 70 cached ones. Return the batch."""

    def original(batch: Any, running: Any) -> None:
        batch.return_logprob = running.return_logprob
        batch.extend_lens += [1] * len(running.reqs)
        batch.extend_logprob_start_lens += [0] * len(running.reqs)
        # As SGLang 0.5.12 does under the overlap schedule.
        batch.prefix_lens += [req.length - (not req.result) for req in running.reqs]

    batch = SimpleNamespace(
        reqs=[SimpleNamespace(return_logprob=False), *reqs],
        extend_lens=[30],
        extend_logprob_start_lens=[30],
        prefix_lens=[70],
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculative),
    )
    lengths = None if speculative else torch.tensor([req.length for req in reqs])
    running = SimpleNamespace(reqs=[*reqs], return_logprob=False, seq_lens_cpu=lengths)
    results.mix(original, batch, running)
    return batch


def test_mixed_decodes_return_output_logprobs() -> None:
    batch = mixed(decode(), decode(logprob=True))
    assert batch.return_logprob and batch.extend_logprob_start_lens == [30, 1, 1]
    assert not mixed(decode(), decode()).return_logprob


@pytest.mark.parametrize(("speculative", "places"), [(False, [70, 24, 64]), (True, [70, 24, 65])])
def test_mixed_decodes_are_at_their_ends(*, speculative: bool, places: list[int]) -> None:
    """Also if the last token is not known yet. Speculative decoding is left to SGLang."""
    batch = mixed(decode(20, result=False), decode(60), speculative=speculative)
    assert batch.prefix_lens == places


@pytest.fixture
def attached() -> FakeScheduler:
    """A scheduler with the plugin's state, attached as at SGLang's start."""
    made: Any = FakeScheduler()
    made._request_dispatcher = SimpleNamespace(_mapping={})
    state.attach(None, made)
    return made


def test_a_final_request_ends_increments(attached: FakeScheduler) -> None:
    for stream in "ab":
        attached.open_stream(stream, 50)
    custom = RequestMark("a", final=True).to_custom_params()
    final = SimpleNamespace(rid="r", sampling_params=SimpleNamespace(custom_params=custom))
    handled: list[Any] = []
    state.handle_request(lambda _, message: handled.append(message), attached, final)
    assert handled == [final]
    assert attached.streams.leading_tokens(None)[0] == 50


@pytest.mark.parametrize("flushed", [True, False])
def test_flushed_streams_are_prefilled_again(attached: FakeScheduler, flushed: bool) -> None:
    attached.open_stream("a", 50)
    for increment in attached.streams.make(100, 100, 16):
        attached.flashmoa.pins.replace("a", PIN)
        attached.streams.settle(increment)
    assert state.flush_cache(lambda _: flushed, attached) is flushed
    assert len(attached.flashmoa.pins) == (0 if flushed else 1)
    assert attached.streams.can_prefill_more() == flushed
    # The tree was reset, with its locks.
    assert attached.tree_cache.free == 50_000


@pytest.mark.parametrize("costs", [None, COSTS])
@pytest.mark.parametrize(
    ("waits_for", "together", "tokens"), [(None, False, None), (500, False, 500), (500, True, None)]
)
def test_measured_costs_and_saturation_are_used(
    attached: Any, costs: Costs | None, waits_for: int | None, together: bool, tokens: int | None
) -> None:
    """A rank that steps together with other ranks does not wait on its own."""
    attached.require_mlp_sync = together
    message = MeasuredCosts(costs, waits_for)
    attached._request_dispatcher._mapping[MeasuredCosts](message)
    assert attached.flashmoa.costs is (costs or UNMEASURED)
    assert getattr(attached.flashmoa.saturation_gate, "tokens", None) == tokens


@pytest.mark.parametrize(("agree", "stages"), [(False, 1), (True, 1), (False, 2)])
def test_ranks_that_step_together_say_so(
    attached: Any, monkeypatch: pytest.MonkeyPatch, agree: bool, stages: int
) -> None:
    attached.require_mlp_sync = agree
    monkeypatch.setattr(RELEASE, "pipeline_stages", lambda _: stages)
    monkeypatch.setattr(asyncep, "own_offloader", lambda: None)
    pool = SimpleNamespace(device="cpu")
    attached.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: pool)
    attached._request_dispatcher._mapping[KvQuery](KvQuery(7))
    assert attached.sent[-1].query == 7
    assert attached.sent[-1].steps_together == (agree or stages > 1)


class ReqToTokenPool:
    def __init__(self, size: int, dtype: str) -> None:
        self.size, self.dtype = size, dtype


class HybridReqToTokenPool(ReqToTokenPool):
    """The table of a model with a state besides KV."""


@pytest.mark.parametrize(("table", "rows"), [(ReqToTokenPool, 64 + 16), (HybridReqToTokenPool, 64)])
def test_the_table_has_rows_for_increments(table: type[ReqToTokenPool], rows: int) -> None:
    pool = table.__new__(table)
    state.add_rows(ReqToTokenPool.__init__, pool, 64, dtype="int32")
    assert (pool.size, pool.dtype) == (rows, "int32")
    # The buffers of forwards are as large as the usual table.
    assert state.largest_batch(lambda *_: 64, "runner") == 64 + 16


def test_counts_are_reported_by_their_growth(attached: FakeScheduler) -> None:
    own, increments = attached.flashmoa, (("a", 5, 5, 0.1, None),)
    own.streams.report()
    assert attached.sent == []
    own.duplicates_avoided = 30
    own.streams.report()
    own.duplicates_avoided, own.pins.gave_way = 50, 2
    own.streams._progress.append(*increments)
    own.streams.report()
    assert attached.sent == [StreamProgress((), (), 30, 0), StreamProgress(increments, (), 20, 2)]
