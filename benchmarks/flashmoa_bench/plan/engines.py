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

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import local_engines
from flashmoa.engine.tiny_models import tiny_model
from flashmoa_bench.harness.engines import wait_for_costs
from flashmoa_bench.harness.modelled_gpus import environment_of
from flashmoa_bench.plan.team import PlanError

# An engine makes its KV pool as it starts, which is checked before.
_CHECK = """
from types import SimpleNamespace
from flashmoa_sglang.modelled_gpu.gpu import modelled_gpu
gpu = modelled_gpu()
gpu.size_engine(SimpleNamespace(mem_fraction_static=None, max_total_tokens=None))
print(gpu.name)
"""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Describes the GPUs of an engine, the model whose times are taken, and their slowdown."""

    gpu: str
    model: str
    tensor_parallel: int
    slowdown: float

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self.gpu, self.model, self.tensor_parallel, self.slowdown)

    def describe(self) -> str:
        """Return the name that an engine of this kind gives its modelled GPU.

        Raises: PlanError with the reason if there can be no such engine here.
        """
        # In a process of its own, since the plugin reads its options from the environment.
        process = subprocess.run(
            [sys.executable, "-c", _CHECK],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        if not process.returncode:
            return process.stdout.strip()
        reason = process.stderr.strip().rpartition("\n")[2].removeprefix("ValueError: ")
        # The plan's options have the names of the engine's, without the prefix.
        reason = reason.replace("--flashmoa-device-", "--").replace("--flashmoa-device", "--gpu")
        if find_spec("aiconfigurator_core") is None:
            reason = (
                "the GPUs' times need aiconfigurator-core, which is not installed (pip install "
                f"'./server_patches[device]'), or data sheets and models of your own: {reason}"
            )
        raise PlanError(reason)


def make_tokenizer(texts: Sequence[str], cache: Path) -> Path:
    """Return a folder with a tokenizer that is trained on these texts; it is kept in ``cache``.

    Raises: EngineError if it cannot be made; OSError if the cache cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="flashmoa-plan-") as folder:
        corpus = Path(folder) / "prompts.txt"
        corpus.write_text("\n".join(texts), encoding="utf-8")
        # Of the smallest of the tiny models only the tokenizer is used.
        return tiny_model("test", [corpus], cache)


@asynccontextmanager
async def modelled_engines(
    specs: Sequence[EngineSpec], tokenizer: Path, progress: Callable[[str], None]
) -> AsyncGenerator[list[tuple[EngineClient, float]]]:
    """Start an engine of each kind in ``specs``; leaving the context ends all.

    Yields: the engines, each with the seconds of a decode step of one request.

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
                environment=spec.environment,
                wait=False,
            )
            for spec in specs
        ]
        running: list[tuple[EngineClient, float]] = []
        for engine, spec in zip(engines, specs, strict=True):
            await engine.wait_until_ready()
            client = await stack.enter_async_context(EngineClient(engine.url))
            costs = (await wait_for_costs(client)).costs
            if costs is None:
                raise EngineError(f"{client.url} does not say what its forwards cost")
            # The engine reports what its GPU would take without the slowdown.
            running.append((client, costs.decode_step * spec.slowdown))
        yield running
