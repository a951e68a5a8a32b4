"""Start the modelled engines that a plan runs on (``modelled_engines``)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import anyio

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import local_engines
from flashmoa.engine.modelled_gpus import environment_of
from flashmoa.engine.tiny_models import tiny_model
from flashmoa.plan.errors import PlanError

# Of the tiny models, the smallest one; only its tokenizer is used.
_SHAPE = "test"
# An engine makes its KV pool as it starts, which is checked before.
_CHECK = """
from types import SimpleNamespace
from flashmoa_sglang.modelled_gpu.gpu import modelled_gpu
gpu = modelled_gpu()
gpu.size_engine(SimpleNamespace(mem_fraction_static=None, max_total_tokens=None))
print(gpu.name)
"""
_MEASURED_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Describes the GPUs and the model of an engine.

    Args:
        gpu: such as ``h200_sxm``, or a data sheet; see docs/modelled-gpus.md.
        model: the model whose times are taken.
        tensor_parallel: number of GPUs that it is divided among.
        slowdown: factor of all times.
    """

    gpu: str
    model: str
    tensor_parallel: int = 1
    slowdown: float = 1.0

    def describe(self) -> str:
        """Return the name that an engine of this kind gives its modelled GPU.

        Raises: PlanError with the reason if there can be no such engine here.
        """
        # In a process of its own, since the plugin reads its options from the environment.
        process = subprocess.run(
            [sys.executable, "-c", _CHECK],
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
        )
        if process.returncode:
            reason = process.stderr.strip().rpartition("\n")[2]
            raise PlanError(_explain(reason.removeprefix("ValueError: ")))
        return process.stdout.strip()

    def environment(self) -> dict[str, str]:
        """Return the environment variables of such an engine."""
        return environment_of(self.gpu, self.model, self.tensor_parallel, self.slowdown)


def _explain(reason: str) -> str:
    # The plan's options have the names of the engine's, without the prefix.
    reason = reason.replace("--flashmoa-device-", "--").replace("--flashmoa-device", "--gpu")
    if find_spec("aiconfigurator_core") is None:
        return (
            "the GPUs' times need aiconfigurator-core, which is not installed (pip install "
            f"'./server_patches[device]'), or data sheets and models of your own: {reason}"
        )
    return reason


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that was started; ``step`` is the seconds of a decode step of one request."""

    client: EngineClient
    step: float


def make_tokenizer(texts: Sequence[str], cache: Path) -> Path:
    """Return a folder with a tokenizer that is trained on these texts; it is kept in ``cache``.

    Raises: EngineError if it cannot be made; OSError if the cache cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="flashmoa-plan-") as folder:
        corpus = Path(folder) / "prompts.txt"
        corpus.write_text("\n".join(texts), encoding="utf-8")
        return tiny_model(_SHAPE, [corpus], cache)


@asynccontextmanager
async def modelled_engines(
    specs: Sequence[EngineSpec], tokenizer: Path, progress: Callable[[str], None]
) -> AsyncGenerator[list[RunningEngine]]:
    """Start an engine of each kind in ``specs``, and yield them; leaving the context ends all.

    Args:
        tokenizer: a folder with a tokenizer for all of them.
        progress: called with a short message when a step begins.

    Raises: EngineError if an engine does not start.
    """
    progress("importing SGLang, once for all engines")
    async with AsyncExitStack() as stack:
        starter = await stack.enter_async_context(local_engines())
        progress(f"starting {len(specs)} modelled engines")
        engines = [
            await starter.start(
                f"hash:{tokenizer}",
                arguments=["--enable-cache-report"],
                environment=spec.environment(),
                wait=False,
            )
            for spec in specs
        ]
        running: list[RunningEngine] = []
        for engine, spec in zip(engines, specs, strict=True):
            await engine.wait_until_ready()
            client = await stack.enter_async_context(EngineClient(engine.url))
            # The engine reports what its GPU would take without the slowdown.
            step = await _measure_step(client) * spec.slowdown
            running.append(RunningEngine(client, step))
        yield running


async def _measure_step(client: EngineClient) -> float:
    """Return the seconds of a decode step that an engine reports, once it has measured them.

    It does so after its start, which takes time of its GPU.

    Raises: EngineError if it takes too long.
    """
    with anyio.move_on_after(_MEASURED_SECONDS):
        while (costs := (await client.info()).costs) is None:  # noqa: ASYNC110
            await anyio.sleep(0.05)
        return costs.decode_step
    raise EngineError(f"{client.url} has not measured its costs within {_MEASURED_SECONDS:.0f} s")
