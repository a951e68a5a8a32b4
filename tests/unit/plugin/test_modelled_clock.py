"""Test how the clocks of a modelled GPU and its link pass time, and delay results."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.modelled_gpu.gpu import Forward, Gpu, Model, ModelledGpu, Prefills
from flashmoa_sglang.modelled_gpu.hooks import Clock, TimedForwards, TimedTransfers, describe
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(*[st.integers(0, 1000).map(lambda n: n / 64)] * 3), min_size=1))
def test_forwards_run_one_after_the_other(steps: list[tuple[float, float, float]]) -> None:
    """Each begins when it is launched and the one before has ended."""
    clock, now, free, overruns, starved = Clock(), 0.0, 0.0, 0, 0.0
    for number, (idle, seconds, computing) in enumerate(steps):
        now += idle
        follows = number % 2 == 1
        starved += max(0.0, now - free) if follows else 0.0
        free = max(free, now) + seconds
        launched, now = now, now + computing
        assert clock.launch(seconds, launched, now, follows=follows) == free
        overruns += now > free
    assert (clock.forwards, clock.overruns) == (len(steps), overruns)
    assert clock.starved_seconds == starved
    assert clock.device_seconds == pytest.approx(sum(seconds for _, seconds, _ in steps))


class Machine:
    """A clock that passes only when somebody sleeps or computes."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def timed(machine: Machine, seconds: float) -> TimedForwards:
    gpu = ModelledGpu(
        Gpu("gpu", 1, 1, 1, 1), Model("model", {}), 1, SimpleNamespace(seconds=lambda _: seconds)
    )
    return TimedForwards(gpu, Clock(machine.now, machine.sleep))


def decoding(requests: int = 4, tokens: int = 400) -> Any:
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True)
    return SimpleNamespace(forward_mode=mode, batch_size=requests, seq_lens_sum=tokens)


def extending(prefixes: list[int], news: list[int], mixed: bool) -> Any:
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False, is_mixed=lambda: mixed)
    return SimpleNamespace(
        forward_mode=mode, extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=news
    )


def test_a_batch_is_described_by_its_prefills_and_decodes() -> None:
    assert describe(decoding()) == Forward(decodes=4, context=100)
    assert describe(extending([10, 10], [5, 5], mixed=False)) == Forward(Prefills(2, 10, 10))
    mixed = describe(extending([10, 99, 199], [5, 1, 1], mixed=True))
    assert mixed == Forward(Prefills(1, 5, 10), 2, 150)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_result_is_there_when_the_gpu_has_it(overlap: bool) -> None:
    machine = Machine()
    forwards = timed(machine, 1.0)
    compute = forwards.notice(lambda _runner, _batch: machine.sleep(0.25))

    def run(_scheduler: Any, batch: Any) -> Any:
        if batch is not None:
            compute(None, batch)
        return SimpleNamespace(copy_done=None)

    run_batch = forwards.delay(run)
    scheduler = SimpleNamespace(enable_overlap=overlap, last_batch=None)
    first = run_batch(scheduler, decoding())
    scheduler.last_batch = "the first"
    second = run_batch(scheduler, decoding())
    if overlap:
        # Both were launched at once, and the GPU computes them one after the other.
        assert machine.time == 0.5 and not first.copy_done.query()
        second.copy_done.synchronize()
        assert first.copy_done.query()
    assert machine.time == 2.0
    assert run_batch(scheduler, None).copy_done is None
    state = SimpleNamespace(internal_state={})
    told = forwards.report(lambda _scheduler, _request: state)(scheduler, None)
    assert told.internal_state["modelled_gpu"]["forwards"] == 2
    assert told.internal_state["modelled_gpu"]["overruns"] == 0
    assert told.internal_state["modelled_gpu"]["starved_seconds"] == 0
    machine.time += 0.5
    run_batch(scheduler, decoding())
    forwards.report(lambda _scheduler, _request: state)(scheduler, None)
    assert told.internal_state["modelled_gpu"]["starved_seconds"] == 0.5


def test_the_cpu_time_of_computing_forwards_is_counted() -> None:
    forwards = timed(Machine(), 1.0)
    state = SimpleNamespace(internal_state={})

    def compute(_runner: Any, _batch: Any) -> None:
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass

    forwards.notice(compute)(None, decoding())
    told = forwards.report(lambda _scheduler, _request: state)(None, None)
    assert told.internal_state["modelled_gpu"]["computing_seconds"] >= 0.01


def test_kv_arrives_when_the_link_has_sent_it() -> None:
    machine = Machine()
    model = Model("model", {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 250})
    # A token's KV has 1,000 bytes, and each of two ranks sends 50,000 bytes per second.
    gpu = ModelledGpu(Gpu("gpu", 1, 1, 1, 50_000), model, 2, SimpleNamespace())
    numbers: Any = SimpleNamespace(Success=4, Transferring=3)
    transfers = TimedTransfers(gpu, numbers, Clock(machine.now, machine.sleep))
    queue = SimpleNamespace(
        scheduler=SimpleNamespace(server_args=SimpleNamespace(chunked_prefill_size=200))
    )
    states = [3, 4, 4]
    awaited = [
        SimpleNamespace(
            req=SimpleNamespace(origin_input_ids=range(tokens)),
            kv_receiver=SimpleNamespace(poll=lambda i=i: states[i], room=i),
        )
        for i, tokens in enumerate((100, 100, 450))
    ]
    transfers.delay(lambda _queue, requests: requests)(queue, awaited)
    poll = [each.kv_receiver.poll for each in awaited]
    assert awaited[2].kv_receiver.room == 2
    assert [one() for one in poll] == [3, 3, 3]
    machine.time = 1.0
    assert [one() for one in poll] == [3, 4, 3]
    # Of the third, the last chunk of 50 tokens was sent after that.
    machine.time = 1.5
    assert [one() for one in poll] == [3, 4, 4]
    states[0] = 0
    assert poll[0]() == 0
