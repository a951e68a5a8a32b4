"""Forward times from the tables of modelled GPUs, and their differences from measured times.

``python -m flashmoa_bench.gpu.forwards FILE`` writes the times, where aiconfigurator-core is
installed. A machine with a GPU needs only the file.
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
# Tokens of each prefill.
PREFILLS = (1, 256, 512, 1024, 2048, 4096, 8192, 16_384)
# Each decode step: number of requests, and tokens of each request's context.
DECODES = ((1, 1024), (8, 1024), (32, 1024), (1, 8192), (8, 8192), (16, 4096))
# Seconds by GPU, by "prefills" or "decodes", and by size.
Expected = Mapping[str, Mapping[str, Mapping[str, float]]]


def expected_times() -> Expected:
    """Return the times of all prefills and decode steps."""
    from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Prefills

    times: dict[str, dict[str, dict[str, float]]] = {}
    chunk = 8192  # Stage 6's engines compute longer prompts in chunks of this size.
    for gpu in GPUS:
        tables = MeasuredTables(gpu, MODEL)
        prefills = {
            str(tokens): sum(
                tables.seconds(Forward(Prefills.of([(done, min(chunk, tokens - done))])))
                for done in range(0, tokens, chunk)
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
    expected: Expected, measured: Mapping[str, Mapping[str, float]], gpu: str
) -> dict[str, Any]:
    """Return modelled over measured times, less one, and the medians of their absolute values.

    Args:
        expected: the result of :func:`expected_times`.
        gpu: name of the GPU, such as "NVIDIA H200"; an unknown GPU is compared with the first.
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
