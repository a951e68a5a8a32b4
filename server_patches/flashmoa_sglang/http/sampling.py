"""Sampling parameters of what clients send: checked, and marked for the scheduler."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from flashmoa_sglang import releases
from flashmoa_sglang.messages import CUSTOM_PARAMS_KEY

if TYPE_CHECKING:
    from flashmoa_sglang.messages import RequestMark

# Beyond these a tensor overflows or a distribution has no probability left to sum.
_BOUNDS: dict[str, tuple[float, float]] = {
    "top_k": (-1, 2**31 - 1),
    "repetition_penalty": (0.01, 2),
    "n": (1, 4096),
    "stream_interval": (1, 2**31 - 1),
}
_MOST_BIAS = 10_000


def check(obj: Any) -> None:
    """Refuse what would impersonate the plugin, or end the scheduler.

    Raises:
        ValueError: SGLang answers 400.
    """
    every = getattr(obj, "sampling_params", None)
    if isinstance(every, list):
        batch = obj.text if obj.text is not None else obj.input_ids
        if not isinstance(batch, list) or len(every) != len(batch):
            raise ValueError("sampling_params can be a list for a batch, one for each prompt.")
    for params in _each(every):
        _check_types(params)
        _check_values(params)
        custom = params.get("custom_params")
        if custom is None:
            continue
        if not isinstance(custom, dict):
            raise ValueError("custom_params must be an object.")
        # A mark says that KV belongs to a stream; one that nobody opened would never end.
        if CUSTOM_PARAMS_KEY in custom:
            raise ValueError(f"{CUSTOM_PARAMS_KEY!r} in custom_params is reserved.")


def put_mark(obj: Any, mark: RequestMark) -> None:
    """Tell the scheduler about a request, without touching what the client passed in."""
    params = obj.sampling_params
    if isinstance(params, list):
        obj.sampling_params = [_marked(each, mark) for each in params]
    else:
        obj.sampling_params = _marked(params or {}, mark)


def decodes(obj: Any) -> bool:
    """Whether any token is to be sampled."""
    return any(params.get("max_new_tokens") != 0 for params in _each(obj.sampling_params or {}))


def _check_types(params: dict[str, Any]) -> None:
    """SGLang takes the types on trust: a fraction where a count belongs ends its scheduler."""
    shape, names = _shape()
    unknown = params.keys() - names
    if names and unknown:
        raise ValueError(f"There is no sampling parameter {min(map(str, unknown))!r}.")
    try:
        msgspec.convert(params, shape)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"sampling_params: {error}") from error


def _check_values(params: dict[str, Any]) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = params.get(name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} must be in [{least}, {most}].")
    biases = (params.get("logit_bias") or {}).values()
    if biases and max(map(abs, biases)) > _MOST_BIAS:
        raise ValueError(f"logit_bias must be in [-{_MOST_BIAS}, {_MOST_BIAS}].")
    patterns = params.get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex: {error}") from error


@cache
def _shape() -> tuple[Any, frozenset[str]]:
    """SGLang's own declaration of sampling parameters, each of which may also be ``None``."""
    kinds = {name: kind | None for name, kind in releases.sampling_types().items()}
    # Read with care by whoever put it there.
    kinds["custom_params"] = Any
    return TypedDict("Sampling", kinds, total=False), frozenset(kinds)  # type: ignore[misc]


def _each(params: Any) -> list[dict[str, Any]]:
    """One request's parameters, or those of each request of a batch."""
    every = params if isinstance(params, list) else [params]
    return [each for each in every if isinstance(each, dict)]


def _marked(params: dict[str, Any], mark: RequestMark) -> dict[str, Any]:
    custom = params.get("custom_params") or {}
    return {**params, "custom_params": {**custom, **mark.to_custom_params()}}
