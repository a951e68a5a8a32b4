"""Reads the hints in clients' ordinary requests, and refuses requests that would do harm.

Hints change when a request is computed and how much of it, never its answer. A token id outside of
the vocabulary would end SGLang's scheduler, and is an easy mistake: a client only has to tokenise
with another model's tokenizer. A prompt without tokens would end SGLang 0.5.23's. The plugin's mark
on a request is for the scheduler; clients must not set it. SGLang checks everything else itself.
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
# Schedulers compute with the numbers in hints; a larger one would be infinite there, or an error.
LARGEST_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Hints:
    """The fields that a client adds to a request for the plugin.

    ``stream_id``: id of the prompt stream that has the beginning of the prompt.
    ``expected_output``: number of tokens that the client expects in the answer.
    """

    stream_id: str | None = None
    expected_output: int | None = None


def read_hints(http_request: Any) -> Hints:
    """Read the hints in an HTTP request's body.

    Raises:
        ValueError: if a hint has a wrong type or value (SGLang answers 400).
    """
    # SGLang has already parsed the body, and Starlette keeps the result.
    body = getattr(http_request, "_json", None)
    if not isinstance(body, dict):
        return Hints()
    stream_id, expected = body.get(STREAM), body.get(EXPECTED_OUTPUT)
    if stream_id is not None and not isinstance(stream_id, str):
        raise ValueError(
            f"{STREAM} must be a string, as returned by POST /prompt_streams, not {stream_id!r}."
        )
    # In Python a bool is an int; in JSON it is not a number.
    if expected is not None and not (type(expected) is int and 0 <= expected <= LARGEST_NUMBER):
        raise ValueError(
            f"{EXPECTED_OUTPUT} must be an integer from 0 to {LARGEST_NUMBER}, not "
            f"{str(expected)[:40]}."
        )
    return Hints(stream_id, expected)


def check(obj: Any, vocabulary: int, tokenizer: Any) -> None:
    """Refuse a ``GenerateReqInput`` or ``EmbeddingReqInput`` that would do harm.

    A client's own mark could pin KV for a stream that was never opened, and so is never released.

    Args:
        tokenizer: the served one; ``None`` if there is none.

    Raises:
        ValueError: if its prompt has no tokens, or it has a token outside of the vocabulary, or a
            mark that the plugin has not set (SGLang answers 400).
    """
    if any(_is_empty(prompt, tokenizer) for prompt in _prompts(obj)):
        raise ValueError("The prompt is empty; give at least one token.")
    input_ids = getattr(obj, "input_ids", None) or []
    for ids in input_ids if input_ids and isinstance(input_ids[0], list) else [input_ids]:
        check_ids(ids, vocabulary)
    for ids in getattr(obj, "token_ids_logprob", None) or ():
        check_ids(ids if isinstance(ids, list) else [ids], vocabulary, "token_ids_logprob")
    for params in _list_params(getattr(obj, "sampling_params", None)):
        custom = params.get("custom_params")
        if custom is None:
            continue
        if not isinstance(custom, dict):
            raise ValueError(f"custom_params must be an object, not {type(custom).__name__}.")
        if CUSTOM_PARAMS_KEY in custom:
            raise ValueError(f"{CUSTOM_PARAMS_KEY!r} in custom_params is reserved; leave it out.")


def _prompts(obj: Any) -> Sequence[Any]:
    """Return the prompts of a request, each as text or as token ids."""
    # SGLang completes the prompts of requests with pictures, films or sound by itself.
    others = [getattr(obj, name, None) for name in ("image_data", "video_data", "audio_data")]
    if any(others):
        return []
    text, ids = getattr(obj, "text", None), getattr(obj, "input_ids", None)
    if text is not None:
        return text if isinstance(text, list) else [text]
    if ids is None:
        return []
    return ids if ids and isinstance(ids[0], list) else [ids]


def _is_empty(prompt: Any, tokenizer: Any) -> bool:
    """Return whether a prompt has no tokens. Some tokenizers begin even an empty text with one."""
    if prompt == "":
        return tokenizer is not None and not tokenizer.encode("")
    return prompt == []


def check_ids(ids: Sequence[int], vocabulary: int, name: str = "input_ids") -> None:
    """Raise ValueError if a token id is outside of the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"{name} must be in [0, {vocabulary}), but has {wrong}; tokenise with this model's "
            "tokenizer."
        )


def put_mark(obj: Any, mark: RequestMark) -> None:
    """Put a mark on a request for the scheduler, without changing the client's dictionaries."""
    sampling_params = obj.sampling_params
    if isinstance(sampling_params, list):
        obj.sampling_params = [_with_mark(params, mark) for params in sampling_params]
    else:
        obj.sampling_params = _with_mark(sampling_params or {}, mark)


def decodes(obj: Any) -> bool:
    """Return whether the request samples any token."""
    sampling_params = _list_params(obj.sampling_params or {})
    return any(params.get("max_new_tokens") != 0 for params in sampling_params)


def _list_params(sampling_params: Any) -> list[dict[str, Any]]:
    all_params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    return [params for params in all_params if isinstance(params, dict)]


def _with_mark(params: dict[str, Any], mark: RequestMark) -> dict[str, Any]:
    custom = params.get("custom_params") or {}
    return {**params, "custom_params": {**custom, **mark.to_custom_params()}}
