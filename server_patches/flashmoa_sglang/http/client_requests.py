"""What clients' ordinary requests carry for the plugin, and what is refused of them.

Hints change when and how cheaply a request is computed, never what it answers. Token ids outside of
the vocabulary are refused because they would end SGLang's scheduler: they are what a client that
tokenises by itself gets wrong most easily (another model's tokenizer). The plugin's mark tells the
scheduler about a request, and is refused from clients. SGLang checks all the rest itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import CUSTOM_PARAMS_KEY

if TYPE_CHECKING:
    from flashmoa_sglang.messages import RequestMark

STREAM = "prompt_stream_id"
EXPECTED_OUTPUT = "expected_output_tokens"


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says of a request beside SGLang's own fields.

    ``stream_id``: the prompt stream that holds the beginning of the prompt.
    ``expected_output``: how many tokens the answer is likely to have.
    """

    stream_id: str | None = None
    expected_output: int | None = None


def read_hints(http_request: Any) -> Hints:
    """Read the hints in an HTTP request's body.

    Raises:
        ValueError: one has a wrong type or value (SGLang answers 400).
    """
    # SGLang has parsed the body by now, and Starlette keeps the result.
    body = getattr(http_request, "_json", None)
    if not isinstance(body, dict):
        return Hints()
    stream_id, expected = body.get(STREAM), body.get(EXPECTED_OUTPUT)
    if stream_id is not None and not isinstance(stream_id, str):
        raise ValueError(f"{STREAM} must be a string, as returned by POST /prompt_streams.")
    # ``True`` is an int in Python only.
    if expected is not None and (type(expected) is not int or expected < 0):
        raise ValueError(f"{EXPECTED_OUTPUT} must be an integer of at least 0.")
    return Hints(stream_id, expected)


def check(obj: Any, vocabulary: int) -> None:
    """Refuse a ``GenerateReqInput`` or ``EmbeddingReqInput`` that SGLang must not be given.

    A mark says that KV belongs to a stream: that of a stream which was never opened would not end.

    Raises:
        ValueError: it has a token outside of the vocabulary, or a mark that the plugin did not put
            there (SGLang answers 400).
    """
    ids = getattr(obj, "input_ids", None) or []
    for each in ids if ids and isinstance(ids[0], list) else [ids]:
        check_ids(each, vocabulary)
    for asked in getattr(obj, "token_ids_logprob", None) or ():
        check_ids(asked if isinstance(asked, list) else [asked], vocabulary, "token_ids_logprob")
    for params in _each(getattr(obj, "sampling_params", None)):
        custom = params.get("custom_params")
        if custom is None:
            continue
        if not isinstance(custom, dict):
            raise ValueError(f"custom_params must be an object, not {type(custom).__name__}.")
        if CUSTOM_PARAMS_KEY in custom:
            raise ValueError(f"{CUSTOM_PARAMS_KEY!r} in custom_params is reserved; leave it out.")


def check_ids(ids: Sequence[int], vocabulary: int, name: str = "input_ids") -> None:
    """Refuse token ids outside of the vocabulary. Raises: ValueError."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"{name} must be in [0, {vocabulary}), but has {wrong}; tokenise with this model's "
            "tokenizer."
        )


def put_mark(obj: Any, mark: RequestMark) -> None:
    """Tell the scheduler about a request, without touching what the client passed in."""
    params = obj.sampling_params
    if isinstance(params, list):
        obj.sampling_params = [_marked(each, mark) for each in params]
    else:
        obj.sampling_params = _marked(params or {}, mark)


def decodes(obj: Any) -> bool:
    """Return whether any token is to be sampled."""
    return any(params.get("max_new_tokens") != 0 for params in _each(obj.sampling_params or {}))


def _each(params: Any) -> list[dict[str, Any]]:
    """Return one request's parameters, or those of each request of a batch."""
    every = params if isinstance(params, list) else [params]
    return [each for each in every if isinstance(each, dict)]


def _marked(params: dict[str, Any], mark: RequestMark) -> dict[str, Any]:
    custom = params.get("custom_params") or {}
    return {**params, "custom_params": {**custom, **mark.to_custom_params()}}
