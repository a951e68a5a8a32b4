"""Runs ``add_choices`` as if ``flashmoa serve --flashmoa-asyncep`` was started on an H100."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from flashmoa_sglang.asyncep import choices
from flashmoa_sglang.releases import RELEASE

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples/models/qwen3-30b-a3b")
GRAPHS = RELEASE.NO_GRAPHS.split()
QWEN3_235B: dict[str, Any] = json.loads((Path(MODEL) / "config.json").read_text()) | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}


def h100(_: object) -> int:
    return 81559 << 20


def choose(
    given: str,
    model: str = MODEL,
    free_memory: Callable[[Any], int] | None = h100,
    read_config: Callable[[Any], dict[str, Any]] | None = None,
    host_bytes: int = 512 << 30,
) -> list[str]:
    """Return the arguments that are chosen on an H100 in addition to those that are given."""
    argv = ["--model-path", model, "--flashmoa-asyncep", "h2d", *shlex.split(given)]
    # Arguments of the plugin go into the environment.
    with mock.patch.dict(os.environ):
        result = choices.add_choices(argv, free_memory, read_config, host_bytes)
    # The user's arguments come last and prevail.
    assert result[len(result) - len(argv) :] == argv
    return result[: len(result) - len(argv)]
