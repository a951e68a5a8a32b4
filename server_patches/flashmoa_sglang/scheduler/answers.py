"""Answers of prefill-only work leave the scheduler by a shorter way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmoa_sglang import releases
from flashmoa_sglang.messages import is_increment, mark_of


def _is_ours(side: Any, req: Any) -> bool:
    mark = mark_of(req)
    if mark is None or mark.final or req.return_logprob:
        return False
    # Not SGLang's ``is_prefill_only``, which is never so with speculative decoding. A prefill
    # engine of a PD pair samples a token, whatever it is asked for.
    return not req.sampling_params.max_new_tokens or side.role == "prefill"


def stream_output(
    original: Callable[..., None],
    streamer: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
) -> None:
    """Around ``releases.STREAM_OUTPUT``: prefill-only work has no text.

    Its answer goes straight to the HTTP process, which takes token-id batches too (that is
    what a server without tokenizer sends), and not through the detokenizer.
    """
    side = getattr(streamer.tree_cache, "flashmoa", None)
    ours = [req for req in reqs if side is not None and _is_ours(side, req)]
    if not ours:
        original(streamer, reqs, return_logprob, skip_req)
        return
    side.timer.stop(ours)
    if side.pins_results:
        for req in filter(is_increment, ours):
            side.pins.replace(mark_of(req).stream, releases.pin_cached(streamer.tree_cache, req))
    rest = [req for req in reqs if req not in ours]
    if rest:
        original(streamer, rest, return_logprob, skip_req)
    usual = streamer.send_to_detokenizer
    streamer.send_to_detokenizer = side.direct
    try:
        original(streamer, ours, False, skip_req)
    finally:
        streamer.send_to_detokenizer = usual
