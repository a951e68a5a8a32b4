"""The guard: refuses what would end a scheduler, behind SGLang's own tokenisation.

An exception in a scheduler ends the engine and all requests. The guard reads the message that
SGLang has made for its scheduler. So the guard checks what the scheduler will compute, whichever
route and fields the client has used. It raises ValueError, which SGLang answers with 400.
"""

from __future__ import annotations

import logging
import math
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from numbers import Integral, Real
from typing import Any

import numpy

from flashmoa_sglang.http.asked import list_params
from flashmoa_sglang.http.engine import GRAMMARS, is_ours
from flashmoa_sglang.http.errors import MalformedRequest, shown
from flashmoa_sglang.moe import kv_free
from flashmoa_sglang.sglang.releases import RELEASE

logger = logging.getLogger(__name__)

# SGLang makes a request for each answer to a prompt before it checks any.
_MAX_ANSWERS = 16_384
_INT32, _INT64 = numpy.iinfo(numpy.int32), numpy.iinfo(numpy.int64)
_LARGEST_FLOAT32 = float(numpy.finfo(numpy.float32).max)
# SGLang's own code raises these for a body that it cannot read. It answers ValueErrors alone.
_UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
    re.error,
)  # fmt: skip

# The types and ranges of sampling parameters. Older releases check few types, and lack some.
_RANGES: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (Integral, 0, _INT64.max),
    "beam_width": (Integral, 1, _INT32.max),
    "stream_interval": (Integral, -_INT32.max, _INT32.max),
    "sampling_seed": (Integral, _INT64.min, _INT64.max),
    "min_new_tokens": (Integral, 0, _INT32.max),
    "top_k": (Integral, 1, _INT32.max),
    "n": (Integral, 0, _MAX_ANSWERS),
    # A larger temperature is infinite in the sampler, which divides a banned token's logit by it.
    "temperature": (Real, 0, 1e30),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "frequency_penalty": (Real, -2, 2),
    "presence_penalty": (Real, -2, 2),
    "repetition_penalty": (Real, 0, 2),
}
_OPTIONAL = {"max_new_tokens", "beam_width", "stream_interval", "sampling_seed"}
_FLAGS = ("ignore_eos", "spaces_between_special_tokens", "no_stop_trim")
# The only fields of a message for one request that may be lists or objects.
_LISTS = {
    "input_ids", "input_text", "input_embeds", "mm_inputs", "image_inputs", "token_type_ids",
    "token_ids_logprob", "multi_item_delimiter_indices", "token_indices_to_pool",
    "num_items_assigned", "encoder_urls", "decision_layout",
}  # fmt: skip


async def answer(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, http_request: Any
) -> AsyncGenerator[Any]:
    """Yield a request's outputs, and refuse what SGLang fails to read; runs around SGLang.

    Raises: ValueError in place of other exceptions, which SGLang answers with 500.
    """
    try:
        for params in list_params(getattr(obj, "sampling_params", None)):
            answers = params.get("n")
            if isinstance(answers, int) and answers > _MAX_ANSWERS:
                raise ValueError(f"n must be at most {_MAX_ANSWERS}, not {shown(answers)}.")
        async with aclosing(original(manager, obj, http_request)) as outputs:
            async for output in outputs:
                yield output
    except _UNREADABLE as error:
        logger.debug("SGLang cannot read a request", exc_info=error)
        reason = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"SGLang cannot read this request ({reason}); correct it.") from error
    finally:
        keep_abortable(obj)


def keep_abortable(obj: Any) -> None:
    """Let SGLang look for the ids of a request that it has refused early.

    SGLang does so two seconds after a streamed answer. An exception then cuts the connection's next
    answer.
    """
    obj.is_single = not isinstance(obj.rid, list)


