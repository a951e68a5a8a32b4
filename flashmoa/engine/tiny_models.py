"""Make tiny models with random weights, and serve them by engines on this machine's CPU.

This needs no GPU and no model hub, but ``flashmoa-sglang`` and SGLang. The text of such a model is
noise; the timing of the engines is real.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import WITHOUT_OVERLAP, LocalEngine, local_engines

# Size of an engine's KV pool in tokens.
_POOL_TOKENS = 12_000
# An engine on a busy machine may be used before it has measured its costs.
_MEASURE_SECONDS = 120.0


def tiny_model(shape: str, texts: Sequence[Path], cache: Path) -> Path:
    """Return the folder of a tiny model; if ``cache`` lacks it, make it, which takes seconds.

    Args:
        shape: a name in ``flashmoa_sglang.tiny_model.SHAPES``.
        texts: files to train its tokenizer on.
        cache: the folder for the folders of models.

    Raises: EngineError with the reason if the model cannot be made.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.read_bytes())
    out = cache / f"{shape}-{digest.hexdigest()[:12]}"
    if not out.exists():
        command = [sys.executable, "-m", "flashmoa_sglang.tiny_model", "--out", str(out)]
        command += ["--shape", shape, "--text", *map(str, texts)]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if process.returncode:
            reason = process.stderr.decode(errors="replace").strip()
            raise EngineError(
                f"no model of shape {shape!r} could be made (`flashmoa doctor` checks the "
                f"installation): {reason[-500:]}"
            )
    return out


def _ignore(message: str) -> None:
    """Do nothing with a progress message."""


@asynccontextmanager
async def tiny_engines(
    shapes: Sequence[str],
    texts: Sequence[Path],
    cache: Path,
    progress: Callable[[str], None] = _ignore,
) -> AsyncGenerator[list[LocalEngine]]:
    """Serve tiny models on this CPU, the first one on core 0, the second one on core 1, and so on.

    Leaving the context ends the engines.

    Args:
        shapes: the shape of each engine's model; see :func:`tiny_model`.
        texts, cache: as for :func:`tiny_model`.
        progress: called with a short message when a step begins.

    Raises: EngineError if a model cannot be made or an engine does not start.
    """
    progress("making tiny models (random weights, own tokenizer)")
    models = [await anyio.to_thread.run_sync(tiny_model, shape, texts, cache) for shape in shapes]
    async with engines_per_core(models, progress) as engines:
        yield engines


@asynccontextmanager
async def engines_per_core(
    models: Sequence[Path], progress: Callable[[str], None] = _ignore
) -> AsyncGenerator[list[LocalEngine]]:
    """Serve models on this CPU, the first one on core 0, the second one on core 1, and so on.

    Args:
        models: the folders of the models.
        progress: called with a short message when a step begins.

    Raises: EngineError if an engine does not start.
    """
    progress("importing SGLang, once for all engines")
    async with local_engines() as starter:
        progress(f"starting {len(models)} engines, one per core")
        arguments = ["--max-total-tokens", str(_POOL_TOKENS), "--enable-cache-report"]
        engines = [
            await starter.start(
                model, core=core, arguments=[*arguments, *WITHOUT_OVERLAP], wait=False
            )
            for core, model in enumerate(models)
        ]
        for engine in engines:
            await engine.wait_until_ready()
        progress("the engines measure what their forwards cost")
        for engine in engines:
            await _wait_until_measured(engine.url)
        yield engines


async def _wait_until_measured(url: str) -> None:
    """Wait until an engine has measured its costs: before, they share its core with requests."""
    async with EngineClient(url) as client:
        with anyio.move_on_after(_MEASURE_SECONDS):
            while (await client.info()).costs is None:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.1)
