"""Test the mixes, batches and figures of the benchmarks of prefills, scores and routers."""

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_bench.harness.report import make_table, terminal
from flashmoa_bench.prefill import accuracy, asyncep, lists, passes
from flashmoa_bench.prefill.benchmark import OURS, make_requests

from flashmoa.errors import EngineError

MIX = argparse.Namespace(scale=0.002, lengths=0.5, seed=3)


def make_answer(
    token: int, logprob: float | None = None, seconds: float = 1.0
) -> passes.PrefillAnswer:
    return passes.PrefillAnswer(
        token, logprob, prompt_tokens=100, cached_tokens=40, seconds=seconds
    )


def test_a_smaller_mix_still_shares_and_fits() -> None:
    requests = make_requests(MIX)
    assert len(requests) == 147
    assert max(len(request.ids) for request in requests) <= 32_000
    assert all(1000 <= token < 4000 for request in requests for token in request.ids)
    tokens = sum(len(request.ids) for request in requests)
    assert 0.3 < passes.unique_tokens(requests) / tokens < 0.9
    assert make_requests(MIX) == requests


def test_unique_tokens_are_those_of_a_radix_tree() -> None:
    prompts = ([1, 2, 3], [1, 2], [1, 2, 3], [1, 5, 3], [2])
    assert (
        passes.unique_tokens([passes.PrefillRequest(str(ids), ids) for ids in prompts]) == 3 + 2 + 1
    )


def test_agreement_compares_tokens_and_logprobs() -> None:
    expected = {"a": make_answer(1, -1.0), "b": make_answer(2, -2.0)}
    same, other = {"a": make_answer(1), "b": make_answer(2)}, make_answer(3, -2.0)
    played = [passes.PrefillPass(1.0, same)]
    assert passes.agreement(expected, played).logprob is None
    played.append(passes.PrefillPass(1.0, {"a": make_answer(1, -1.25), "b": other}))
    assert passes.agreement(expected, played) == passes.Agreement(answers=4, same=3, logprob=0.25)


def test_gains_are_ratios_of_median_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    def played(answer: passes.PrefillAnswer, *seconds: float) -> list[passes.PrefillPass]:
        return [passes.PrefillPass(each, {"a": answer}) for each in seconds]

    runs = {
        "fcfs": played(make_answer(1), 3.0, 2.0, 9.0),
        OURS: played(make_answer(1, -1.0, 0.5), 2.0, 1.0, 2.0),
    }
    stock, ours = passes.summarise(runs, "fcfs", {"a": make_answer(1, -1.0)}, unique=50)
    assert (stock.gain, ours.gain) == (1.0, 1.5)
    assert (ours.computed, ours.duplicates, ours.p99) == (60, 1.2, 0.5)
    assert (ours.tokens_per_second, ours.requests_per_second) == (50.0, 0.5)
    terminal().print(make_table("one engine", [stock, ours]))
    assert "1.50" in capsys.readouterr().out


async def test_senders_take_turns() -> None:
    sent: list[tuple[str, str]] = []

    def make_sender(name: str) -> passes.SendFunction:
        async def send(request: passes.PrefillRequest) -> passes.PrefillAnswer:
            sent.append((name, request.name))
            return make_answer(1)

        return send

    requests = [passes.PrefillRequest(number, [1]) for number in "01234"]
    done = await passes.play([make_sender("x"), make_sender("y")], requests, limit=2)
    assert sent == list(zip("xyxyx", "01234", strict=True))
    assert (done.prompt_tokens, done.computed_tokens) == (500, 300)


QWEN = Path(__file__).parents[3] / "examples" / "models" / "qwen3-30b-a3b" / "config.json"
OPTIONS = argparse.Namespace(tokens=[100, 200], prompt=64, peak_tflops=989.0)
SECONDS = {
    asyncep.RESIDENT: {100: [1.0, 2.0, 3.0], 200: [4.0, 4.0, 4.0]},
    asyncep.H2D: {100: [4.0, 4.0, 9.0], 200: [4.0, 5.0, 5.0]},
}


def test_a_batch_has_exactly_its_tokens() -> None:
    assert [len(ids) for ids in asyncep.make_batch(150, 64, random.Random(0))] == [64, 64, 22]
    assert [len(ids) for ids in asyncep.make_batch(64, 1000, random.Random(0))] == [64]


def test_exposed_seconds_are_added_by_copying(capsys: pytest.CaptureFixture[str]) -> None:
    rows = asyncep.summarise(SECONDS, OPTIONS, QWEN)
    assert [(row.tokens, row.way, row.exposed, row.of_resident) for row in rows] == [
        (100, asyncep.RESIDENT, 0.0, 1.0),
        (100, asyncep.H2D, 2.0, 0.5),
        (200, asyncep.RESIDENT, 0.0, 1.0),
        (200, asyncep.H2D, 1.0, 0.8),
    ]
    assert rows[0].mfu == pytest.approx((rows[0].teraflops or 0) / 989)
    resident = asyncep.EngineMemory(asyncep.RESIDENT, 1 << 20, 0, 0, 1 << 20)
    memory = [resident, asyncep.EngineMemory(asyncep.H2D, 1 << 19, 1 << 19, 3, 1 << 30)]
    for each in (rows, memory):
        terminal().print(make_table("", each))
    assert "1,024.0" in capsys.readouterr().out