def refuse_harmful(message: Any, manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """Refuse what would end a scheduler; runs after ``TokenizerManager._create_tokenized_object``.

    Args:
        message: SGLang's message to the scheduler for one request.
        obj: the request's ``GenerateReqInput`` or ``EmbeddingReqInput``.
    Raises: ValueError if the scheduler cannot compute the message.
    """
    if manager.flashmoa_table is None or is_ours(obj):
        return
    generates = hasattr(message, "stream")  # Other messages ask for an embedding.
    if generates and not manager.model_config.is_generation:
        raise ValueError("This engine only makes embeddings; ask for them at /v1/embeddings.")
    vocabulary = manager.model_config.vocab_size
    _check_sampling(message.sampling_params, vocabulary)
    _check_fields(message)
    _check_tokens(message, manager, obj)
    _check_objects(message, manager, obj)
    if generates:
        _check_logprobs(message, vocabulary)
        _check_session(message.session_params)
        _check_processor(message.custom_logit_processor)
        kv_free.check(message)


def _check_sampling(params: Any, vocabulary: int) -> None:
    """Refuse sampling parameters that the sampler or the detokenizer cannot use.

    Numbers of ``logit_bias`` that float32 lacks become infinite.
    """
    for name, (kind, least, most) in _RANGES.items():
        if name not in _OPTIONAL or getattr(params, name, None) is not None:
            _check_number(name, getattr(params, name), kind, least, most)
    for name in GRAMMARS:
        _check_type(name, getattr(params, name, None), str, "a string")
        # Some releases of xgrammar crash at NUL.
        if re.search("[\0\ud800-\udfff]", getattr(params, name, None) or ""):
            raise ValueError(f"{name} must be Unicode text without NUL.")
    # An empty one is none in newer releases, and ends the scheduler of older ones.
    if getattr(params, "structural_tag", None) == "":
        params.structural_tag = None
    for name in _FLAGS:
        _check_type(name, getattr(params, name, None), int, "true or false")
    # Fast tokenizers refuse 0 and 1, which ends the detokenizer.
    _check_type("skip_special_tokens", params.skip_special_tokens, bool, "true or false")
    bias = getattr(params, "logit_bias", None)
    bias = {} if bias is None else bias
    _check_type("logit_bias", bias, dict, "an object")
    for token, value in bias.items():
        _check_number("logit_bias", value, Real, -math.inf, math.inf)
        # As newer releases compute it. In older ones, such numbers end the scheduler.
        if abs(value) > _LARGEST_FLOAT32:
            bias[token] = math.inf if value > 0 else -math.inf
    # Python fails to send values that are nested some hundred levels deep to another process.
    if _is_deep(params.custom_params, 32):
        raise ValueError("custom_params must have at most 32 levels.")
    if params.stop_token_ids:
        # No answer can have other tokens, and SGLang would look for their logits.
        ids = {token for token in params.stop_token_ids if 0 <= token < vocabulary}
        params.stop_token_ids = ids or None


def _check_fields(message: Any) -> None:
    """Refuse lists where a message for one request has no list, and numbers beyond 64 bits."""
    names = getattr(message, "__struct_fields__", None) or vars(message)
    for name in names:
        value = getattr(message, name)
        if isinstance(value, list | dict) and name not in _LISTS:
            raise ValueError(f"{name} of one request must not be a list or an object.")
        if isinstance(value, int):
            _check_number(name, value, Integral, _INT64.min, _INT64.max)


def _check_tokens(message: Any, manager: Any, obj: Any) -> None:
    embeds = getattr(message, "input_embeds", None)
    if embeds is not None:
        _check_embeds(embeds, manager.model_config.hidden_size)
        return
    ids = message.input_ids
    # A model's processor may put ids outside of the vocabulary in the place of pictures. In some
    # models it runs in the scheduler, and the tokens come only there.
    has_media = manager.mm_processor is not None and obj.contains_mm_input()
    is_complete = not has_media or getattr(message, "mm_inputs", None) is not None
    if not ids and is_complete and not _has_history(message):
        raise ValueError("The prompt is empty; give at least one token.")
    if ids and not has_media:
        check_ids(ids, manager.model_config.vocab_size)
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        places = getattr(message, name, None)
        if places is not None:
            _check_places(name, places, len(ids or ()))
            # SGLang counts the places from the first token that is not cached.
            if manager.flashmoa_table.engine.has_radix_cache:
                raise ValueError(f"{name} needs an engine with --disable-radix-cache.")


def _has_history(message: Any) -> bool:
    """Return whether SGLang adds the earlier tokens of a session to the message."""
    session = getattr(message, "session_params", None)
    return session is not None and session.id is not None and RELEASE.CHECKS_SESSIONS


def _check_places(name: str, places: Any, tokens: int) -> None:
    if not isinstance(places, list) or not places:
        raise ValueError(f"{name} must be a list of at least one place.")
    for place in places:
        _check_number(name, place, Integral, 0, tokens - 1)


def _check_embeds(embeds: Any, hidden_size: int) -> None:
    try:
        with numpy.errstate(over="ignore"):
            rows: Any = numpy.asarray(embeds, numpy.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError("input_embeds must be a list of lists of numbers.") from error
    if rows.ndim != 2 or rows.shape[1] != hidden_size or not numpy.isfinite(rows).all():
        raise ValueError(f"Each of input_embeds must have {hidden_size} finite numbers.")


def _check_logprobs(message: Any, vocabulary: int) -> None:
    start, number, ids = (
        message.logprob_start_len, message.top_logprobs_num, message.token_ids_logprob
    )  # fmt: skip
    _check_number("logprob_start_len", start, Integral, -1, _INT32.max)
    _check_number("top_logprobs_num", number, Integral, 0, vocabulary)
    if ids is not None:
        check_ids(ids, vocabulary, "token_ids_logprob")


def _check_objects(message: Any, manager: Any, obj: Any) -> None:
    """Refuse fields that only SGLang itself sets, or that its scheduler would unpack."""
    if isinstance(message.positional_embed_overrides, int | float | str):
        raise ValueError("positional_embed_overrides cannot be given as JSON; leave it out.")
    if obj.lora_id is not None and not obj.lora_path:
        raise ValueError("lora_id is SGLang's own; name the adapter in lora_path.")
    labels = getattr(obj, "custom_labels", None)
    if labels and manager.enable_metrics:
        unknown = labels.keys() - manager.metrics_collector.labels.keys()
        if unknown:
            raise ValueError(f"custom_labels has an unknown label: {shown(unknown.pop())}.")


def _check_session(session: Any) -> None:
    if session is not None:
        for name in ("id", "rid"):
            _check_type(f"session_params.{name}", getattr(session, name), str, "a string")
        if session.offset is not None:
            bounds = -_INT64.max, _INT64.max
            _check_number("session_params.offset", session.offset, Integral, *bounds)


def _check_processor(processor: str | None) -> None:
    if processor is None:
        return
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(processor)
    except Exception as error:
        raise ValueError("custom_logit_processor cannot be loaded.") from error


def check_ids(ids: Any, vocabulary: int, name: str = "input_ids") -> None:
    """Raise MalformedRequest if a token id is outside of the vocabulary."""
    if not isinstance(ids, list | array):
        raise MalformedRequest(f"{name} must be a list of token ids, not {shown(ids)}.")
    if not ids:
        return
    with suppress(OverflowError, TypeError):
        numbers: Any = numpy.frombuffer(array("q", ids), numpy.int64)
        if numbers.min() >= 0 and numbers.max() < vocabulary:
            return
    wrong = next(one for one in ids if not (isinstance(one, int) and 0 <= one < vocabulary))
    raise MalformedRequest(
        f"{name} must be in [0, {vocabulary}), but has {shown(wrong)}; tokenise with this model's "
        "tokenizer."
    )


def _check_number(name: str, value: Any, kind: type, least: float, most: float) -> None:
    if isinstance(value, kind) and least <= value <= most:
        return
    what = "an integer" if kind is Integral else "a number"
    raise ValueError(f"{name} must be {what} from {least} to {most}, not {shown(value)}.")


def _check_type(name: str, value: Any, kind: type, what: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, not {shown(value)}.")


def _is_deep(value: Any, levels: int) -> bool:
    inner: Iterable[Any] = ()
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(one, levels - 1) for one in inner)
