"""Test engines that copy experts in the time of a GPU: the same texts, and the copies' time."""

from pathlib import Path

import anyio
import pytest
from flashmoa_bench.harness.modelled_gpus import read_device

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.plugin.test_asyncep import Replicas
from tests.integration.support import Words, generate, start_special_engine

GPU = {
    "FLASHMOA_DEVICE": "h200_sxm",
    "FLASHMOA_DEVICE_MODEL": "Qwen/Qwen3-30B-A3B",
    "FLASHMOA_DEVICE_WEIGHTS": "fp8_block",
}
# The layers, their experts' bytes, and 0.8 of the bandwidths of PCIe 5 and NVLink 4.
LAYERS, LAYER_BYTES = 48, 128 * 3 * 2048 * 768
HOST, NVLINK, OWN = 0.8 * 64e9, 0.8 * 450e9, 0.8 * 4.8e12 / 2
TOKENS = 3


@pytest.fixture(scope="module")
async def expected(engines: LocalEngines, model: Path, words: Words) -> dict[str, str]:
    """Prompts, and the answers of an engine with all experts on its GPU."""
    prompts = [words(length, 6000 + length) for length in (3, 200, 900)]
    async with (
        start_special_engine(engines, f"hash-experts:{model}", environment=GPU) as engine,
        EngineClient(engine.url, timeout=120) as client,
    ):
        return {prompt: (await generate(client, prompt, TOKENS))[0] for prompt in prompts}


async def check(engine: LocalEngine, expected: dict[str, str], copy: float) -> None:
    """Check an engine's answers, and that a forward takes the time to copy all layers' experts.

    Args: copy: seconds to copy a layer's experts.
    """
    async with EngineClient(engine.url, timeout=120) as client:
        for prompt, answer in expected.items():
            before = await read_device(engine.url)
            assert (await generate(client, prompt, TOKENS))[0] == answer
            after = await read_device(engine.url)
            forwards = after["forwards"] - before["forwards"]
            seconds = after["device_seconds"] - before["device_seconds"]
            # While the GPU idles before a forward, two slots are filled.
            assert forwards * (LAYERS - 3) * copy - 1e-6 <= seconds
            assert seconds <= forwards * LAYERS * copy * 1.01
            assert after["races"] == 0
        (kv,) = (await client.info()).kv
        assert kv.experts is not None and kv.experts.misses == 0


async def test_texts_are_the_same_with_experts_on_the_host(
    engines: LocalEngines, model: Path, expected: dict[str, str]
) -> None:
    flags = ["--flashmoa-asyncep", "h2d"]
    async with start_special_engine(
        # Each forward takes half a second here, and measuring costs takes minutes.
        engines,
        f"hash-experts:{model}",
        *flags,
        has_costs=False,
        environment=GPU,
    ) as engine:
        await check(engine, expected, LAYER_BYTES / HOST)


@pytest.mark.slow
async def test_texts_are_the_same_with_experts_of_another_replica(
    engines: LocalEngines, model: Path, expected: dict[str, str]
) -> None:
    replicas = Replicas(engines, f"hash-experts:{model}", GPU)
    try:
        for place in ("0/2", "1/2"):
            await replicas.start(place)
        for engine in replicas.running.values():
            await engine.wait_until_ready()
        copy = LAYER_BYTES / 2 * (1 / NVLINK + 1 / OWN)
        for engine in replicas.running.values():
            await check(engine, expected, copy)
    finally:
        await replicas.stop()


# Measuring costs takes minutes.
@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_the_saturation_is_that_of_the_gpu(engines: LocalEngines, model: Path) -> None:
    async with (
        start_special_engine(
            engines,
            f"hash-experts:{model}",
            "--flashmoa-asyncep",
            "h2d",
            # Measuring takes longer than this function waits for costs.
            has_costs=False,
            measures=True,
            environment=GPU,
        ) as engine,
        EngineClient(engine.url, timeout=120) as client,
    ):
        while (found := (await client.info()).saturation) is None:  # noqa: ASYNC110
            await anyio.sleep(1)
    assert found.transfer == pytest.approx(LAYER_BYTES / HOST)
    # As flashmoa bench asyncep --device computes.
    assert found.tokens is not None and 40_000 < found.tokens < 70_000


async def test_other_models_are_refused(engines: LocalEngines, experts_model: Path) -> None:
    with pytest.raises(Exception, match="needs --model-path hash-experts:TOKENIZER_FOLDER"):
        await engines.start(
            experts_model, core=1, arguments=["--flashmoa-asyncep", "h2d"], environment=GPU
        )
