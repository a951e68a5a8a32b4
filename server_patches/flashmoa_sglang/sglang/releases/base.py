"""``Release``: the parts of SGLang that the plugin uses and that differ between releases.

The class fits SGLang 0.5.23, the newest release. The class of an older release derives from the
class of the next release, and overrides the differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Hashable

# The dotted path of a function of SGLang, and the plugin's function that wraps it.
Fix = tuple[str, "Callable[..., Any]"]

# Attention backends whose prefill computes rows of one token together with longer ones.
_MIXING_ATTENTION = {
    "torch_native", "triton", "fa3", "fa4", "flashinfer", "flashmla", "cutlass_mla", "trtllm_mha",
    "trtllm_mla",
}  # fmt: skip


class Release:
    """SGLang 0.5.23, the base class of older releases.

    Attributes:
        STREAM_OUTPUT: path of the method that takes ``(reqs, return_logprob, skip_req)`` and sends
            answers through its object's ``send_to_detokenizer``; the object has ``tree_cache``.
        CREATE_OFFLOADER: path of the function that creates a model runner's offloader, as the
            module of the model runner imports it.
        LARGEST_BATCH: path of the function that returns the number of requests for a forward's
            buffers; ``None`` if there are no such buffers.
        MIXING_POOLS: classes of KV pools whose decodes have room, and keep their state, when they
            are mixed with prefill.
        MIXING_GRAPHS: kinds of prefill CUDA graphs that SGLang allows in mixed steps.
        LOSES_STATES: whether a model's state besides KV gets lost in a mixed step (sglang#39342).
        NO_GRAPHS: the arguments that turn all CUDA graphs off.
        CHAT_ENCODER, PARTS_ENCODER: paths of the functions that encode the text of a chat, and its
            parts, as the module of chats imports them; ``None`` if the module calls the tokenizer.
        BEGIN_UPDATE, END_UPDATE: paths of the methods that begin and end an update of weights in
            several steps; ``None`` if each update is one step.
        CHECKS_SESSIONS: whether a scheduler refuses a session's request if the whole session has no
            token.
        SCHEDULER_FIXES, HTTP_FIXES: fixes for bugs of the release that break the plugin, in
            schedulers and in the HTTP process.
    """

    STREAM_OUTPUT: ClassVar[str] = (
        "sglang.srt.managers.scheduler_components.output_streamer"
        ".SchedulerOutputStreamer.stream_output"
    )
    CREATE_OFFLOADER: ClassVar[str] = "sglang.srt.model_executor.model_runner.create_offloader"
    LARGEST_BATCH: ClassVar[str | None] = (
        "sglang.srt.model_executor.runner.eager_runner.get_eager_max_batch_size"
    )
    # SGLang looks for room before it mixes decodes in, and keeps the states of the prefill's rows.
    MIXING_POOLS: ClassVar[frozenset[str]] = frozenset(
        {"MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool"}
    )
    MIXING_GRAPHS: ClassVar[tuple[str, ...]] = ("disabled", "breakable", "full")
    LOSES_STATES: ClassVar[bool] = False
    NO_GRAPHS: ClassVar[str] = (
        "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
    )
    CHAT_ENCODER: ClassVar[str | None] = (
        "sglang.srt.entrypoints.openai.serving_chat.parallel_prompt_encode"
    )
    PARTS_ENCODER: ClassVar[str | None] = (
        "sglang.srt.entrypoints.openai.serving_chat.encode_prompt_segments"
    )
    BEGIN_UPDATE: ClassVar[str | None] = (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.begin_weight_update"
    )
    END_UPDATE: ClassVar[str | None] = (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.end_weight_update"
    )
    CHECKS_SESSIONS: ClassVar[bool] = True
    SCHEDULER_FIXES: ClassVar[tuple[Fix, ...]] = ()
    HTTP_FIXES: ClassVar[tuple[Fix, ...]] = ()

    # Starting SGLang, and its arguments.

    def prepare_import(self) -> None:
        """Prepare a process, before it imports SGLang."""

    def server_arguments(self, argv: list[str]) -> list[str]:
        """Return the user's arguments, and the arguments that the release cannot find itself."""
        return argv

    def resolve_arguments(self, server_args: Any) -> Any:
        """Return SGLang's arguments, with SGLang's choice for each that the user did not give."""
        # ``server_args`` stays as the user gave it; SGLang keeps its own choices separately.
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(server_args)

    def graphs_are_off(self, arguments: Any) -> bool:
        """Return whether, by its resolved arguments, SGLang replays no forward from a CUDA graph.

        The older ``--disable-cuda-graph`` is not enough: another argument can turn the graphs of a
        phase on again.
        """
        config = arguments.cuda_graph_config
        return config.decode.backend == config.prefill.backend == "disabled"

    def why_no_rides(self, scheduler: Any) -> str:
        """Return why prefill does not share forwards with decodes; empty if it does.

        Only pools and backends that are known to be right are mixed. With
        ``--enable-mixed-chunk`` SGLang mixes by itself. It refuses the argument, or turns it off,
        where it cannot.
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
            # SGLang finds the rows of hidden states only for whole prompts without decodes.
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
        return next((reason for reason, is_so in reasons.items() if is_so), "")

    def refuses_mixed(self, arguments: Any) -> bool:
        """Return whether SGLang refuses ``--enable-mixed-chunk`` with other arguments."""
        return bool(
            arguments.attn_cp_size > 1
            or arguments.dllm_algorithm
            or arguments.enable_hisparse
            or arguments.cuda_graph_config.prefill.backend not in self.MIXING_GRAPHS
            or arguments.dsa_prefill_backend == "flashmla_sparse_q8"
            # Older releases lack these.
            or getattr(arguments, "enable_encoder_swa_bounded_replay", False)
            or getattr(arguments, "enable_megamoe_for_layernorm_sp", False)
        )

    def why_late(self, scheduler: Any) -> str:
        """Return why KV is put into the radix tree only with the results of its forward.

        It is empty if KV is put there once the forward is launched, as SGLang does with a chunked
        prompt: everything that reads or copies the KV is enqueued after the forward.
        """
        if scheduler.server_args.disaggregation_mode == "prefill" and scheduler.enable_overlap:
            # SGLang sends such KV before the next forward, and does not wait for this one.
            return "a prefill engine of a PD pair sends KV that is in the tree"
        return ""

    def data_parallel_ranks(self, arguments: Any) -> int:
        """Return the number of schedulers that have a KV pool each and share the requests."""
        # The replicas, times the ranks of DP attention.
        return arguments.dp_size * arguments.attn_dp_size

    # The HTTP process.

    def forget_refused(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``TokenizerManager.generate_request`` so that no state of refused requests stays."""
        return generate

    def namespace_fields(
        self, cache_salt: str | None, extra_key: str | None, lora_path: str | None
    ) -> dict[str, Any]:
        """Return the fields of a ``GenerateReqInput`` that make the namespace of its KV."""
        return {"cache_salt": cache_salt, "extra_key": extra_key, "lora_path": lora_path}

    def prepare_tokenizer(self, tokenizer: Any) -> None:
        """Prepare the tokenizer, before its instance gets another ``encode`` that chats use.

        SGLang encodes long chats in parallel, and keeps the tokens of their parts, only if the
        tokenizer's ``encode`` is the original one when SGLang first looks.
        """
        from sglang.srt.entrypoints.openai.parallel_prompt_encode import _plan_for

        _plan_for(tokenizer)

    # Messages between processes.

    def to_scheduler(self, tokenizer_manager: Any, message: Any) -> None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(tokenizer_manager.send_to_scheduler, self.wrap(message))

    def to_tokenizer(self, scheduler: Any, message: Any) -> None:
        """Send one of the plugin's messages from a scheduler to the HTTP process."""
        self.tokenizer_channel(scheduler).send_output(self.wrap(message), None)

    def tokenizer_channel(self, scheduler: Any) -> Any:
        """Return a scheduler's channel to the HTTP process."""
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
        """Let a prefill batch return log-probabilities of generated tokens alone."""
        batch.extend_logprob_start_lens = list(batch.extend_lens)

    def reserve_pages(self, adder: Any) -> None:
        """Reserve a page for each request that decodes in a mixed batch.

        SGLang 0.5.22 and later look for this room before they mix decodes in.
        """

    def no_batch(self, running: Any) -> Any:
        """Return the result of that method that means that there is no prefill batch."""
        return None, running

    def publish(self, scheduler: Any, req: Any) -> None:
        """Put the KV of a request into the radix tree, as SGLang does with a chunked prompt.

        The request's forward has been launched. Its batch was built with the request's prefix, so
        the prefix is restored.
        """
        # The prefix is a length; the slots are in the request's row of the table.
        prefix = req.prefix_len
        scheduler.stash_chunked_request(req)
        req.prefix_len = prefix

    def check_host_cache(self, scheduler: Any) -> None:
        """Check on copies to and from host memory, if SGLang does so when it looks for a batch."""

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        """Stop loading KV from storage for a request that will not run."""
        # This releases everything that the cache keeps for the request.
        scheduler._release_aborted_request(req)

    def release_metadata_buffer(self, scheduler: Any, req: Any) -> None:
        """Release the buffer for the transfer of a request to a decode engine; it will not run."""
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer

        maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)

    def dp_rank(self, scheduler: Any) -> int:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().dp_rank or 0

    def pipeline_stages(self, scheduler: Any) -> int:
        """Return the number of pipeline stages; 1 without pipeline parallelism."""
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().pp_size

    def reserved_output(self, scheduler: Any, req: Any) -> float:
        """Return the share of a running request's remaining output that SGLang keeps room for.

        It is SGLang's estimate of how early answers end. It depends on steps and retractions only,
        so tensor-parallel ranks agree about it. An answer of a fixed length does not end early.
        """
        ratio = scheduler.new_token_ratio_tracker.current
        return 1.0 if req.sampling_params.ignore_eos else ratio

    # A request in a scheduler, and its part of the radix tree.

    def needs_host_load(self, req: Any) -> bool:
        """Return whether some of the request's KV must be loaded back from host memory."""
        return req.needs_host_load_back()

    def namespace(self, req: Any) -> Hashable:
        """Return the namespace of the request's KV: extra key (with a LoRA adapter), cache salt."""
        return (req.extra_key, req.cache_salt)

    def cached_tokens(self, req: Any) -> int:
        """Return the length of the prefix whose KV the request need not compute."""
        return req.prefix_len

    def longest_prefix(self, req: Any) -> int:
        """Return how long the cached prefix may be: at least one token is always computed."""
        return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))

    def computed_until(self, req: Any) -> int:
        """Return the end of the request's tokens that its batch computes."""
        return req.extend_end

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

    def matched_length(self, prefix_match: Any) -> int:
        return prefix_match.device_prefix_len

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        """Match a waiting request with the radix tree. Return the length of the cached prefix."""
        from sglang.srt.mem_cache.common import match_kv_cache

        match_kv_cache(req, tree_cache)
        return req.num_matched_prefix_tokens
