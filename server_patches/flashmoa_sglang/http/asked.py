"""Tell what a ``GenerateReqInput`` asks for."""

from __future__ import annotations

from typing import Any


def decodes(obj: Any) -> bool:
    return any(params.get("max_new_tokens") != 0 for params in list_params(obj.sampling_params))


def is_list(obj: Any) -> bool:
    """Return whether a request has a list of prompts, which may have only one."""
    return isinstance(obj.text, list) or bool(obj.input_ids and isinstance(obj.input_ids[0], list))


def has_one_answer(obj: Any) -> bool:
    return all(params.get("n") in (None, 1) for params in list_params(obj.sampling_params))


def list_params(sampling_params: Any) -> list[dict[str, Any]]:
    """Return the sampling parameters of a request's prompts, which are a list or one object."""
    given = sampling_params or {}
    every = given if isinstance(given, list) else [given]
    return [params for params in every if isinstance(params, dict)]
