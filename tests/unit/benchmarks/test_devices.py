"""Test what benchmarks do with modelled GPUs."""

from __future__ import annotations

import argparse
import time
from typing import Any

import pytest
from flashmoa_bench.harness import clock, modelled_gpus
from flashmoa_bench.harness.command_line import make_parser
from flashmoa_bench.harness.engines import Role

from flashmoa.errors import EngineError


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
    two = parse("--device", "h200_sxm", "--device-model", "small=Qwen/Qwen3-8B", "large=big")
    models = {
        engine: modelled_gpus.device_environment(two, engine)["FLASHMOA_DEVICE_MODEL"]
        for engine in ("small", "stock_small", "large", "stock_large")
    }
    assert set(models.values()) == {"Qwen/Qwen3-8B", "big"}
    assert models["stock_small"] == models["small"] and models["stock_large"] == "big"
    second = modelled_gpus.device_environment(two, "stock_small_2")["FLASHMOA_DEVICE_MODEL"]
    assert second == models["small"]
    with pytest.raises(EngineError, match="no model for the engine medium: add medium=NAME"):
        modelled_gpus.device_environment(two, "medium")
    other = parse("--device", "h200_sxm", "--device-model", "small=Qwen/Qwen3-8B", "big")
    assert modelled_gpus.device_environment(other, "medium")["FLASHMOA_DEVICE_MODEL"] == "big"


@pytest.mark.anyio
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
        "name": "modelled h200_sxm",
        "slowdown": 2.0,
        "forwards": 100,
        "overruns": 9,
        "device_seconds": 10.0,
        "overrun_seconds": overrun,
        "starved_seconds": overrun / 2,
    }


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
