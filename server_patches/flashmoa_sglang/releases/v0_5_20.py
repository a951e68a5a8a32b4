"""SGLang 0.5.20."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmoa_sglang.releases.v0_5_21 import Release0521


def keep_tensors_in_logprobs(
    original: Callable[..., Any],
    logprobs: Any,
    token_ids_logprobs_list: Any,
    stage: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Put an empty tensor in place of each empty list; wraps ``get_token_ids_logprobs_raw``.

    For a request that asked for no log-probabilities SGLang puts ``[]`` among the tensors of a
    decode step. Under the overlap schedule it later calls ``.tolist()`` on each, which fails for a
    list and ends the scheduler, as soon as a scored prompt shares a step with any other request.
    """
    values, ids = original(logprobs, token_ids_logprobs_list, stage, *args, **kwargs)
    if kwargs.get("no_copy_to_cpu") and stage.name == "DECODE":
        empty = logprobs.new_empty((0,))
        pairs = zip(token_ids_logprobs_list, values, strict=True)
        values = [empty if requested_ids is None else row for requested_ids, row in pairs]
    return values, ids


class Release0520(Release0521):
    SCHEDULER_FIXES = (
        (
            "sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw",
            keep_tensors_in_logprobs,
        ),
    )

    def _reserve(self, adder: Any, tokens: int) -> None:
        adder.rem_total_token_offset += tokens
        adder.cur_rem_token_offset += tokens

    def dp_rank(self, scheduler: Any) -> int:
        return scheduler.ps.dp_rank or 0

    def pipeline_stages(self, scheduler: Any) -> int:
        return scheduler.ps.pp_size
