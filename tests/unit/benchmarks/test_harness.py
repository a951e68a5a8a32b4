"""Test what all benchmarks share: grids, reports, modelled GPUs, and their bounds."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from flashmoa_bench.harness import clock, modelled_gpus, requests
from flashmoa_bench.harness.command_line import make_parser
from flashmoa_bench.harness.critical_path import decoding_seconds
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Report
from flashmoa_bench.harness.rounds import RoundPlayer, measured_cells
from flashmoa_bench.link.pipelines import PipelineRound, play_cell
from rich.console import Console

from flashmoa.errors import EngineError
from flashmoa.link.prompt_feed import Feed
from tests.unit.events import make_call
from tests.waiting import until


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    ("seconds", "played"), [((1.0, 1.0, 1.004, 9.0), 3), ((1.0, 1.2, 1.0, 1.0), 4)]
)
async def test_rounds_that_agree_end_a_cell(
    seconds: tuple[float, ...], played: int, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {way: iter(seconds) for way in "ab"}
    order: list[str] = []

    async def run(way: str) -> PipelineRound:
        order.append(way)
        return PipelineRound(next(left[way]), 0.0, 0)

    async def sleep(_seconds: float) -> None:
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(clock, "sleep", sleep)
    rounds = await play_cell(["a", "b"], run, 4, side_by_side=side_by_side)
    assert [len(each) for each in rounds.values()] == [played, played]
    assert order[:4] == ["a", "b", "b", "a"]


async def test_rounds_take_turns_after_a_warm_up() -> None:
    played: list[str] = []

    async def run(way: str) -> int:
        played.append(way)
        return len(played)

    with RoundPlayer(Console(quiet=True), repeats=2, ways=2) as player:
        assert await player.play(["a", "b"], run) == {"a": [3, 6], "b": [4, 5]}
        assert await player.play(["a", "b"], run, warm_up=False) == {"a": [7, 10], "b": [8, 9]}


@dataclass
class Cell:
    late: int
    overrun: float = 0.0


def resuming(file: Path, **options: object) -> Report:
    return Report("any", argparse.Namespace(json=file, resume=True, **options))


def test_a_run_resumes_only_with_the_same_options(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    h200 = resuming(file, device="h200_sxm", repeats=5)
    assert measured_cells(h200, Cell, {"repeats"}) == []
    h200.write({"cells": [Cell(1), Cell(2, overrun=0.02)]})
    assert measured_cells(resuming(file, device="h200_sxm", repeats=3), Cell, {"repeats"}) == [
        Cell(1)
    ]
    with pytest.raises(EngineError, match="run with other --device: give another --json"):
        measured_cells(resuming(file, device="a100_sxm", repeats=5), Cell, ())
    h200.write({"rows": []})
    with pytest.raises(EngineError, match="holds no cells"):
        measured_cells(h200, Cell, ())


def test_linking_cannot_beat_decoding() -> None:
    two, three = make_call("two", 5.0, 6.0, 9.0), make_call("three", 9.0, 9.5, 10.0)
    # The first agent's prompt is prefilled from 1.0 to 2.0.
    assert decoding_seconds([make_call("one", 1.0, 2.0, 5.0), two, three], 1.0) == 7.5
    assert decoding_seconds([make_call("one", 1.0, None, 5.0), two, three], 1.0) == 7.5
    fan = [make_call("slow", 1.0, 2.0, 8.0), make_call("fast", 1.0, 2.0, 4.0)]
    assert decoding_seconds([*fan, make_call("reader", 8.0, 9.0, 10.0)], 1.0) == 8.0


class FakeFeed(Feed):
    """Takes a prompt's tokens until it is stopped."""

    made: ClassVar[list["FakeFeed"]] = []

    def __init__(self, _engine: object, prompt: Any, **_options: object) -> None:
        super().__init__(lambda _state: None)
        self.stream_id, self.prompt = "stream", prompt
        self.taken: list[int] = []
        self.made.append(self)

    async def run(self) -> None:
        while not self._stopped:
            self.taken += self.prompt.take()
            await self._wait_for_change()

    async def delete(self) -> None:
        self.is_deleted = True