async def test_sglangs_offloaded_experts_are_unknown() -> None:
    def engine(**kv: Any) -> Any:
        async def info() -> Any:
            return SimpleNamespace(kv=[SimpleNamespace(**{"experts": None, "kv_bytes": 7, **kv})])

        return SimpleNamespace(info=info)

    experts = SimpleNamespace(resident=1, in_slots=2, on_host=4, misses=3)
    clients = {
        asyncep.RESIDENT: engine(),
        asyncep.H2D: engine(experts=experts),
        "cpu_offload": engine(),
    }
    engines: Any = SimpleNamespace(clients=clients)
    assert await asyncep._fetch_memory(engines) == [
        asyncep.EngineMemory(asyncep.RESIDENT, 5, 0, 0, 7),
        asyncep.EngineMemory(asyncep.H2D, 3, 4, 3, 7),
        asyncep.EngineMemory("cpu_offload", None, None, 0, 7),
    ]


def test_flops_are_those_of_the_model(tmp_path: Path) -> None:
    # 3.3 billion parameters are used for each token; the vocabulary's are not counted.
    assert (asyncep.flops(QWEN, 1000, 1000) or 0) / 1000 == pytest.approx(2 * 3.0e9, rel=0.1)
    assert asyncep.flops(None, 10, 10) is None
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(EngineError, match="is not a model"):
        asyncep.flops(tmp_path / "odd.json", 10, 10)
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "mamba"}))
    assert asyncep.flops(tmp_path / "other.json", 10, 10) is None
    assert all(
        row.teraflops is row.mfu is None for row in asyncep.summarise(SECONDS, OPTIONS, None)
    )


def test_first_label_of_an_answer_is_found() -> None:
    both = accuracy.LABELS
    for answer, labels, expected in [
        ("Positive.", both, 0), ("It is negative, not positive.", both, 1),
        ("positively", both, None), ("", both, None),
        ("B. negative", ("A", "B"), 1), ("It is a B", ("A", "B"), 1),
    ]:  # fmt: skip
        assert accuracy.find_label(answer, labels) == expected, answer


def test_only_clear_snippets_are_read(tmp_path: Path) -> None:
    file = tmp_path / "snippets.txt"
    file.write_text("1\t1.0\tgood\n2\t-0.9\tso so\n\n3\t-2\tbad\tvery\n")
    found = [(one.text, one.positive) for one in accuracy.read(file)]
    assert found == [("good", True), ("bad\tvery", False)]
    file.write_text("no tabs")
    with pytest.raises(ValueError, match="line 1: not an id"):
        accuracy.read(file)


def test_an_answer_without_a_label_is_wrong() -> None:
    given = [(0, 0, 0, 0.5), (0, 0, None, 0.5), (1, 0, 1, 0.5)]
    row = accuracy.summarise("words", [accuracy.Outcome(*each) for each in given])
    figures = (row.scored, row.decoded, row.unread, row.same, row.mass)
    assert figures == pytest.approx((2 / 3, 2 / 3, 1 / 3, 0.5, 0.5))


def test_lists_are_compared_with_the_best_stock() -> None:
    stock = [lists.ListAnswer(2.0, 2.0, [[0.5]], None), lists.ListAnswer(4.0, 4.0, [[0.1]], None)]
    fast = [lists.ListAnswer(1.5, 1.5, [[0.5]], None)] * 2
    ours = [lists.ListAnswer(1.0, 0.5, [[0.5]], 10), lists.ListAnswer(1.0, 0.7, [[0.3]], 12)]
    embedded = [lists.ListAnswer(1.5, 1.5, None, 10)] * 2
    answers = {lists.STOCK: stock, lists.OURS: ours, lists.EMBEDDING: embedded}
    _, row, other = lists.summarise(6, answers, 0.8)
    assert (row.seconds, row.gain, row.items_per_second) == (1.0, 3.0, 6.0)
    assert (row.computed, row.first, row.bound) == (11, 0.6, 0.8)
    assert row.difference == pytest.approx(0.2)
    assert other.difference is None
    rows = lists.summarise(6, answers | {"stock_512": fast}, 0.8)
    assert [row.gain for row in rows] == [0.5, 1.5, 1.0, 1.0]


def test_a_forwards_time_is_interpolated() -> None:
    points = [(10, 1.0), (20, 2.0), (30, 3.5)]
    for tokens, seconds in (10, 1.0), (15, 1.5), (20, 2.0), (60, 8.0), (5, 0.5):
        assert lists.forward_seconds(points, tokens) == pytest.approx(seconds)
    assert lists.forward_seconds(points[:1], 10) is None
