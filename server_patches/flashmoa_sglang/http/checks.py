"""Token ids that there are not: refused, because they would end SGLang's scheduler.

They are what a client that tokenises by itself gets wrong most easily (another model's tokenizer).
Whatever else is in a request is SGLang's own to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check(obj: Any, vocabulary: int) -> None:
    """Refuse a ``GenerateReqInput`` or ``EmbeddingReqInput`` with a token that there is not.

    Raises:
        ValueError: SGLang answers 400.
    """
    ids = getattr(obj, "input_ids", None) or []
    for each in ids if ids and isinstance(ids[0], list) else [ids]:
        check_ids(each, vocabulary)
    for asked in getattr(obj, "token_ids_logprob", None) or ():
        check_ids(asked if isinstance(asked, list) else [asked], vocabulary, "token_ids_logprob")


def check_ids(ids: Sequence[int], vocabulary: int, name: str = "input_ids") -> None:
    """Raises: ValueError for a token that there is not."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        raise ValueError(f"{name} must be in [0, {vocabulary}).")