@pytest.mark.parametrize("claimed", [True, False])
async def test_a_fed_stream_is_deleted_unless_claimed(
    claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PromptFeed", FakeFeed)
    engine: Any = None
    written = [3]
    async with requests.feeding(engine, [1, 2], lambda: written) as claim:
        feed = FakeFeed.made[-1]
        await until(lambda: feed.taken == [1, 2, 3])
        written.append(4)
        await until(lambda: feed.taken == [1, 2, 3, 4])
        assert not claimed or claim() == "stream"
    assert feed.is_deleted is not claimed
    async with requests.feeding(engine, [], list, is_linked=False) as claim:
        assert claim() is None


def parse(*argv: str) -> argparse.Namespace:
    return make_parser("any", None, [Role("flashmoa", plugin=True)]).parse_args(argv)


def test_engines_are_on_the_given_device() -> None:
    assert modelled_gpus.device_environment(parse(), "flashmoa") == {}
    arguments = parse("--device", "h200_sxm", "--device-tp", "2", "--device-slowdown", "4")
    assert modelled_gpus.device_environment(arguments, "flashmoa") == {
        "FLASHMOA_DEVICE": "h200_sxm",
        "FLASHMOA_DEVICE_MODEL": "Qwen/Qwen3-32B",
        "FLASHMOA_DEVICE_TP": "2",
        "FLASHMOA_DEVICE_SLOWDOWN": "4.0",
        "FLASHMOA_DEVICE_WEIGHTS": "bfloat16",
    }


def test_every_engine_can_have_a_model_of_its_own() -> None:
    def model_of(arguments: argparse.Namespace, engine: str) -> str:
        return modelled_gpus.device_environment(arguments, engine)["FLASHMOA_DEVICE_MODEL"]

    small = ("--device", "h200_sxm", "--device-model", "small=Qwen/Qwen3-8B")
    two = parse(*small, "large=big")
    for engine in ("small", "stock_small", "stock_small_2"):
        assert model_of(two, engine) == "Qwen/Qwen3-8B"
    for engine in ("large", "stock_large", "sjf_large"):
        assert model_of(two, engine) == "big"
    with pytest.raises(EngineError, match="no model for the engine medium: add medium=NAME"):
        model_of(two, "medium")
    assert model_of(parse(*small, "big"), "medium") == "big"


async def test_the_clock_runs_in_a_slow_gpus_time() -> None:
    with clock.slowed_down(4):
        before, started = clock.now(), time.perf_counter()
        await clock.sleep_until(before + 0.01)
        assert clock.now() >= before + 0.01
        assert time.perf_counter() - started >= 0.04
        assert (clock.seconds_of(8.0), clock.machine_seconds(8.0)) == (2.0, 32.0)
    assert clock.seconds_of(8.0) == 8.0


def test_compared_engines_are_slowed_down_alike() -> None:
    assert modelled_gpus.common_slowdown({}) == 1
    assert modelled_gpus.common_slowdown({"one": device(0), "two": device(0)}) == 2
    with pytest.raises(EngineError, match="by different factors"):
        modelled_gpus.common_slowdown({"one": device(0), "two": device(0) | {"slowdown": 1.0}})


def device(overrun: float) -> dict[str, Any]:
    return {
        "name": "modelled h200_sxm", "slowdown": 2.0, "forwards": 100, "overruns": 9,
        "device_seconds": 10.0, "overrun_seconds": overrun, "starved_seconds": overrun / 2,
    }  # fmt: skip


def test_an_overrun_run_is_refused_with_a_slowdown() -> None:
    modelled_gpus.check_keeps_up({"one": device(0.1), "two": device(0.0)}, "--device-slowdown")
    with pytest.raises(EngineError, match=r"two computed 9 of 100 .*3\.0%.*--device-slowdown 4"):
        modelled_gpus.check_keeps_up({"one": device(0.1), "two": device(0.3)}, "--device-slowdown")


def test_forwards_before_a_run_do_not_count() -> None:
    during = modelled_gpus.counted_since(
        device(0.5), device(0.6) | {"device_seconds": 30.0, "forwards": 150}
    )
    assert (during["forwards"], during["overruns"], during["device_seconds"]) == (50, 0, 20.0)
    modelled_gpus.check_keeps_up({"one": during}, "--device-slowdown")
