"""Tiny models made on the spot, cached by what they are made from."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmoa.engine import EngineError

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_WORDS = 20_000


def tiny_model(shape: str, texts: Sequence[Path], cache: Path) -> Path:
    """A model folder of the given shape, its tokenizer trained on ``texts``.

    ``shape``: a name in ``flashmoa_sglang.tiny_model.SHAPES``. Made in seconds where it is
    not in ``cache`` yet. Raises: EngineError with the reason where it cannot be made.
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


def texts(arguments: argparse.Namespace) -> list[Path]:
    """What the tokenizer learns from: the text given, or the same random words every time."""
    given: Path | None = getattr(arguments, "text", None)
    if given is not None:
        return [given]
    dice = random.Random(0)
    made = arguments.cache / "words.txt"
    if not made.exists():
        words = ("".join(dice.choices(_SYLLABLES, k=dice.randint(1, 4))) for _ in range(_WORDS))
        made.parent.mkdir(parents=True, exist_ok=True)
        scratch = made.with_suffix(".partial")
        scratch.write_text(" ".join(words))
        scratch.replace(made)
    return [made]


def single_token_words(model: Path) -> list[str]:
    """Words of a byte-level vocabulary that are one token with the space before them."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [
        " " + token[1:] for token in vocabulary if token.startswith("Ġ") and token[1:].isalpha()
    ]
