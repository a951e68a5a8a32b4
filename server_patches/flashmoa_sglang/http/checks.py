"""What SGLang takes on trust and would not survive, refused before it gets there.

Most of these, sent to a stock server, end its scheduler or its detokenizer, and with them
every request of everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoa_sglang.http import sampling


def check(obj: Any, vocabulary: int, tokenizer: Any = None) -> None:
    """Refuse a ``GenerateReqInput`` or ``EmbeddingReqInput`` that would do harm.

    Args:
        tokenizer: the served one, if there is one.

    Raises:
        ValueError: SGLang answers 400.
    """
    sampling.check(obj)
    texts = obj.text if isinstance(obj.text, list) else [obj.text]
    # Where no token begins every text, that would be a prompt of none.
    if "" in texts and tokenizer is not None and not tokenizer.encode(""):
        raise ValueError("text cannot be empty.")
    ids = getattr(obj, "input_ids", None)
    if ids is not None:
        for each in ids if ids and isinstance(ids[0], list) else [ids]:
            if not each:
                raise ValueError("input_ids cannot be empty.")
            check_ids(each, vocabulary)
    _check_range(obj, "logprob_start_len", -1, None)
    _check_range(obj, "top_logprobs_num", 0, vocabulary)
    for asked in getattr(obj, "token_ids_logprob", None) or ():
        check_ids(asked if isinstance(asked, list) else [asked], vocabulary, "token_ids_logprob")
    if isinstance(getattr(obj, "positional_embed_overrides", None), dict | list):
        raise ValueError("positional_embed_overrides cannot be sent as JSON.")

    if isinstance(getattr(obj, "rid", None), list) and _is_one(obj):
        raise ValueError("rid must be a string for one prompt.")


def _is_one(obj: Any) -> bool:
    """Whether this is one prompt and one answer, not a batch."""
    params = obj.sampling_params or {}
    if isinstance(params, list) or (params.get("n") or 1) > 1 or isinstance(obj.text, list):
        return False
    return not (obj.text is None and obj.input_ids and isinstance(obj.input_ids[0], list))


def check_ids(ids: Sequence[int], vocabulary: int, name: str = "input_ids") -> None:
    """Raises: ValueError for a token that there is not."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        raise ValueError(f"{name} must be in [0, {vocabulary}).")


def _check_range(obj: Any, name: str, least: int, most: int | None) -> None:
    values = getattr(obj, name, None)
    for value in values if isinstance(values, list) else [values]:
        if value is None:
            continue
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"in [{least}, {most}]"
            raise ValueError(f"{name} must be {bound}.")
