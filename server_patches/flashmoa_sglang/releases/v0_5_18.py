"""SGLang 0.5.18, and what each name of :mod:`flashmoa_sglang.releases` is for."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import numpy as np
    from numpy.typing import NDArray

_MANAGERS = "sglang.srt.managers"

# Takes ``(reqs, return_logprob, skip_req)`` and sends the answers on through its
# ``send_to_detokenizer``; has the ``tree_cache``.
STREAM_OUTPUT = (
    f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)

# What a model runner makes its offloader with, as it sees it.
CREATE_OFFLOADER = "sglang.srt.model_executor.model_runner.create_offloader_from_server_args"

# What turns all CUDA graphs off.
NO_GRAPHS = "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"


def prepare_import() -> None:
    """What must happen in each process before SGLang is imported: nothing."""


def server_arguments(argv: list[str]) -> list[str]:
    """The user's arguments and what this release cannot find out by itself."""
    return argv


def resolved(server_args: Any) -> Any:
    """SGLang's arguments, once they are read, with what it has chosen where none was given."""
    return server_args


def graphs_are_off(arguments: Any) -> bool:
    """Whether SGLang replays no forward from a CUDA graph, by its resolved arguments.

    The older ``--disable-cuda-graph`` leaves a phase its graphs where another argument asks for
    them.
    """
    config = arguments.cuda_graph_config
    return config.decode.backend == config.prefill.backend == "disabled"


def data_parallel_ranks(arguments: Any) -> int:
    """How many schedulers, each with KV of its own, requests are divided among."""
    return arguments.dp_size or 1


def steps_together(arguments: Any) -> bool:
    """Whether ranks that have not the same requests must be in the same forward.

    With pipeline stages, and where SGLang has ranks agree on each batch (``require_mlp_sync``,
    which only a scheduler knows for certain): at least wherever it has.
    """
    return (
        arguments.pp_size > 1
        or arguments.enable_dp_attention
        or arguments.moe_a2a_backend != "none"
        or arguments.moe_dense_tp_size is not None
    )


def discard_states(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Around ``TokenizerManager._discard_pending_req_states``: stop what nobody will read.

    SGLang drops a request's state when its client is gone, and its abort, two seconds later,
    then finds nothing to abort: the request would decode to its last token.
    """
    # Not for a request that was refused: it never ran, and SGLang aborts by prefix of the id.
    if isinstance(sys.exc_info()[1], asyncio.CancelledError | GeneratorExit):
        rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid
        for rid in rids or ():
            manager.abort_request(rid)
    original(manager, obj)


def token_ids_logprobs(
    original: Callable[..., Any],
    logprobs: Any,
    token_ids_logprobs_list: Any,
    stage: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around ``get_token_ids_logprobs_raw``: a tensor for each request of a decode step.

    Under the overlap schedule SGLang turns all of them into lists later, and a list that stands for
    a request which asked for none ends the scheduler: a scored prompt beside any other request.
    """
    values, ids = original(logprobs, token_ids_logprobs_list, stage, *args, **kwargs)
    if kwargs.get("no_copy_to_cpu") and stage.name == "DECODE":
        none = logprobs.new_empty((0,))
        asked = zip(token_ids_logprobs_list, values, strict=True)
        values = [none if tokens is None else row for tokens, row in asked]
    return values, ids


# What the release does wrong in its scheduler where the plugin depends on it; as below.
MENDED_IN_SCHEDULER: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw", token_ids_logprobs),
)

# What the release does wrong where the plugin depends on it: targets, and what goes around.
MENDED: tuple[tuple[str, Callable[..., Any]], ...] = (
    (
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._discard_pending_req_states",
        discard_states,
    ),
)


