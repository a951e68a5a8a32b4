"""Start PD pairs for a benchmark, with the time of modelled GPUs."""

from collections.abc import AsyncGenerator
from importlib.util import find_spec

import pytest
from flashmoa_bench.harness.command_line import make_parser
from flashmoa_bench.harness.engines import Engines, Role, connect_engines
from flashmoa_bench.harness.modelled_gpus import read_device
from rich.console import Console

from flashmoa.moa import AggregationPrompt, MixtureOfAgents, Model
from tests.conftest import GUIDE, ROOT

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
]
ROLES = (
    Role("small", plugin=True, is_pd_pair=True),
    Role("stock_small", plugin=False, is_pd_pair=True),
    Role("large", plugin=True),
)
COMMAND = [
    "--device", "h200_sxm", "--device-slowdown", "2",
    "--device-model", "small=Qwen/Qwen3-8B", "large=Qwen/Qwen3-32B",
    "--shape", "test", "--cache", str(ROOT / ".cache"), "--engine-arguments=--enable-cache-report",
]  # fmt: skip


@pytest.fixture(scope="module")
async def connected() -> AsyncGenerator[Engines]:
    arguments = make_parser("pairs", None, ROLES).parse_args(COMMAND)
    async with connect_engines(ROLES, arguments, 12000, Console(quiet=True), [GUIDE]) as engines:
        yield engines


async def test_a_pair_is_one_engine_to_a_mixture(connected: Engines) -> None:
    sampling = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    prompt = AggregationPrompt("question-first", "Weigh these answers:")
    answers: dict[str, str] = {}
    for name in ("small", "stock_small"):
        pair, large = (Model(connected[each], sampling=sampling) for each in (name, "large"))
        result = await MixtureOfAgents([[pair, large], [pair]], prompt=prompt).answer("Why?")
        assert {agent.status for agent in result.agents} == {"used"}
        answers[name] = result.text
    assert answers["small"] == answers["stock_small"]


async def test_both_engines_of_a_pair_take_the_time_of_its_gpu(connected: Engines) -> None:
    for name in ("small_prefill", "small_decode", "stock_small_prefill", "stock_small_decode"):
        device = await read_device(connected[name].url)
        assert device is not None and "Qwen3-8B" in device["name"] and device["forwards"] > 0
        assert "PD pair" in connected.notes[name]
    assert "PD pair, FlashMoA's plugin" in connected.notes["small"]
