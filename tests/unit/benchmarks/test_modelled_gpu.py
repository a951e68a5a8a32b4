"""Test the time that a modelled GPU takes, and how its clock passes it."""

import json
import time
from collections import defaultdict
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from flashmoa_bench.modelled_gpu.gpu import (
    Forward,
    Gpu,
    MeasuredTables,
    Model,
    ModelledGpu,
    Prefills,
    Roofline,
    kv_tokens,
    memory_fraction,
    modelled_gpu,
)
from flashmoa_bench.modelled_gpu.hash_model import write_hash_model
from flashmoa_bench.modelled_gpu.hooks import Clock, TimedForwards, TimedTransfers, describe
from flashmoa_bench.modelled_gpu.virtual_gpu import Bandwidths, VirtualGpu
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT

QWEN = "Qwen/Qwen3-32B"
REQUESTS = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 4000)), min_size=1)


@pytest.fixture(scope="module")
def tables() -> MeasuredTables:
    return MeasuredTables("a100_sxm", QWEN)


@given(REQUESTS)
def test_equal_prefills_cost_as_much_as_real_ones(requests: list[tuple[int, int]]) -> None:
    equal = Prefills.of(requests)
    assert equal.requests == len(requests)
    assert equal.tokens == sum(new for _, new in requests)
    compared = sum(new * (cached + new / 2) for cached, new in requests)
    of_equal = equal.tokens * (equal.cached + equal.tokens / equal.requests / 2)
    if equal.cached:
        assert of_equal == pytest.approx(compared, abs=equal.tokens)
    else:
        # Requests of unequal length compare more than equal ones with nothing cached.
        assert of_equal <= compared + equal.tokens
    assert Prefills.of([]) == Prefills.of([(9, 0)]) == Prefills()


def prefill(cached: int, new: int) -> Forward:
    return Forward(Prefills.of([(cached, new)]))


def test_measured_times_are_those_of_the_package(tables: MeasuredTables) -> None:
    for new in (1, 2048):
        expected = tables.engine.predict_prefill_latency(1, new, 0) / 1000
        assert tables.seconds(prefill(0, new)) == pytest.approx(expected)
    for requests, context in ((1, 100), (8, 2000), (64, 4000)):
        expected = tables.engine.predict_decode_latency(requests, context) / 1000
        assert tables.seconds(Forward(decodes=requests, context=context)) == pytest.approx(expected)
    assert tables.seconds(Forward()) == 0


def nvidia_rows(gpu: str, kind: str) -> dict[tuple[int, ...], float]:
    """Return NVIDIA's seconds by requests, query heads, KV heads, and tokens of a request."""
    folder = Path(str(files("aiconfigurator_core"))) / "systems" / "data" / gpu / "attention"
    (file,) = folder.glob(f"sglang/*/{kind}_attention_perf.parquet")
    wanted = {"head_dim": 128, "kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16"}
    table: Any = pandas.read_parquet(file)
    for name, value in {**wanted, "window_size": 0}.items():
        table = table[table[name] == value] if name in table else table
    heads = zip(table.batch_size, table.num_heads, table.num_key_value_heads, strict=True)
    tokens = table.isl + table.step
    return {
        (*each, length): milliseconds / 1000
        for each, length, milliseconds in zip(heads, tokens, table.latency, strict=True)
    }


def errors_behind_prefixes(gpu: str) -> dict[str, list[float]]:
    """Return modelled over NVIDIA's times of attention kernels, less 1, where rows do equal work.

    Decodes: N tokens of a request with 8 KV heads do the work of 8 requests with a single KV head
    each and N times the query heads: equal queries, equal KV. Prompts: a prompt as long as the
    prefix, with fewer heads, compares the same number of pairs of tokens. The package's times lack
    this project's part.
    """
    decodes, prompts = nvidia_rows(gpu, "generation"), nvidia_rows(gpu, "context")
    errors: dict[str, list[float]] = defaultdict(list)
    for name, heads in (("Qwen/Qwen3-8B", 32), (QWEN, 64)):
        tables, layers = MeasuredTables(gpu, name), Model.load(name).layers
        for new, cached in product((16, 32, 64, 128, 256, 512), (512, 1024, 2048, 4096, 8192)):
            queries, kind = new * heads // 8, "decodes"
            row = decodes.get((8, queries, 1, cached))
            if queries > 128:
                equal = round(2 * heads * new * (cached + new / 2) / cached**2)
                row, kind = prompts.get((1, equal, 1, cached)), "prompts"
            if row is not None:
                # Around the kernel: norms, rotary embeddings and the write of KV.
                around = tables._attention(Prefills(1, new)) / layers - prompts[1, heads, 8, new]
                package = tables._attention(Prefills(1, new, cached)) / layers - around
                ours = package + tables._kv_reads(Forward(Prefills(1, new, cached))) / layers
                errors[f"package, {kind}"].append(package / row - 1)
                errors[f"here, {kind}"].append(ours / row - 1)
    return errors


