"""Writes the model in a GGUF file as a folder that SGLang serves on a CPU.

``python -m flashmoa_sglang.gguf_model --file MODEL.gguf --out DIR`` expands its weights to float32,
since many CPUs compute bfloat16 slowly, and keeps its tokenizer and chat template.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flashmoa_sglang.cpu import torchvision_ops


def convert(file: Path, out: Path) -> None:
    """Write the folder ``out``, all of it or nothing."""
    torchvision_ops.allow_mismatched_build()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scratch = out.with_name(out.name + ".partial")
    # transformers' types of these are incomplete.
    parts: list[tuple[Any, dict[str, Any]]] = [
        (AutoTokenizer, {}),
        (AutoModelForCausalLM, {"dtype": torch.float32}),
    ]
    for part, settings in parts:
        part.from_pretrained(file.parent, gguf_file=file.name, **settings).save_pretrained(scratch)
    scratch.rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    arguments = parser.parse_args()
    convert(arguments.file, arguments.out)
