"""``Release``: what the plugin needs of SGLang and releases do differently.

The class fits SGLang 0.5.18, the reference release, and has two fixes for bugs of it that break the
plugin. The class of another release overrides the methods that need something different there.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Hashable

    import numpy as np
    from numpy.typing import NDArray

# The dotted path of one of SGLang's functions, and the plugin's function that wraps it.
Fix = tuple[str, "Callable[..., Any]"]

# Attention backends whose ``forward_extend`` writes the keys and values of a whole batch to the KV
# pool, and then reads all of them there. FlashInfer's, by default, attends to each request's new
# tokens (ragged) and to its prefix in the pool, and writes the new ones only afterwards; the MLA
# paths do the like.
_WRITE_FIRST = {"torch_native", "triton", "fa3", "trtllm_mha"}

# Attention backends whose prefill computes rows of one token beside longer ones.
_MIXING_ATTENTION = _WRITE_FIRST | {
    "fa4", "flashinfer", "flashmla", "cutlass_mla", "trtllm_mla",
}  # fmt: skip
# Radix trees that keep KV in the pool only, unless they have a controller or a linker for more.
_PLAIN_TREES = {"RadixCache", "UnifiedRadixCache"}


def abort_abandoned(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Abort a request when its client disconnects.

    Wraps ``TokenizerManager._discard_pending_req_states``, which SGLang calls at that moment. Stock
    SGLang forgets the request here and tries to abort it only two seconds later. By then it does
    not know the id any more and does nothing, so the request decodes to its last token.
    """
    # The original runs inside SGLang's ``except BaseException``. Only a cancelled generator means
    # that a request has to be aborted; a ValueError is a refused request, which never ran, or one
    # that SGLang has aborted. Aborting a refused one could hit others: the scheduler aborts every
    # request whose id starts with the given one.
    if isinstance(sys.exc_info()[1], asyncio.CancelledError | GeneratorExit):
        rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid
        for rid in rids or ():
            manager.abort_request(rid)
    original(manager, obj)


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


