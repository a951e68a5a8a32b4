"""Times of forwards that the tables of modelled GPUs give, and how far measured ones are from them.

``python -m flashmoa_bench.gpu.forwards FILE`` writes them, where aiconfigurator-core is installed.
A machine with a GPU needs only the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

MODEL = "Qwen/Qwen3-8B"
GPUS = ("h100_sxm", "h200_sxm")
# Tokens of a prefill; requests that decode, and the tokens of their contexts.
PREFILLS = (1, 256, 512, 1024, 2048, 4096, 8192, 16_384)
DECODES = ((1, 1024), (8, 1024), (32, 1024), (1, 8192), (8, 8192), (16, 4096))
# Prompts above it are computed in chunks of this size, as engines here are started.
_CHUNK = 8192
# Seconds by GPU, by "prefills" or "decodes", and by their sizes.
Expected = Mapping[str, Mapping[str, Mapping[str, float]]]


def expected_times() -> Expected:
    """Return the times of all prefills and decode steps."""
    from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Prefills

    times: dict[str, dict[str, dict[str, float]]] = {}
    for gpu in GPUS:
        tables = MeasuredTables(gpu, MODEL)
        prefills = {
            str(tokens): sum(
                tables.seconds(Forward(Prefills.of([(done, min(_CHUNK, tokens - done))])))
                for done in range(0, tokens, _CHUNK)
            )
            for tokens in PREFILLS
        }
        decodes = {
            f"{requests}x{context}": tables.seconds(Forward(decodes=requests, context=context))
            for requests, context in DECODES
        }
        times[gpu] = {"prefills": prefills, "decodes": decodes}
    return times


def errors(
    expected: Expected,
    measured: Mapping[str, Mapping[str, float]],
    gpu: str,
) -> dict[str, Any]:
    """Return the modelled times over the measured ones, less one, and their medians.

    Args:
        expected: what :func:`expected_times` returns.
        gpu: name of the GPU, such as "NVIDIA H200"; that of another one gives errors of the first.
    """
    key = next((name for name in expected if name.split("_")[0].upper() in gpu), GPUS[0])
    table = {
        kind: {name: expected[key][kind][name] / seconds - 1 for name, seconds in found.items()}
        for kind, found in measured.items()
    }
    return {
        "modelled_gpu": key,
        "error": table,
        "median_error": {
            kind: median(map(abs, found.values())) for kind, found in table.items() if found
        },
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(expected_times(), indent=1) + "\n")
