"""The plugin's mark on ordinary requests: put there for the scheduler, refused from clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import CUSTOM_PARAMS_KEY

if TYPE_CHECKING:
    from flashmoa_sglang.messages import RequestMark


def refuse_forged(obj: Any) -> None:
    """Refuse a request that carries a mark which the plugin did not put there.

    A mark says that KV belongs to a stream; one that nobody opened would never end.

    Raises:
        ValueError: SGLang answers 400.
    """
    for params in _each(getattr(obj, "sampling_params", None)):
        custom = params.get("custom_params")
        if custom is None:
            continue
        if not isinstance(custom, dict):
            raise ValueError(f"custom_params must be an object, not {type(custom).__name__}.")
        if CUSTOM_PARAMS_KEY in custom:
            raise ValueError(f"{CUSTOM_PARAMS_KEY!r} in custom_params is reserved; leave it out.")


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


def _each(params: Any) -> list[dict[str, Any]]:
    """One request's parameters, or those of each request of a batch."""
    every = params if isinstance(params, list) else [params]
    return [each for each in every if isinstance(each, dict)]


def _marked(params: dict[str, Any], mark: RequestMark) -> dict[str, Any]:
    custom = params.get("custom_params") or {}
    return {**params, "custom_params": {**custom, **mark.to_custom_params()}}
