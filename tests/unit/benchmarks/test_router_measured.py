"""Test the pure parts of ``flashmoa bench router-measured``."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from flashmoa_bench.harness.routers import OURS
from flashmoa_bench.routing import measured, simulation
from flashmoa_bench.routing.measured import MeasuredCell, make_requests, make_roles, predict, show
from rich.console import Console

OPTIONS = argparse.Namespace(
    mix="table-2",
    share=0.02,
    engines=3,
    concurrency=64,
    batch_tokens=4096,
    kv_tokens=776_000,
    device="h200_sxm",
)


def test_each_engine_publishes_its_events_at_a_port_of_its_own() -> None:
    roles = make_roles(OPTIONS)
    assert [role.core for role in roles] == [0, 1, 0]
    assert len({role.arguments[-1] for role in roles}) == 3
    assert all(role.arguments[:2] == ("--chunked-prefill-size", "4096") for role in roles)


def test_what_is_predicted_is_what_is_sent() -> None:
    requests = make_requests(OPTIONS, 3)
    assert requests == make_requests(OPTIONS, 3) != make_requests(OPTIONS, 4)
    in_turn, ours = (predict(each, 3, requests, OPTIONS) for each in (simulation.IN_TURN, OURS))
    assert 0 < ours < in_turn


def test_the_table_compares_routers_with_the_same_seed() -> None:
    in_turn = MeasuredCell("round_robin", 0, 4.0, 1000, 500, 250, 0.5, 1.0, 4.2)
    other_seed = replace(in_turn, seed=1, seconds=8.0)
    ours = replace(in_turn, router=OURS, seed=1, seconds=2.0, predicted=1.9)
    console = Console(width=140, record=True)
    show([in_turn, other_seed, ours], console)
    text = console.export_text()
    assert "4.00" in text and "-5.0%" in text


def test_resuming_needs_the_file_to_go_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measured.main(["--resume"])
    assert "--resume needs --json FILE" in capsys.readouterr().err
