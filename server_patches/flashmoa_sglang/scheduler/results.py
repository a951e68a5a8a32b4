"""Hooks around a forward's requests: what decodes get in it, which go on, how results are sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.scheduler.pins import match_and_pin
from flashmoa_sglang.scheduler.request import is_increment, state_of
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState


def mix(original: Callable[..., None], batch: Any, running_batch: Any) -> None:
    """Let decodes share a forward with any prefill; wraps ``mix_with_running``.

    SGLang 0.5.12 takes each decode's position, which it calls its prefix, from the number of its
    output tokens. Under the overlap schedule it assumes that its last token is not among these yet.
    That is wrong for a decode that was not in the forward before, as after a prefill of others: its
    position would be one too high. The length of its sequence has been counted for this forward
    already, so it is right for every decode. SGLang 0.5.23 uses it, too.

    SGLang mixes nothing with decodes that return log-probabilities. It would return one of each
    decode's input token, too, which nobody has asked for. Of the prefilled tokens it returns none
    in such a batch. So every row has log-probabilities of its output alone, as in a decode step.
    """
    running_batch.return_logprob = any(req.return_logprob for req in running_batch.reqs)
    original(batch, running_batch)
    # Speculative decoding counts its sequences elsewhere.
    if batch.spec_algorithm.is_none():
        positions = [length - 1 for length in running_batch.seq_lens_cpu.tolist()]
        batch.prefix_lens = batch.prefix_lens[: -len(positions)] + positions
    if running_batch.return_logprob:
        RELEASE.return_no_input_logprobs(batch)


def drop_increments(original: Callable[..., None], batch: Any, *args: Any, **kwargs: Any) -> None:
    """Let increments go no further than their forward; wraps ``ScheduleBatch.filter_batch``.

    Under the overlap schedule, SGLang does not know yet that they have ended when it makes the next
    decode step of the requests of a mixed batch, and would decode a token of each.
    """
    original(batch, *args, **kwargs)
    # Where the plugin is off there are none, and a mark may be a client's.
    is_off = getattr(batch.tree_cache, "flashmoa", None) is None
    if batch.reqs and not is_off and batch.forward_mode.is_extend():
        kept = [i for i, req in enumerate(batch.reqs) if not is_increment(req)]
        if len(kept) < len(batch.reqs):
            original(batch, keep_indices=kept)


def stream_output(
    original: Callable[..., None],
    streamer: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
) -> None:
    """Send answers without text past the detokenizer; wraps ``RELEASE.STREAM_OUTPUT``.

    Increments have no answer: the HTTP process only gets their number of tokens.

    The HTTP process takes token ids, too, because a server without a tokenizer sends these.
    """
    state: SchedulerState | None = getattr(streamer.tree_cache, "flashmoa", None)
    if state is None:
        original(streamer, reqs, return_logprob, skip_req)
        return
    state.timer.stop(reqs)
    if news := state.written.news(reqs, time.monotonic()):
        state.tokenizer_channel.send_output(RELEASE.wrap(news), None)
    for req in reqs:
        mark = state_of(req).mark
        # Under the overlap schedule, SGLang hands a request that has ended over twice.
        if mark is not None and mark.final and req.finished() and not req.finished_output:
            state.streams.note_end(req)
    increments = [req for req in reqs if is_increment(req)]
    for req in increments:
        stream = state_of(req).increment_of
        if stream is not None and state.streams.is_unpinned(req):
            key = RELEASE.radix_key(req, len(req.origin_input_ids))
            pin, _ = match_and_pin(streamer.tree_cache, key)
            state.pins.replace(stream, pin)
        state.streams.finish(req, state.timer.seconds)
    if increments:
        state.increments_ended = True
        state.streams.report()
        reqs = [req for req in reqs if not is_increment(req)]
    direct = [req for req in reqs if _has_no_text(state, req)]
    rest = [req for req in reqs if not _has_no_text(state, req)] if direct else reqs
    if rest or not (increments or direct):
        original(streamer, rest, return_logprob, skip_req)
    if direct:
        send_to_detokenizer = streamer.send_to_detokenizer
        streamer.send_to_detokenizer = state.tokenizer_channel
        try:
            original(streamer, direct, return_logprob, skip_req)
        finally:
            streamer.send_to_detokenizer = send_to_detokenizer


def _has_no_text(state: SchedulerState, req: Any) -> bool:
    mark = state_of(req).mark
    if mark is None or mark.stream is not None:
        return False
    # SGLang's ``is_prefill_only`` is false with speculative decoding.
    if not req.sampling_params.max_new_tokens:
        return True
    # A prefill engine of a PD pair samples one token even if none is requested.
    return state.role == "prefill" and not req.return_logprob
