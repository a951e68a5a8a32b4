"""Writes the model in a GGUF file as a folder that SGLang serves on a CPU.

``python -m flashmoa_cpu.gguf_model --file MODEL.gguf --out DIR`` expands its weights to float32,
since many CPUs compute bfloat16 slowly, and keeps its tokenizer and chat template.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flashmoa_sglang.sglang import torchvision_ops

from flashmoa_cpu.whole_folder import whole_folder


def convert(file: Path, out: Path) -> None:
    """Write the folder ``out``, unless another process makes it meanwhile."""
    torchvision_ops.allow_mismatched_build()
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings: dict[str, Any] = {"dtype": torch.float32}
    # From 5.19 on, weights stay packed otherwise, and such a model cannot be saved.
    if (config := getattr(transformers, "GgufConfig", None)) is not None:
        settings["quantization_config"] = config(dequantize=True)
    # transformers' types are incomplete.
    parts: list[tuple[Any, dict[str, Any]]] = [
        (AutoTokenizer, {}),
        (AutoModelForCausalLM, settings),
    ]
    with whole_folder(out) as folder:
        for part, arguments in parts:
            made = part.from_pretrained(file.parent, gguf_file=file.name, **arguments)
            made.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    arguments = parser.parse_args()
    convert(arguments.file, arguments.out)