class Release:
    """SGLang 0.5.18, from which the classes of other releases derive.

    Attributes:
        STREAM_OUTPUT: path of the method that takes ``(reqs, return_logprob, skip_req)`` and sends
            answers through its object's ``send_to_detokenizer``; the object has ``tree_cache``.
        CREATE_OFFLOADER: path of the function that creates a model runner's offloader, as the
            module of the model runner imports it.
        LARGEST_BATCH: path of the function that returns how many requests a forward's buffers hold;
            ``None`` if there are no such buffers.
        MIXING_POOLS: the classes of KV pools in which decodes never lack room, nor lose a state,
            beside prefill.
        LOSES_STATES: whether a model's state besides KV gets lost in such a step (sglang#39342).
        NO_GRAPHS: the arguments that turn all CUDA graphs off.
        SCHEDULER_FIXES, HTTP_FIXES: fixes for bugs of the release that break the plugin, in
            schedulers and in the HTTP process.
    """

    STREAM_OUTPUT: ClassVar[str] = (
        "sglang.srt.managers.scheduler_components.output_streamer"
        ".SchedulerOutputStreamer.stream_output"
    )
    CREATE_OFFLOADER: ClassVar[str] = (
        "sglang.srt.model_executor.model_runner.create_offloader_from_server_args"
    )
    LARGEST_BATCH: ClassVar[str | None] = (
        "sglang.srt.model_executor.runner.eager_runner.get_eager_max_batch_size"
    )
    MIXING_POOLS: ClassVar[frozenset[str]] = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
    LOSES_STATES: ClassVar[bool] = True
    NO_GRAPHS: ClassVar[str] = (
        "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
    )
    SCHEDULER_FIXES: ClassVar[tuple[Fix, ...]] = (
        (
            "sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw",
            keep_tensors_in_logprobs,
        ),
    )
    HTTP_FIXES: ClassVar[tuple[Fix, ...]] = (
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._discard_pending_req_states",
            abort_abandoned,
        ),
    )

    # Starting SGLang, and its arguments.

    def prepare_import(self) -> None:
        """Prepare a process, before it imports SGLang."""

    def server_arguments(self, argv: list[str]) -> list[str]:
        """Return the user's arguments, and those that the release cannot find out by itself."""
        return argv

    def resolve_arguments(self, server_args: Any) -> Any:
        """Return SGLang's arguments, with SGLang's choice for each that the user did not give."""
        return server_args

    def graphs_are_off(self, arguments: Any) -> bool:
        """Return whether, by its resolved arguments, SGLang replays no forward from a CUDA graph.

        The older ``--disable-cuda-graph`` is not enough: another argument can turn the graphs of a
        phase on again.
        """
        config = arguments.cuda_graph_config
        return config.decode.backend == config.prefill.backend == "disabled"

    def why_no_rides(self, scheduler: Any) -> str:
        """Return why prefill does not share forwards with decodes; empty if it does.

        What is known to be right is listed, and nothing else is mixed. SGLang does so itself with
        ``--enable-mixed-chunk``, which it refuses, or switches off, where it cannot.
        """
        arguments = self.resolve_arguments(scheduler.server_args)
        pool = type(scheduler.token_to_kv_pool_allocator.get_kvcache()).__name__
        attention = arguments.prefill_attention_backend or arguments.attention_backend
        unknown = "is not known to compute them right; --enable-mixed-chunk allows it all the same"
        reasons = {
            "prompts are not cut into chunks (--chunked-prefill-size)": (
                scheduler.chunked_prefill_size is None
            ),
            "the engine decodes speculatively": not scheduler.spec_algorithm.is_none(),
            "ranks step together (DP attention, --moe-a2a-backend, --moe-dense-tp-size)": (
                scheduler.require_mlp_sync
            ),
            "the model is divided into stages (--pp-size)": self.pipeline_stages(scheduler) > 1,
            # SGLang returns hidden states by the rows of a forward, which it finds only for whole
            # prompts without decodes.
            "hidden states are returned": arguments.enable_return_hidden_states,
            "this SGLang loses the model's state besides KV in such steps (0.5.23 keeps it)": (
                self.LOSES_STATES and scheduler.is_hybrid_ssm
            ),
        }
        if not scheduler.is_mixed_chunk:
            reasons |= {
                "SGLang refuses it with the engine's other arguments": self.refuses_mixed(
                    arguments
                ),
                f"the KV pool {pool} {unknown}": pool not in self.MIXING_POOLS,
                f"the attention backend {attention} {unknown}": attention not in _MIXING_ATTENTION,
            }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def refuses_mixed(self, arguments: Any) -> bool:
        """Return whether SGLang refuses ``--enable-mixed-chunk`` with other arguments."""
        return bool(
            arguments.attn_cp_size > 1 or arguments.dllm_algorithm or arguments.enable_hisparse
        )

    def why_late(self, scheduler: Any) -> str:
        """Return why KV is put into the radix tree only when it is computed; empty if before.

        Only trees that are known to keep KV in the pool, and nowhere else, get it before.
        """
        tree = scheduler.tree_cache
        if scheduler.server_args.disaggregation_mode == "prefill" and scheduler.enable_overlap:
            # Under the overlap schedule, the forward before may still be writing published KV.
            return "a prefill engine of a PD pair sends KV that is in the tree"
        if type(tree).__name__ not in _PLAIN_TREES:
            return f"the tree {type(tree).__name__} may copy it elsewhere"
        if self.copies_kv(scheduler):
            return "the tree copies it to host memory or to a store at once"
        return ""

    def copies_kv(self, scheduler: Any) -> bool:
        """Return whether a radix tree of one of these kinds copies the KV that it gets."""
        return scheduler.tree_cache.cache_controller is not None

    def data_parallel_ranks(self, arguments: Any) -> int:
        """Return the number of schedulers that have a KV pool each and share the requests."""
        return arguments.dp_size or 1

    def steps_together(self, arguments: Any) -> bool:
        """Return whether ranks with different requests must be in the same forward.

        They must with pipeline stages, and if SGLang lets ranks agree on each batch. Only a
        scheduler knows for certain that they agree (``require_mlp_sync``); this is true whenever
        they do, and perhaps when they do not.
        """
        return (
            arguments.pp_size > 1
            or self.divides_attention(arguments)
            or arguments.moe_a2a_backend != "none"
            or arguments.moe_dense_tp_size is not None
        )

    def divides_attention(self, arguments: Any) -> bool:
        return arguments.enable_dp_attention

    # The HTTP process.

    def forget_refused(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``TokenizerManager.generate_request`` so that no state of refused requests stays."""
        return generate

    def namespace_fields(
        self, cache_salt: str | None, extra_key: str | None, lora_path: str | None
    ) -> dict[str, Any]:
        """Return the fields of a ``GenerateReqInput`` that make the namespace of its KV."""
        return {"cache_salt": cache_salt, "extra_key": extra_key, "lora_path": lora_path}

    def render_before_encoding(self, tokenizer: Any) -> None:
        """Patch the tokenizer so that chat prompts pass through its ``encode`` as text."""

    # Messages between processes.

    def to_scheduler(self, tokenizer_manager: Any, message: Any) -> None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(tokenizer_manager.send_to_scheduler, self.wrap(message))

    def to_tokenizer(self, scheduler: Any, message: Any) -> None:
        """Send one of the plugin's messages from a scheduler to the HTTP process."""
        self.tokenizer_channel(scheduler).send_output(self.wrap(message), None)

    def tokenizer_channel(self, scheduler: Any) -> Any:
        """Return the object with which a scheduler sends to the HTTP process."""
        return scheduler.ipc_channels.send_to_tokenizer

    def wrap(self, message: Any) -> Any:
        """Return one of the plugin's messages in the form that SGLang's channels take."""
        from sglang.srt.managers.io_struct import wrap_as_pickle

        return wrap_as_pickle(message)

    # The scheduler and its batches.

    def running_batch(self, scheduler: Any, arguments: dict[str, Any]) -> Any:
        """Return the batch of decoding requests.

        Args: arguments: the keyword arguments of ``_get_new_batch_prefill_raw``.
        """
        return arguments["running_batch"]

    def split_batches(self, scheduler: Any, result: Any) -> tuple[Any, Any]:
        """Return the prefill batch, or ``None``, and the batch of decoding requests.

        Args: result: what ``_get_new_batch_prefill_raw`` returned.
        """
        return result

    def return_no_input_logprobs(self, batch: Any) -> None:
        """Let a prefill batch return log-probabilities of what it generates alone."""
        batch.extend_logprob_start_lens = list(batch.extend_lens)

    def reserve_pages(self, adder: Any) -> None:
        """Let a mixed batch leave a page for each request that decodes in it.

        SGLang counts a token for each. If the pool lacks one of their pages then, SGLang ends.
        """
        pages = (adder.page_size - 1) * len(adder.running_batch.reqs)
        adder.rem_total_token_offset += pages
        adder.cur_rem_token_offset += pages

    def no_batch(self, running: Any) -> Any:
        """Return the result of that method that means that there is no prefill batch."""
        return None, running

    def publish(self, scheduler: Any, req: Any) -> None:
        """Put the KV of a request that is about to run into the radix tree.

        Chunked prefill does the same between chunks. The forward has not run yet, but every forward
        that could read these slots is enqueued after it. The batch has already been built with the
        request's prefix, so the prefix is restored.
        """
        prefix = req.prefix_indices
        scheduler.stash_chunked_request(req)
        req.prefix_indices = prefix

    def check_host_cache(self, scheduler: Any) -> None:
        """Check on copies to and from host memory, as SGLang does before each prefill batch."""
        from sglang.srt.runtime_context import get_memory

        # FlexKV is another cache outside of the GPU, with the same method.
        if scheduler.enable_hierarchical_cache or get_memory().enable_flexkv:
            scheduler.tree_cache.check_hicache_events()

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        """Stop loading KV from storage for a request that will not run."""
        if scheduler.enable_hicache_storage:
            scheduler.tree_cache.release_aborted_request(req.rid)

    def release_metadata_buffer(self, scheduler: Any, req: Any) -> None:
        """Release the buffer for the transfer of a request to a decode engine; it will not run."""
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer

        maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)

    def dp_rank(self, scheduler: Any) -> int:
        return scheduler.ps.dp_rank or 0

    def pipeline_stages(self, scheduler: Any) -> int:
        """Return the number of pipeline stages; 1 without pipeline parallelism."""
        return scheduler.ps.pp_size

    def reserved_output(self, scheduler: Any, req: Any) -> float:
        """Return the share of a running request's remaining output for which SGLang keeps room.

        It is SGLang's estimate of how early answers end. It depends on steps and retractions only,
        so tensor-parallel ranks agree about it.
        """
        return scheduler.new_token_ratio_tracker.current

    def shares_within_forward(self, scheduler: Any) -> bool:
        """Return whether a request may read KV that another request of its batch writes."""
        arguments = scheduler.server_args
        backend = arguments.prefill_attention_backend or arguments.attention_backend
        return (
            backend in _WRITE_FIRST
            and not scheduler.model_config.attention_arch.name.startswith("MLA")
            and scheduler.spec_algorithm.is_none()
        )

    # The CPU platform.

    def cpu_platform(self, pools: type) -> type:
        """Return the base class of the CPU platform.

        Args: pools: names a KV pool and an allocator, as SGLang's own class does not.
        """
        from sglang.srt.platforms.cpu import CpuDeviceMixin
        from sglang.srt.platforms.interface import SRTPlatform

        return type("CpuPlatform", (CpuDeviceMixin, pools, SRTPlatform), {})

    def repair_cpu(self) -> tuple[Any, ...]:
        """Repair SGLang in a worker on a CPU; return its modules that ask for pinned memory."""
        return ()

    def write_location(self, attention: Any, forward_batch: Any) -> Any:
        """Return the location of a batch's new keys that ``set_kv_buffer`` of the pool takes."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        return KVWriteLoc(forward_batch.out_cache_loc, attention.swa_out_cache_loc)

    # A request in a scheduler, and its part of the radix tree.

    def needs_host_load(self, req: Any) -> bool:
        """Return whether some of the request's KV must be loaded back from host memory."""
        return req.needs_host_load_back()

    def namespace(self, req: Any) -> Hashable:
        """Return the namespace of the request's KV: extra key (with a LoRA adapter), cache salt."""
        return (req.extra_key, req.cache_salt)

    def cached_tokens(self, req: Any) -> int:
        """Return the length of the prefix whose KV the request need not compute."""
        return len(req.prefix_indices)

    def longest_prefix(self, req: Any) -> int:
        """Return how long the cached prefix may be: at least one token is always computed."""
        return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))

    def computed_until(self, req: Any) -> int:
        """Return the position in the request's tokens up to which its batch computes it."""
        return req.extend_range.end

    def tokens(self, req: Any, start: int, end: int | None) -> NDArray[np.int64]:
        """Return a copy of the request's tokens from ``start`` to ``end``."""
        import numpy

        return numpy.frombuffer(req.full_untruncated_fill_ids[start:end], dtype=numpy.int64)

    def grow_prefix(self, req: Any, count: int) -> None:
        """Count ``count`` more tokens as cached; their slots are set once the batch is built."""
        import torch

        prefix = req.prefix_indices
        self._set_prefix(req, torch.cat([prefix, prefix.new_zeros(count)]))

    def shrink_prefix(self, req: Any, length: int) -> None:
        self._set_prefix(req, req.prefix_indices[:length])

    def _set_prefix(self, req: Any, indices: Any) -> None:
        req.prefix_indices = indices

    def radix_key(self, req: Any, end: int) -> Any:
        return self.key_of(req.full_untruncated_fill_ids[:end], req)

    def key_of(self, tokens: array[int], req: Any) -> Any:
        """Return the key of tokens in the radix tree, in the namespace of a request."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)

    def token_ids(self, tokens: array[int]) -> Any:
        return tokens

    def uncached_tokens(self, tree_cache: Any, req: Any) -> int:
        """Return how many tokens of a waiting request are not in the radix tree."""
        total = len(req.origin_input_ids) + len(req.output_ids)
        return total - self.matched_tokens(tree_cache, req)

    def evictable_tokens(self, tree_cache: Any) -> int:
        return tree_cache.evictable_size()

    def protected_tokens(self, tree_cache: Any) -> int:
        return tree_cache.protected_size()

    def matched_slots(self, tree_cache: Any, prefix_match: Any) -> Any:
        """Return the KV slots of a match with the radix tree, as a tensor."""
        return prefix_match.device_indices

    def matched_length(self, prefix_match: Any) -> int:
        return len(prefix_match.device_indices)

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        """Match a waiting request with the radix tree. Return the length of the cached prefix."""
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(tree_cache, req, include_req=True)
        return req.num_matched_prefix_tokens
