"""Test the pure parts of ``flashmoa bench prefill-only``."""

from __future__ import annotations

import argparse

import pytest
from flashmoa_bench.harness.report import make_table, terminal
from flashmoa_bench.prefill.benchmark import OURS, make_requests
from flashmoa_bench.prefill.passes import (
    Agreement,
    PrefillAnswer,
    PrefillPass,
    PrefillRequest,
    SendFunction,
    agreement,
    play,
    summarise,
    unique_tokens,
)

OPTIONS = argparse.Namespace(scale=0.002, lengths=0.5, seed=3)


def make_answer(token: int, logprob: float | None = None, seconds: float = 1.0) -> PrefillAnswer:
    return PrefillAnswer(token, logprob, prompt_tokens=100, cached_tokens=40, seconds=seconds)


def test_a_smaller_mix_still_shares_and_fits() -> None:
    requests = make_requests(OPTIONS)
    assert len(requests) == 147
    assert max(len(request.ids) for request in requests) <= 32_000
    assert all(1000 <= token < 4000 for request in requests for token in request.ids)
    tokens = sum(len(request.ids) for request in requests)
    assert 0.3 < unique_tokens(requests) / tokens < 0.9
    assert make_requests(OPTIONS) == requests


def test_unique_tokens_are_those_of_a_radix_tree() -> None:
    prompts = ([1, 2, 3], [1, 2], [1, 2, 3], [1, 5, 3], [2])
    assert unique_tokens([PrefillRequest(str(ids), ids) for ids in prompts]) == 3 + 2 + 1


def test_agreement_compares_tokens_and_logprobs() -> None:
    expected = {"a": make_answer(1, -1.0), "b": make_answer(2, -2.0)}
    passes = [
        PrefillPass(1.0, {"a": make_answer(1), "b": make_answer(2)}),
        PrefillPass(1.0, {"a": make_answer(1, -1.25), "b": make_answer(3, -2.0)}),
    ]
    assert agreement(expected, passes) == Agreement(answers=4, same=3, logprob=0.25)
    assert agreement(expected, passes[:1]).logprob is None


def test_gains_are_ratios_of_median_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"a": make_answer(1, -1.0)}
    passes = {
        "fcfs": [PrefillPass(seconds, {"a": make_answer(1)}) for seconds in (3.0, 2.0, 9.0)],
        OURS: [
            PrefillPass(seconds, {"a": make_answer(1, -1.0, 0.5)}) for seconds in (2.0, 1.0, 2.0)
        ],
    }
    stock, ours = summarise(passes, "fcfs", expected, unique=50)
    assert (stock.gain, ours.gain) == (1.0, 1.5)
    assert (ours.computed, ours.duplicates, ours.p99) == (60, 1.2, 0.5)
    assert ours.tokens_per_second == 50.0 and ours.requests_per_second == 0.5
    terminal().print(make_table("one engine", [stock, ours]))
    assert "1.50" in capsys.readouterr().out


async def test_senders_take_turns() -> None:
    sent: list[tuple[str, str]] = []

    def make_sender(name: str) -> SendFunction:
        async def send(request: PrefillRequest) -> PrefillAnswer:
            sent.append((name, request.name))
            return make_answer(1)

        return send

    requests = [PrefillRequest(str(number), [number]) for number in range(5)]
    done = await play([make_sender("x"), make_sender("y")], requests, limit=2)
    assert sent == [("x", "0"), ("y", "1"), ("x", "2"), ("y", "3"), ("x", "4")]
    assert (done.prompt_tokens, done.computed_tokens) == (500, 300)
