"""A model whose next token is a hash of all earlier tokens in the KV pool.

It computes in microseconds, where the smallest real model takes milliseconds. So wide batches with
long contexts stay faster than the modelled GPU. A token's KV is its id, and the next token depends
on every id and position in the context. So a request that reads a wrong or unwritten place of the
KV pool writes another text.

With ``hash-experts:``, it also depends on every byte of all layers' experts, in each forward.

It answers at temperature 0 and has no log-probabilities.
"""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import Namespace
from hashlib import sha256
from pathlib import Path
from typing import Any

from flashmoa_bench.modelled_gpu.gpu import Model
from flashmoa_bench.modelled_gpu.options import DeviceOptions

# Plain words make answers that can be read, and tokenised again.
_WORD = re.compile(r" [a-z]{2,12}")
# Only the first ids are candidates, so that logits are narrow.
_HIGHEST_ID = 4096
# ``--model-path hash:TOKENIZER_FOLDER`` asks for a hash model, ``hash-experts:`` for one with as
# many layers of experts as the modelled model has.
PREFIX, EXPERTS_PREFIX = "hash:", "hash-experts:"
# Width of keys and values.
WIDTH = 1
# Ids are below 2**20 and contexts have at most 2**20 tokens. So a sum of ids times factors is below
# 2**52, and float64 holds it exactly in any order of addition.
FACTORS = 1 << 12
# Below 2**24: float32 holds a hash exactly.
PRIME = 16_777_213
ARCHITECTURE, EXPERTS_ARCHITECTURE = "HashForCausalLM", "HashExpertsForCausalLM"
# Experts of a layer, and their width. In shares of eight replicas, and halves of them, the bytes of
# both tensors keep their alignment.
EXPERTS, EXPERT_WIDTH = 4, 16
LAYER_BYTES = EXPERTS * 3 * EXPERT_WIDTH * EXPERT_WIDTH * 4
# SGLang's variable for a package with more model classes, and our package.
MODEL_PACKAGE = ("SGLANG_EXTERNAL_MODEL_PACKAGE", "flashmoa_bench.modelled_gpu.models")
_TOKENIZER_FILES = ("*token*.json", "vocab.json", "merges.txt", "*.model", "chat_template*")


def serve_hash_model(args: Namespace) -> None:
    """Write the hash model that ``--model-path hash:FOLDER`` names, and serve it.

    Raises: SystemExit if the folder has no tokenizer, or the model cannot be written.
    """
    if not args.model_path.startswith((PREFIX, EXPERTS_PREFIX)):
        return
    try:
        has_experts = args.model_path.startswith(EXPERTS_PREFIX)
        # This context is longer than any benchmark's prompt.
        folder = write_hash_model(
            args.model_path, 131_072, _modelled_layers() if has_experts else 0
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model-path {args.model_path}: {error}") from error
    args.model_path = str(folder)
    args.served_model_name = args.served_model_name or "hash"
    variable, package = MODEL_PACKAGE
    os.environ[variable] = package
    # A forkserver has already read the variable.
    if registry := sys.modules.get("sglang.srt.models.registry"):
        registry.ModelRegistry.register(package, overwrite=True)


def _modelled_layers() -> int:
    """Return the number of layers of the model whose times the engine takes.

    Raises: ValueError if there is none, or it has no experts.
    """
    name = DeviceOptions.from_environment().device_model
    if not name or (model := Model.load(name)).experts == 1:
        raise ValueError("give a --flashmoa-device-model with experts, as Qwen/Qwen3-30B-A3B.")
    return model.layers


def write_hash_model(model_path: str, context: int, expert_layers: int = 0) -> Path:
    """Write a folder that SGLang serves, and return it.

    Each tokenizer has its own folder below ``~/.cache/flashmoa``. The folder stays, since an engine
    may be killed before it could delete it.

    Args:
        model_path: a prefix, and a folder with the files of a Hugging Face tokenizer.
        context: largest number of tokens of a request.
        expert_layers: number of layers with experts.

    Raises:
        ValueError: if the folder has no tokenizer, or its vocabulary has no plain words.
        OSError: if the cache cannot be written.
    """
    source = Path(model_path.partition(":")[2]).resolve()
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder.")
    import numpy
    from safetensors.numpy import save
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source))
    except Exception as error:  # transformers raises errors of many classes.
        reason = str(error).partition("\n")[0]
        message = f"{source} has no tokenizer that transformers can read: {reason}"
        raise ValueError(message) from error
    ids = range(min(len(tokenizer), _HIGHEST_ID))
    words = [id for id in ids if _WORD.fullmatch(tokenizer.decode([id]))]
    if len(words) < 2:
        raise ValueError(f"The tokenizer in {source} has no words among its first {_HIGHEST_ID}.")
    config = {
        "architectures": [EXPERTS_ARCHITECTURE if expert_layers else ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": context,
        "hidden_size": WIDTH,
        "head_dim": WIDTH,
        "intermediate_size": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "hash_words": words,
        "hash_layers": expert_layers,
    }
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = sha256(f"{source} {context} {expert_layers}".encode()).hexdigest()[:16]
    folder = cache / "flashmoa" / "hash-models" / name
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            _replace(folder / file.name, file.read_bytes())
    _replace(folder / "config.json", json.dumps(config).encode())
    _replace(folder / "model.safetensors", save({"none": numpy.zeros(1, "float32")}))
    return folder


def _replace(file: Path, content: bytes) -> None:
    """Write a file atomically, since another engine may be reading it."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}.partial")
    scratch.write_bytes(content)
    scratch.replace(file)
