"""What the plugin asks of an SGLang release.

A method here says what it is for and does what most releases need; a release's class overrides what
is different there. Parameters that are SGLang's own objects are named alike everywhere: from their
names the list for the check at start is derived (``internals/used_names.txt``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import numpy as np
    from numpy.typing import NDArray

# The path of one of SGLang's functions, and the plugin's function around it.
Fix = tuple[str, "Callable[..., Any]"]

# Backends that write the keys and values of a whole batch before they read any of them.
# FlashInfer's ragged prefill does not, nor do the MLA paths.
_WRITE_FIRST = {"torch_native", "triton", "fa3"}


class Release(ABC):
    """One SGLang release.

    Attributes:
        STREAM_OUTPUT: the method that takes ``(reqs, return_logprob, skip_req)`` and sends the
            answers on through its owner's ``send_to_detokenizer``; the owner has ``tree_cache``.
        CREATE_OFFLOADER: the function with which a model runner makes its offloader, under the
            name by which the runner's module knows it.
        NO_GRAPHS: the arguments that turn all CUDA graphs off.
        SCHEDULER_FIXES, HTTP_FIXES: what the release does wrong where the plugin depends on it, in
            its schedulers and in its HTTP process.
    """

    STREAM_OUTPUT: ClassVar[str] = (
        "sglang.srt.managers.scheduler_components.output_streamer"
        ".SchedulerOutputStreamer.stream_output"
    )
    CREATE_OFFLOADER: ClassVar[str] = (
        "sglang.srt.model_executor.model_runner.create_offloader_from_server_args"
    )
    NO_GRAPHS: ClassVar[str] = (
        "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
    )
    SCHEDULER_FIXES: ClassVar[tuple[Fix, ...]] = ()
    HTTP_FIXES: ClassVar[tuple[Fix, ...]] = ()

    # Starting SGLang, and its arguments.

    def prepare_import(self) -> None:  # noqa: B027
        """Do what each process needs before it imports SGLang."""

    def server_arguments(self, argv: list[str]) -> list[str]:
        """Return the user's arguments and those that the release cannot find out by itself."""
        return argv

    def resolved(self, server_args: Any) -> Any:
        """Return SGLang's arguments with what it has chosen where the user gave none."""
        return server_args

    def graphs_are_off(self, arguments: Any) -> bool:
        """Return whether SGLang replays no forward from a CUDA graph, by its resolved arguments.

        The older ``--disable-cuda-graph`` leaves a phase its graphs where another argument asks for
        them.
        """
        config = arguments.cuda_graph_config
        return config.decode.backend == config.prefill.backend == "disabled"

    def data_parallel_ranks(self, arguments: Any) -> int:
        """Return among how many schedulers, each with KV of its own, requests are divided."""
        return arguments.dp_size or 1

    def steps_together(self, arguments: Any) -> bool:
        """Return whether ranks with different requests must be in the same forward.

        That is so with pipeline stages, and where SGLang has ranks agree on each batch. A scheduler
        knows the latter for certain (``require_mlp_sync``); this is true at least wherever that is.
        """
        return (
            arguments.pp_size > 1
            or self.divides_attention(arguments)
            or arguments.moe_a2a_backend != "none"
            or arguments.moe_dense_tp_size is not None
        )

    def divides_attention(self, arguments: Any) -> bool:
        """Return whether data-parallel ranks divide the attention layers among them."""
        return arguments.enable_dp_attention

    # The HTTP process.

    def forget_refused(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``TokenizerManager.generate_request`` to keep no state of refused requests."""
        return generate

    def namespace_fields(
        self, cache_salt: str | None, extra_key: str | None, lora_path: str | None
    ) -> dict[str, Any]:
        """Return the fields of a ``GenerateReqInput`` that keep its KV apart from others'."""
        return {"cache_salt": cache_salt, "extra_key": extra_key, "lora_path": lora_path}

    def render_before_encoding(self, tokenizer: Any) -> None:  # noqa: B027
        """Have chat prompts go through ``tokenizer.encode`` as text, if they do not already."""

    # Messages between processes.

    def to_scheduler(self, tokenizer_manager: Any, message: Any) -> None:
        """Send one of the plugin's messages to every scheduler."""
        from sglang.srt.managers.io_struct import sock_send

        sock_send(tokenizer_manager.send_to_scheduler, self.wrapped(message))

    def to_tokenizer(self, scheduler: Any, message: Any) -> None:
        """Send one of the plugin's messages from a scheduler to the HTTP process."""
        self.tokenizer_channel(scheduler).send_output(self.wrapped(message), None)

    def tokenizer_channel(self, scheduler: Any) -> Any:
        """Return what sends from a scheduler to the HTTP process."""
        return scheduler.ipc_channels.send_to_tokenizer

    def wrapped(self, message: Any) -> Any:
        """Return one of the plugin's messages as SGLang's channels take it."""
        from sglang.srt.managers.io_struct import wrap_as_pickle

        return wrap_as_pickle(message)

    # The scheduler and its batches.

    def running_batch(self, scheduler: Any, arguments: dict[str, Any]) -> Any:
        """Return the decoding requests, by the arguments of ``_get_new_batch_prefill_raw``."""
        return arguments["running_batch"]

    def new_batch(self, result: Any) -> Any:
        """Return the prefill batch, or ``None``, from the result of that method."""
        return result[0]

    def no_batch(self, running: Any) -> Any:
        """Return the result of that method that stands for no prefill batch."""
        return None, running

    def running_after(self, scheduler: Any, result: Any) -> Any:
        """Return the decoding requests after such a result."""
        return result[1]

    def publish(self, scheduler: Any, req: Any) -> None:
        """Put the KV of a request that is about to run into the radix tree.

        That is what chunked prefill does between chunks: the forward has not run yet, but all that
        could read these slots runs behind it. The batch is already built on the request's prefix,
        so the prefix is put back.
        """
        prefix = req.prefix_indices
        scheduler.stash_chunked_request(req)
        req.prefix_indices = prefix

    @abstractmethod
    def check_host_cache(self, scheduler: Any) -> None:
        """Look after copies to and from host memory, as SGLang does before each prefill batch."""

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        """Stop bringing KV back from storage for a request that will not run."""
        if scheduler.enable_hicache_storage:
            scheduler.tree_cache.release_aborted_request(req.rid)

    def release_metadata_buffer(self, scheduler: Any, req: Any) -> None:
        """Give back what a request that will not run holds for its transfer to a decode engine."""
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer

        maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)

    @abstractmethod
    def dp_rank(self, scheduler: Any) -> int:
        """Return the scheduler's data-parallel rank, from 0."""

    @abstractmethod
    def pipeline_stages(self, scheduler: Any) -> int:
        """Return the number of pipeline stages; 1 without pipeline parallelism."""

    def reserved_output(self, scheduler: Any, req: Any) -> float:
        """Return the share of a running request's remaining output for which SGLang keeps room.

        It is SGLang's estimate of how early answers end, and follows from steps and retractions
        alone.
        """
        return scheduler.new_token_ratio_tracker.current

    def shares_within_forward(self, scheduler: Any) -> bool:
        """Return whether a request may read KV that another one of its batch writes."""
        arguments = scheduler.server_args
        backend = arguments.prefill_attention_backend or arguments.attention_backend
        return (
            backend in _WRITE_FIRST
            and not scheduler.model_config.attention_arch.name.startswith("MLA")
            and scheduler.spec_algorithm.is_none()
        )

    # Requests in the scheduler.

    def needs_host_load(self, req: Any) -> bool:
        """Return whether some of the request's KV must be brought back from host memory."""
        return req.needs_host_load_back()

    def namespace(self, req: Any) -> Hashable:
        """Return what keeps the request's KV apart from others': cache salt, LoRA adapter."""
        return (req.extra_key, req.cache_salt)

    def cached_tokens(self, req: Any) -> int:
        """Return the length of the prefix whose KV the request need not compute."""
        return len(req.prefix_indices)

    def longest_prefix(self, req: Any) -> int:
        """Return how long a cached prefix may be at most: one token at least is always computed."""
        return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))

    @abstractmethod
    def computed_until(self, req: Any) -> int:
        """Return where the part of the request ends that the batch computes."""

    def tokens(self, req: Any, start: int, end: int | None) -> NDArray[np.int64]:
        """Return a copy of the request's tokens."""
        import numpy

        return numpy.frombuffer(req.full_untruncated_fill_ids[start:end], dtype=numpy.int64)

    def grow_prefix(self, req: Any, count: int) -> None:
        """Count ``count`` more tokens as cached; their slots are filled in after the build."""
        import torch

        prefix = req.prefix_indices
        self._set_prefix(req, torch.cat([prefix, prefix.new_zeros(count)]))

    def shrink_prefix(self, req: Any, length: int) -> None:
        """Count only the first ``length`` tokens as cached."""
        self._set_prefix(req, req.prefix_indices[:length])

    def _set_prefix(self, req: Any, indices: Any) -> None:
        req.prefix_indices = indices

    def radix_key(self, req: Any, end: int) -> Any:
        """Return the key of the request's first ``end`` tokens in the radix tree."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = req.full_untruncated_fill_ids[:end]
        return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)

    def uncached_tokens(self, tree_cache: Any, req: Any) -> int:
        """Return how many tokens of a waiting request are not in the radix tree."""
        total = len(req.origin_input_ids) + len(req.output_ids)
        return total - self.matched_tokens(tree_cache, req)

    @abstractmethod
    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        """Match a waiting request with the radix tree; return the length of the cached prefix."""

    # The CPU platform.

    @abstractmethod
    def cpu_platform(self) -> type:
        """Return the class from which the CPU platform is derived."""

    def write_location(self, attention: Any, forward_batch: Any) -> Any:
        """Return where a batch's new keys go, as the KV pool's ``set_kv_buffer`` takes it."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        return KVWriteLoc(forward_batch.out_cache_loc, attention.swa_out_cache_loc)
