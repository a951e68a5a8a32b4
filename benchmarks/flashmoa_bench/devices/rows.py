"""Read what NVIDIA measured on GPUs (`measured_rows`), and choose rows of it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

_PACKAGE = "aiconfigurator_core"
# Names of models in the rows whose configuration the package has by another name.
CONFIGURATIONS = {"meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what was run on the GPU, and the times in seconds that were measured."""

    model: str
    gpu: str
    tensor_parallel: int
    clients: int
    prompt: int
    answer: int
    ttft: float
    tpot: float
    weights: str = "bfloat16"

    @property
    def name(self) -> str:
        shape = f"{self.clients} x {self.prompt}+{self.answer}"
        return f"{self.model.rpartition('/')[2]} {self.gpu} TP{self.tensor_parallel} {shape}"


def measured_rows() -> list[Row]:
    """Return the rows of dense models that SGLang served as one engine, in bfloat16 or FP8."""
    table = Path(str(files(_PACKAGE))) / "systems" / "silicon_sample.csv"
    with table.open(encoding="utf-8") as file:
        return [
            Row(
                each["model_path"],
                each["system"],
                int(each["tp_size"]),
                int(each["batch_size"]),
                int(each["isl"]),
                int(each["osl"]),
                float(each["silicon_ttft_ms"]) / 1000,
                float(each["silicon_tpot_ms"]) / 1000,
                each["gemm_quant_mode"] or "bfloat16",
            )
            for each in csv.DictReader(file)
            if (each["backend"], each["mode"]) == ("sglang", "agg")
            and each["model_path"] in ("Qwen/Qwen3-32B", *CONFIGURATIONS)
        ]


def choose_rows(rows: Sequence[Row], model: str, count: int) -> list[Row]:
    """Return rows of a model that are evenly spread over its GPUs, clients and lengths.

    Raises: ValueError if there is none.
    """
    known = sorted({row.model for row in rows})
    own = sorted(
        (row for row in rows if row.model == model),
        key=lambda row: (row.tensor_parallel, row.clients, row.prompt, row.answer),
    )
    if not own:
        raise ValueError(f"no measured rows of {model!r}; there are rows of {', '.join(known)}")
    count = min(count, len(own))
    return [own[index * len(own) // count] for index in range(count)]