@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "h200_sxm"])
def test_the_published_errors_behind_prefixes(gpu: str) -> None:
    errors = errors_behind_prefixes(gpu)
    assert abs(median(errors["here, decodes"])) < 0.1
    cells = [
        f"{100 * median(found):+.0f} % ({100 * min(found):+.0f} to {100 * max(found):+.0f})"
        for found in errors.values()
    ]
    line = f"| {gpu} | {' | '.join(cells)} |"
    assert line in (ROOT / "docs" / "modelled-gpus.md").read_text().splitlines()


def test_a_mixed_forward_costs_less_than_its_parts(tables: MeasuredTables) -> None:
    alone = prefill(2000, 256)
    parts = tables.seconds(alone), tables.seconds(Forward(decodes=8, context=2000))
    assert max(parts) < tables.seconds(Forward(alone.prefills, 8, 2000)) < sum(parts)


def test_a_token_more_than_a_block_costs_a_block(tables: MeasuredTables) -> None:
    for decodes in (1, 4, 7):
        two, one, more = (
            tables.seconds(Forward(Prefills(1, 128 - decodes + extra, 1024), decodes, 1024))
            for extra in (-1, 0, 1)
        )
        assert more - one > 0.01 > 10 * abs(one - two)


@settings(deadline=None)  # The first query loads the tables.
@given(st.integers(1, 200), st.integers(1, 8000), st.integers(0, 64), st.integers(1, 8000))
def test_no_forward_is_faster_than_its_roofline(
    requests: int, new: int, decodes: int, context: int
) -> None:
    prefills = Prefills.of([(context, max(1, new // requests))] * requests)
    forward = Forward(prefills, decodes, context)
    bound = Roofline(Gpu.load("h100_sxm"), Model.load(QWEN)).seconds(forward)
    assert 0 < bound < measured_h100().seconds(forward)


measured_h100 = cache(lambda: MeasuredTables("h100_sxm", QWEN))


def test_a_roofline_counts_reads_and_arithmetic() -> None:
    gpu, model = Gpu("gpu", 10**11, 1e12, 1e15, 1e10), Model.load(QWEN)
    step = Forward(decodes=1, context=1)
    # A step reads its tokens' rows of the embeddings only.
    read = model.weight_bytes - 2 * model.head_weights
    for tp in (1, 2):
        seconds = Roofline(gpu, model, tp).seconds(step)
        assert seconds == pytest.approx(read / (tp * 1e12), rel=1e-3)
    layers = model.weight_bytes / 2 - 2 * model.head_weights
    pairs = 8192**2 / 2 * 4 * 64 * 128 * model.layers
    seconds = Roofline(gpu, model).seconds(prefill(0, 8192))
    assert seconds == pytest.approx((2 * layers * 8192 + pairs) / 1e15, rel=0.01)


@pytest.mark.parametrize("times", [Roofline, MeasuredTables])
def test_experts_take_a_part_of_a_forward(times: Any) -> None:
    gpu, model = Gpu.load("h100_sxm"), Model.load("Qwen/Qwen3-30B-A3B")
    device = times(gpu, model) if times is Roofline else times(gpu.name, model.name)
    for forward in (prefill(0, 1024), prefill(0, 16_384), Forward(decodes=8, context=100)):
        assert 0.1 < device.expert_seconds(forward) / device.seconds(forward) < 0.95


def test_a_step_reads_only_the_needed_experts() -> None:
    model = Model.load("Qwen/Qwen3-30B-A3B")
    roofline = Roofline(Gpu("gpu", 10**11, 1e12, 1e18, 1e10), model)
    one, many = (roofline.seconds(Forward(decodes=n, context=1)) for n in (1, 4096))
    experts = 2 * model.layers * model.expert_weights / 1e12
    unneeded = model.experts - model.experts_per_token
    assert many - one == pytest.approx(unneeded * experts, rel=0.02)
    assert model.weight_bytes == pytest.approx(61e9, rel=0.02)


def test_a_vision_model_has_its_decoders_sizes() -> None:
    seeing, plain = Model.load("Qwen/Qwen3-VL-32B-Instruct"), Model.load(QWEN)
    assert (seeing.layers, seeing.weight_bytes) == (plain.layers, plain.weight_bytes)
    assert seeing.kv_bytes_per_token == plain.kv_bytes_per_token


def test_the_kv_pool_is_what_the_weights_leave() -> None:
    gpu, model = Gpu.load("a100_sxm"), Model.load(QWEN)
    assert model.weight_bytes == pytest.approx(65.5e9, rel=0.01)
    assert model.kv_bytes_per_token == 64 * 2 * 2 * 8 * 128
    left = 0.9 * gpu.memory - model.weight_bytes
    assert kv_tokens(gpu, model, 1, 0.9) == int(left / model.kv_bytes_per_token)
    assert 0.8 < memory_fraction(gpu, 1) < 0.9
    with pytest.raises(ValueError, match="--flashmoa-device-tp"):
        kv_tokens(Gpu.load("l40s"), model, 1, 0.9)


@pytest.mark.parametrize(
    ("device", "model", "problem"),
    [
        ("h300", QWEN, "No data sheet of a GPU 'h300'. Known are: .*h200_sxm"),
        ("h200_sxm", "Qwen/Nobody", "No config.json of the model 'Qwen/Nobody'"),
        ("h200_sxm", "", "needs --flashmoa-device-model"),
        ("h200_sxm", "deepseek-ai/DeepSeek-V3", "has latent attention"),
        ("sheet.json", QWEN, "sheet.json cannot be read"),
    ],
)
def test_unknown_gpus_and_models_are_refused(
    device: str, model: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOA_DEVICE", device)
    monkeypatch.setenv("FLASHMOA_DEVICE_MODEL", model)
    with pytest.raises(ValueError, match=problem):
        modelled_gpu.__wrapped__()


def test_a_data_sheet_of_ones_own_gives_a_roofline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = {"name": "mine", "memory": 10**11, "bandwidth": 1e12, "flops": 1e15, "link": 1e10}
    (tmp_path / "mine.json").write_text(json.dumps(sheet))
    monkeypatch.setenv("FLASHMOA_DEVICE", str(tmp_path / "mine.json"))
    monkeypatch.setenv("FLASHMOA_DEVICE_MODEL", QWEN)
    monkeypatch.setenv("FLASHMOA_DEVICE_SLOWDOWN", "2")
    gpu = modelled_gpu.__wrapped__()
    assert gpu is not None
    assert gpu.name == "modelled roofline of mine (Qwen/Qwen3-32B, TP1, 2 times slower)"
    arguments = SimpleNamespace(mem_fraction_static=0.8, max_total_tokens=None)
    gpu.size_engine(arguments)
    assert arguments.max_total_tokens == kv_tokens(gpu.gpu, gpu.model, 1, 0.8)


def test_fp8_weights_are_smaller_and_faster() -> None:
    gpu, step = Gpu.load("h200_sxm"), Forward(decodes=1, context=1)
    plain, fp8 = Model.load(QWEN), Model.load(QWEN, "fp8_block")
    assert fp8.weight_bytes == pytest.approx(plain.weight_bytes / 2, rel=0.05)
    bound = Roofline(gpu, fp8).seconds(step)
    assert bound < 0.6 * Roofline(gpu, plain).seconds(step)
    in_bfloat16, in_fp8 = (
        MeasuredTables("h200_sxm", QWEN, 1, weights).seconds(step)
        for weights in ("bfloat16", "fp8_block")
    )
    assert bound < in_fp8 < 0.8 * in_bfloat16
    with pytest.raises(ValueError, match="a100_sxm has no FP8"):
        Roofline(Gpu.load("a100_sxm"), fp8)
    with pytest.raises(ValueError, match=r"no times for .* \(fp8\) on a100_sxm"):
        MeasuredTables("a100_sxm", QWEN, 1, "fp8")


def test_a_hash_model_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        write_hash_model(f"hash:{tmp_path}", 4096)


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


def test_a_batch_has_prefills_and_decodes() -> None:
    assert describe(decoding()) == Forward(decodes=4, context=100)
    assert describe(extending([10, 10], [5, 5], mixed=False)) == Forward(Prefills(2, 10, 10))
    mixed = describe(extending([10, 99, 199], [5, 1, 1], mixed=True))
    assert mixed == Forward(Prefills(1, 5, 10), 2, 150)


def counted(forwards: TimedForwards) -> dict[str, Any]:
    state = SimpleNamespace(internal_state={})
    return forwards.report(lambda *_: state)(None, None).internal_state["modelled_gpu"]


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
    gpu = counted(forwards)
    assert (gpu["forwards"], gpu["overruns"], gpu["starved_seconds"]) == (2, 0, 0)
    machine.time += 0.5
    run_batch(scheduler, decoding())
    assert counted(forwards)["starved_seconds"] == 0.5


def test_a_result_waits_for_copies_of_experts() -> None:
    machine, gpu = Machine(), VirtualGpu(Bandwidths(host=1.0, peers=1.0, own=1.0))
    times: Any = SimpleNamespace(seconds=lambda _: 3.0, expert_seconds=lambda _: 1.0)
    model = Model("model", {"num_hidden_layers": 2})
    modelled = ModelledGpu(Gpu("gpu", 1, 1, 1, 1), model, 1, times, slowdown=2)
    forwards = TimedForwards(modelled, Clock(machine.now, machine.sleep), gpu)
    weights, copies = torch.zeros(5, dtype=torch.uint8), gpu.new_stream()

    def compute(_runner: Any, _batch: Any) -> None:
        for _ in range(2):
            gpu.compute_others()
            gpu.copy(copies, weights, torch.ones(5, dtype=torch.uint8))
            (copied := gpu.new_event()).record(copies)
            gpu.current_stream().wait_event(copied)
            gpu.compute_experts([weights])

    run = forwards.delay(lambda _scheduler, batch: forwards.notice(compute)(None, batch))
    scheduler = SimpleNamespace(enable_overlap=False, last_batch=None)
    # Of a layer, the experts take 1 s and the rest 2 s. A copy takes 5 s and follows the others.
    for ends in (11.0, 21.0, 31.0):
        run(scheduler, decoding())
        assert machine.time == ends
    gpu_time = counted(forwards)
    assert gpu_time["device_seconds"] == 31 and gpu_time["forwards"] == 3
    assert gpu_time["races"] == 3 * 2 - 1  # No copy waits for the computation before it.


def test_the_cpu_time_of_forwards_is_counted() -> None:
    forwards = timed(Machine(), 1.0)

    def compute(_runner: Any, _batch: Any) -> None:
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass

    forwards.notice(compute)(None, decoding())
    assert counted(forwards)["computing_seconds"] >= 0.01


def test_kv_arrives_when_the_link_has_sent_it() -> None:
    machine = Machine()
    model = Model("model", {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 250})
    # A token's KV has 1,000 bytes, and each of two ranks sends 50,000 bytes per second.
    gpu = ModelledGpu(Gpu("gpu", 1, 1, 1, 50_000), model, 2, SimpleNamespace())
    numbers: Any = SimpleNamespace(Success=4, Transferring=3)
    transfers = TimedTransfers(gpu, numbers, Clock(machine.now, machine.sleep))
    arguments = SimpleNamespace(chunked_prefill_size=200)
    queue = SimpleNamespace(scheduler=SimpleNamespace(server_args=arguments))
    states = [3, 4, 4]
    awaited = [
        SimpleNamespace(
            req=SimpleNamespace(origin_input_ids=range(tokens)),
            kv_receiver=SimpleNamespace(poll=lambda i=i: states[i], room=i),
        )
        for i, tokens in enumerate((100, 100, 450))
    ]
    transfers.delay(lambda _queue, requests: requests)(queue, awaited)
    assert awaited[2].kv_receiver.room == 2

    def polled() -> list[int]:
        return [each.kv_receiver.poll() for each in awaited]

    # Of the third, the last chunk of 50 tokens is sent after 1 s.
    for at, expected in (0.0, [3, 3, 3]), (1.0, [3, 4, 3]), (1.5, [3, 4, 4]):
        machine.time = at
        assert polled() == expected
    states[0] = 0
    assert polled()[0] == 0
