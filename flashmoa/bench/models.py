"""Tiny models made on the spot, cached by what they are made from."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def tiny_model(shape: str, texts: Sequence[Path], cache: Path) -> Path:
    """A model folder of the given shape, its tokenizer trained on ``texts``.

    ``shape``: a name in ``flashmoa_sglang.tiny_model.SHAPES``. Made in seconds where it is
    not in ``cache`` yet.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.read_bytes())
    out = cache / f"{shape}-{digest.hexdigest()[:12]}"
    if not out.exists():
        command = [sys.executable, "-m", "flashmoa_sglang.tiny_model", "--out", str(out)]
        command += ["--shape", shape, "--text", *map(str, texts)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return out
