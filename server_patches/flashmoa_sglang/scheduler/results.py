"""Hooks around a forward: its time, mixing with decodes, the end of increments, sent results."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.scheduler.request import is_increment, state_of
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Time a forward, and collect token states; wraps ``Scheduler.run_batch``."""
    state: SchedulerState = scheduler.flashmoa
    run = partial(original, scheduler, batch, *args, **kwargs)
    with state.token_states.collecting(batch.reqs):
        return state.timer.launch(run, batch)


def process_result(
    original: Callable[..., None], scheduler: Any, batch: Any, result: Any, *args: Any
) -> None:
    """End a forward's time; wraps ``Scheduler.process_batch_result``."""
    state: SchedulerState = scheduler.flashmoa
    state.timer.process(partial(original, scheduler, batch, result, *args), result, batch.reqs)


def mix(original: Callable[..., None], batch: Any, running_batch: Any) -> None:
    """Let decodes share a forward with any prefill; wraps ``mix_with_running``.

    SGLang 0.5.12 derives a decode's position, which it calls its prefix, from the number of its
    output tokens, and assumes under the overlap schedule that the last one is still missing there.
    A decode that was not in the last forward, as after a prefill of others, would be one position
    too high. The length of its sequence has been counted for this forward already, so it is right
    for every decode, and SGLang 0.5.23 uses it, too.

    SGLang mixes nothing with decodes that return log-probabilities: it would also return one for
    each decode's input token, and none for the prefilled tokens. So every row gets the
    log-probabilities of its output alone, as in a decode step.
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
    """Remove increments after their forward; wraps ``ScheduleBatch.filter_batch``.

    Under the overlap schedule, SGLang makes the next decode step of a mixed batch before it knows
    that the increments have ended, and would decode a token of each.
    """
    original(batch, *args, **kwargs)
    if batch.reqs and batch.forward_mode.is_extend():
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

    The HTTP process takes token ids, too, because a server without a tokenizer sends these.
    Increments have no answer: the HTTP process only gets their number of tokens.
    """
    state: SchedulerState = streamer.tree_cache.flashmoa
    state.timer.stop(reqs)
    if news := state.written.news(reqs, time.monotonic()):
        state.tokenizer_channel.send_output(RELEASE.wrap(news), None)
    for req in reqs:
        mark = state_of(req).mark
        # Under the overlap schedule, SGLang passes an ended request twice.
        if mark is not None and mark.final and req.finished() and not req.finished_output:
            state.streams.note_end(req)
    increments = [req for req in reqs if is_increment(req)]
    for req in increments:
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
    if mark is None or not mark.own:
        return False
    # SGLang's ``is_prefill_only`` is false with speculative decoding.
    if not req.sampling_params.max_new_tokens:
        return True
    # A prefill engine of a PD pair samples one token even if none is requested.
    return state.role == "prefill" and not req.return_logprob
