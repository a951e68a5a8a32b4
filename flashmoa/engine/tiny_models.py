"""Tiny models with random weights, and engines on this machine's CPU that serve them.

They need no GPU and no model hub. What such a model says is noise; the timing of the engines is
real. Needs ``flashmoa-sglang`` and SGLang.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from flashmoa.engine import EngineError
from flashmoa.engine.local import WITHOUT_OVERLAP, LocalEngine, local_engines

# Tokens that the KV pool of an engine holds; two of them and their models fit into 4 GiB.
_POOL_TOKENS = 12_000


def tiny_model(shape: str, texts: Sequence[Path], cache: Path) -> Path:
    """Return the folder of a tiny model; make it, in seconds, where ``cache`` lacks it.

    Args:
        shape: a name in ``flashmoa_sglang.tiny_model.SHAPES``.
        texts: files on which its tokenizer is trained.

    Raises: EngineError with the reason if it cannot be made.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.read_bytes())
    out = cache / f"{shape}-{digest.hexdigest()[:12]}"
    if not out.exists():
        command = [sys.executable, "-m", "flashmoa_sglang.tiny_model", "--out", str(out)]
        command += ["--shape", shape, "--text", *map(str, texts)]
        made = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if made.returncode:
            reason = made.stderr.decode(errors="replace").strip()
            raise EngineError(f"no model of shape {shape!r} could be made: {reason[-500:]}")
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
        shapes, texts, cache: as :func:`tiny_model` takes them, a shape for each engine.
        progress: told what is being done, in a few words.

    Raises: EngineError if a model cannot be made or an engine does not start.
    """
    progress("making tiny models (random weights, own tokenizer)")
    models = [await anyio.to_thread.run_sync(tiny_model, shape, texts, cache) for shape in shapes]
    progress("importing SGLang, once for all engines")
    async with local_engines() as starter:
        progress("starting an engine on each of " + f"{len(models)} cores")
        arguments = ["--max-total-tokens", str(_POOL_TOKENS), "--enable-cache-report"]
        engines = [
            await starter.start(
                model, core=core, arguments=[*arguments, *WITHOUT_OVERLAP], wait=False
            )
            for core, model in enumerate(models)
        ]
        for engine in engines:
            await engine.wait_until_ready()
        yield engines
