"""SGLang 0.5.12."""

# The type checker has another release, which lacks some attributes of this one.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
import sys
from contextlib import aclosing
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.sglang.releases.v0_5_21 import Release0521

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Hashable

_HOST_COPIES = "sgl_kernel.kvcacheio"


def abort_and_forget(original: Callable[..., None], manager: Any, recv_obj: Any) -> None:
    """Forget a request that was aborted in the queue; wraps ``_handle_abort_req``."""
    state = manager.rid_to_state.get(recv_obj.rid)
    if state is None:
        return
    original(manager, recv_obj)
    if state.finished:
        manager.rid_to_state.pop(recv_obj.rid, None)


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


class Release0512(Release0521):
    """SGLang 0.5.12, which aborts requests itself when their client has disconnected."""

    STREAM_OUTPUT = "sglang.srt.managers.scheduler.Scheduler.stream_output"
    CREATE_OFFLOADER = "sglang.srt.model_executor.model_runner.create_offloader_from_server_args"
    LARGEST_BATCH = None
    NO_GRAPHS = "--disable-cuda-graph --disable-piecewise-cuda-graph"
    BEGIN_UPDATE = END_UPDATE = None
    CHECKS_SESSIONS = False
    SCHEDULER_FIXES = (
        ("sglang.srt.layers.utils.logprob.get_token_ids_logprobs_raw", keep_tensors_in_logprobs),
    )
    HTTP_FIXES = (
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req",
            abort_and_forget,
        ),
    )

    def prepare_import(self) -> None:
        """Put a stub in place of ``sgl_kernel.kvcacheio``, which needs a GPU build.

        SGLang imports only this module of ``sgl_kernel`` unconditionally, for its hierarchical
        cache. The stub gets no parent package, so that guarded imports of ``sgl_kernel`` still
        fail.
        """
        if find_spec("sgl_kernel") is None:
            stub = ModuleType(_HOST_COPIES)
            stub.__getattr__ = _missing_kernel
            sys.modules[_HOST_COPIES] = stub

    def server_arguments(self, argv: list[str]) -> list[str]:
        """Add ``--device``, because this release does not ask the platform for it.

        Also allow every port: for a gRPC server that is off, SGLang requires that ``--port`` plus
        10,000 is a valid port, too.
        """
        from sglang.srt.platforms import current_platform

        if "SGLANG_ENABLE_GRPC" not in os.environ:
            os.environ.setdefault("SGLANG_GRPC_PORT", "1")
        has_device = any(argument.split("=")[0] == "--device" for argument in argv)
        if has_device or not current_platform.is_out_of_tree():
            return argv
        return [*argv, "--device", current_platform.device_type]

    def resolve_arguments(self, server_args: Any) -> Any:
        return server_args

    def graphs_are_off(self, arguments: Any) -> bool:
        # The first argument concerns only decoding.
        return arguments.disable_cuda_graph and arguments.disable_piecewise_cuda_graph

    def refuses_mixed(self, arguments: Any) -> bool:
        return bool(
            arguments.attn_cp_size > 1 or arguments.dllm_algorithm or arguments.enable_hisparse
        )

    def forget_refused(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Forget requests that are refused, and the rest of their batch.

        Stock SGLang keeps their states, so that the server seems to be busy with them for ever.
        """

        async def generate_or_forget(manager: Any, obj: Any, request: Any = None) -> Any:
            earlier_rids = set(manager.rid_to_state)
            try:
                async with aclosing(generate(manager, obj, request)) as outputs:
                    async for output in outputs:
                        yield output
            except BaseException:
                rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid or []
                for rid in {rid for rid in rids if isinstance(rid, str)} - earlier_rids:
                    state = manager.rid_to_state.get(rid)
                    # A request that has been sent to a scheduler is answered, and forgotten then.
                    if state is not None and not state.time_stats.api_server_dispatch_time:
                        del manager.rid_to_state[rid]
                raise

        return generate_or_forget

    def namespace_fields(
        self, cache_salt: str | None, extra_key: str | None, lora_path: str | None
    ) -> dict[str, Any]:
        # ``/generate`` takes only an ``extra_key``. For chats, SGLang joins the two like this.
        key = (cache_salt or "") + (extra_key or "")
        return {"extra_key": key or None, "lora_path": lora_path}

    def prepare_tokenizer(self, tokenizer: Any) -> None:
        """Render chat prompts to text first, as later releases do themselves."""
        from transformers import PreTrainedTokenizerBase

        render = tokenizer.apply_chat_template
        # A tokenizer that overrides this method may have control tokens without a text form.
        if getattr(render, "__func__", None) is not PreTrainedTokenizerBase.apply_chat_template:
            return

        def apply_chat_template(messages: Any, **options: Any) -> Any:
            if not options.get("tokenize", True) or options.get("return_dict", True):
                return render(messages, **options)
            text = render(messages, **{**options, "tokenize": False})
            return tokenizer.encode(text, add_special_tokens=False)

        tokenizer.apply_chat_template = apply_chat_template

    def to_scheduler(self, tokenizer_manager: Any, message: Any) -> None:
        tokenizer_manager.send_to_scheduler.send_pyobj(message)

    def tokenizer_channel(self, scheduler: Any) -> Any:
        return scheduler.send_to_tokenizer

    def wrap(self, message: Any) -> Any:
        # This release pickles every message.
        return message

    def running_batch(self, scheduler: Any, arguments: dict[str, Any]) -> Any:
        return scheduler.running_batch

    def split_batches(self, scheduler: Any, result: Any) -> tuple[Any, Any]:
        return result, scheduler.running_batch

    def return_no_input_logprobs(self, batch: Any) -> None:
        super().return_no_input_logprobs(batch)
        for req, length in zip(batch.reqs, batch.extend_lens, strict=True):
            req.extend_logprob_start_len = length

    def _reserve(self, adder: Any, tokens: int) -> None:
        adder.rem_total_token_offset += tokens
        adder.cur_rem_token_offset += tokens

    def no_batch(self, running: Any) -> Any:
        return None

    def check_host_cache(self, scheduler: Any) -> None:
        if scheduler.enable_hierarchical_cache:
            scheduler.tree_cache.check_hicache_events()

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        if scheduler.enable_hicache_storage:
            scheduler.tree_cache.release_aborted_request(req.rid)

    def release_metadata_buffer(self, scheduler: Any, req: Any) -> None:
        from sglang.srt.disaggregation.prefill import release_req_to_metadata_buffer

        release_req_to_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)

    def dp_rank(self, scheduler: Any) -> int:
        return scheduler.dp_rank or 0

    def pipeline_stages(self, scheduler: Any) -> int:
        return scheduler.pp_size

    def reserved_output(self, scheduler: Any, req: Any) -> float:
        return scheduler.new_token_ratio

    def needs_host_load(self, req: Any) -> bool:
        return req.host_hit_length > 0

    def namespace(self, req: Any) -> Hashable:
        # The extra key contains the cache salt.
        return req.extra_key

    def longest_prefix(self, req: Any) -> int:
        longest = len(req.origin_input_ids) + len(req.output_ids) - 1
        if req.return_logprob and req.logprob_start_len >= 0:
            longest = min(longest, req.logprob_start_len)
        return max(longest, 0)

    def computed_until(self, req: Any) -> int:
        # SGLang cuts ``fill_ids`` off when a chunk of the request joins the batch.
        return len(req.fill_ids)

    def key_of(self, tokens: array[int], req: Any) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(self.token_ids(tokens), req.extra_key)

    def token_ids(self, tokens: array[int]) -> Any:
        return tokens.tolist()

    def evictable_tokens(self, tree_cache: Any) -> int:
        # The trees of hybrid pools have a number for each pool, and raise when asked for one.
        try:
            return tree_cache.evictable_size()
        except NotImplementedError:
            return tree_cache.full_evictable_size()

    def protected_tokens(self, tree_cache: Any) -> int:
        try:
            return tree_cache.protected_size()
        except NotImplementedError:
            return tree_cache.full_protected_size()

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(tree_cache, req, include_req=True)
        return min(len(req.prefix_indices) + req.host_hit_length, self.longest_prefix(req))


def _missing_kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(f"{_HOST_COPIES}.{name} needs a GPU build of sgl_kernel")

    return call