def forgetting(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``TokenizerManager.generate_request``, leaving nothing of what it refuses: it does not."""
    return generate


def running_batch(_scheduler: Any, arguments: dict[str, Any]) -> Any:
    """The decoding requests, from the arguments of ``_get_new_batch_prefill_raw``."""
    return arguments["running_batch"]


def new_batch(result: Any) -> Any:
    """The prefill batch, or ``None``, from its result."""
    return result[0]


def no_batch(running: Any) -> Any:
    """The result that stands for no prefill batch."""
    return None, running


def running_after(_scheduler: Any, result: Any) -> Any:
    """The decoding requests after such a result."""
    return result[1]


def publish(scheduler: Any, req: Any) -> None:
    """Put the KV of a request that is about to run into the radix tree.

    What chunked prefill does between chunks: the forward has not run yet, but everything
    that could read these slots runs behind it. The batch is already built on the request's
    prefix, so that is put back.
    """
    prefix = req.prefix_indices
    scheduler.stash_chunked_request(req)
    req.prefix_indices = prefix


def look_after_host_cache(scheduler: Any) -> None:
    """What becomes of copies to and from host memory, as before each prefill batch."""
    from sglang.srt.runtime_context import get_memory

    if scheduler.enable_hierarchical_cache or get_memory().enable_flexkv:
        scheduler.tree_cache.check_hicache_events()


def release_prefetch(scheduler: Any, req: Any) -> None:
    """Stop bringing KV back from storage for a request that will not run."""
    if scheduler.enable_hicache_storage:
        scheduler.tree_cache.release_aborted_request(req.rid)


def release_metadata_buffer(scheduler: Any, req: Any) -> None:
    """Give back what a request that will not run has for its transfer to a decode engine."""
    from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer

    maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)


def dp_rank(scheduler: Any) -> int:
    return scheduler.ps.dp_rank or 0


def pipeline_stages(scheduler: Any) -> int:
    return scheduler.ps.pp_size


def kept_free(scheduler: Any, _req: Any) -> float:
    """The part of what a running request may still write that no other one is given room of.

    SGLang's estimate of how early answers end; it follows from steps and retractions alone.
    """
    return scheduler.new_token_ratio_tracker.current


# Backends that write the keys and values of a whole batch before they read any of them.
# FlashInfer's ragged prefill does not, nor do the MLA paths.
_WRITE_FIRST = {"torch_native", "triton", "fa3"}


def shares_within_forward(scheduler: Any) -> bool:
    """Whether a request may read KV that another one of its batch writes."""
    arguments = scheduler.server_args
    backend = arguments.prefill_attention_backend or arguments.attention_backend
    return (
        backend in _WRITE_FIRST
        and not scheduler.model_config.attention_arch.name.startswith("MLA")
        and scheduler.spec_algorithm.is_none()
    )


def from_host(req: Any) -> bool:
    """Whether some of the request's KV would have to be brought back from host memory."""
    return req.needs_host_load_back()


def namespace(req: Any) -> Hashable:
    """Requests share KV only within one: cache salt, LoRA adapter."""
    return (req.extra_key, req.cache_salt)


def cached_tokens(req: Any) -> int:
    """Length of the prefix whose KV the request need not compute."""
    return len(req.prefix_indices)


def longest_prefix(req: Any) -> int:
    """How long a prefix may be at most: one token at least is always computed."""
    return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))


def computed_until(req: Any) -> int:
    """Where the part of the request that the batch computes ends."""
    return req.extend_range.end


def tokens(req: Any, start: int, end: int | None) -> NDArray[np.int64]:
    """A copy of the request's tokens."""
    import numpy

    return numpy.frombuffer(req.full_untruncated_fill_ids[start:end], dtype=numpy.int64)


def grow_prefix(req: Any, count: int) -> None:
    """Count ``count`` more tokens as cached; :func:`adopt` fills in where they are."""
    import torch

    req.prefix_indices = torch.cat([req.prefix_indices, req.prefix_indices.new_zeros(count)])


def shrink_prefix(req: Any, length: int) -> None:
    req.prefix_indices = req.prefix_indices[:length]


def radix_key(req: Any, end: int) -> Any:
    """What the request's first tokens are looked up with in the radix tree."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = req.full_untruncated_fill_ids[:end]
    return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)


def uncached(tree_cache: Any, req: Any) -> int:
    """How many tokens of a waiting request are not in the radix tree."""
    from sglang.srt.managers.schedule_policy import match_prefix_for_req

    match_prefix_for_req(tree_cache, req, include_req=True)
    total = len(req.origin_input_ids) + len(req.output_ids)
    return total - req.num_matched_prefix_tokens


def tokenizer_channel(scheduler: Any) -> Any:
    """What sends from a scheduler to the HTTP process."""
    return scheduler.ipc_channels.send_to_tokenizer


def to_scheduler(tokenizer_manager: Any, message: Any) -> None:
    """Send a message of ours to every scheduler."""
    from sglang.srt.managers.io_struct import sock_send, wrap_as_pickle

    sock_send(tokenizer_manager.send_to_scheduler, wrap_as_pickle(message))


def wrapped(message: Any) -> Any:
    """A message of ours as SGLang's channels take it."""
    from sglang.srt.managers.io_struct import wrap_as_pickle

    return wrap_as_pickle(message)


def namespace_fields(
    cache_salt: str | None, extra_key: str | None, lora_path: str | None
) -> dict[str, Any]:
    """The fields of a ``GenerateReqInput`` that keep its KV apart from others'."""
    return {"cache_salt": cache_salt, "extra_key": extra_key, "lora_path": lora_path}


def render_before_encoding(_tokenizer: Any) -> None:
    """See that chat prompts go through ``tokenizer.encode`` as text: they do."""


def cpu_platform() -> type:
    """What the CPU platform is derived from."""
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):
        # The base class has neither.
        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from flashmoa_sglang.cpu.allocator import CpuPagedAllocator

            return CpuPagedAllocator

    return CpuPlatform


def write_location(attention: Any, forward_batch: Any) -> Any:
    """Where a batch's new keys go, as the KV pool's ``set_kv_buffer`` takes it."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    return KVWriteLoc(forward_batch.out_cache_loc, attention.swa_out_cache_loc)
