"""SGLang 0.5.12."""

# What this release has and the one in the type checker's environment has not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
import sys
from contextlib import aclosing
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.cpu.host_memory import Unpinned
from flashmoa_sglang.releases.base import Release
from flashmoa_sglang.releases.v0_5_18 import token_ids_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import numpy as np
    from numpy.typing import NDArray

_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_HOST_COPIES = "sgl_kernel.kvcacheio"


async def tokenize_or_forget(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """Forget a request that is refused in ``TokenizerManager._tokenize_one_request``.

    Its state would stay, and the server would seem to be busy with it for ever.
    """
    try:
        return await original(manager, obj)
    except BaseException:
        manager.rid_to_state.pop(obj.rid, None)
        raise


def abort_and_forget(original: Callable[..., None], manager: Any, message: Any) -> None:
    """Forget a request that left the queue: around ``TokenizerManager._handle_abort_req``."""
    state = manager.rid_to_state.get(message.rid)
    if state is None:
        return
    original(manager, message)
    if state.finished:
        manager.rid_to_state.pop(message.rid, None)


class Release0512(Release):
    """SGLang 0.5.12, which aborts abandoned requests by itself."""

    # The scheduler itself streams its output.
    STREAM_OUTPUT = "sglang.srt.managers.scheduler.Scheduler.stream_output"
    NO_GRAPHS = "--disable-cuda-graph --disable-piecewise-cuda-graph"
    SCHEDULER_FIXES = (
        ("sglang.srt.layers.utils.logprob.get_token_ids_logprobs_raw", token_ids_logprobs),
    )
    HTTP_FIXES = (
        (f"{_TOKENIZER_MANAGER}._tokenize_one_request", tokenize_or_forget),
        (f"{_TOKENIZER_MANAGER}._handle_abort_req", abort_and_forget),
    )

    def prepare_import(self) -> None:
        """Let the hierarchical cache be imported without the GPU kernels that it would call.

        Only that one module of ``sgl_kernel`` is imported unconditionally. It gets no parent
        package, so every guarded import of ``sgl_kernel`` still finds that there is none.
        """
        if find_spec("sgl_kernel") is None:
            copies = ModuleType(_HOST_COPIES)
            copies.__getattr__ = _missing_kernel
            sys.modules[_HOST_COPIES] = copies

    def server_arguments(self, argv: list[str]) -> list[str]:
        """Add the platform's device, which SGLang does not ask for, and allow every port.

        For a gRPC server that is off SGLang wants 10,000 more than ``--port`` to be a port too.
        """
        from sglang.srt.platforms import current_platform

        if "SGLANG_ENABLE_GRPC" not in os.environ:
            os.environ.setdefault("SGLANG_GRPC_PORT", "1")
        given = any(argument.split("=")[0] == "--device" for argument in argv)
        if given or not current_platform.is_out_of_tree():
            return argv
        return [*argv, "--device", current_platform.device_type]

    def graphs_are_off(self, arguments: Any) -> bool:
        # Later releases, which are served from here, may have the newer arguments.
        if hasattr(arguments, "cuda_graph_config"):
            return super().graphs_are_off(arguments)
        # The first one is for decode only.
        return arguments.disable_cuda_graph and arguments.disable_piecewise_cuda_graph

    def forget_refused(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Forget also what is refused after tokenising, and the rest of such a batch."""

        async def generate_or_forget(manager: Any, obj: Any, request: Any = None) -> Any:
            earlier = set(manager.rid_to_state)
            try:
                async with aclosing(generate(manager, obj, request)) as outputs:
                    async for output in outputs:
                        yield output
            except BaseException:
                rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid or []
                for rid in {rid for rid in rids if isinstance(rid, str)} - earlier:
                    state = manager.rid_to_state.get(rid)
                    # What has been sent is answered, and forgotten then.
                    if state is not None and not state.time_stats.api_server_dispatch_time:
                        del manager.rid_to_state[rid]
                raise

        return generate_or_forget

    def namespace_fields(
        self, cache_salt: str | None, extra_key: str | None, lora_path: str | None
    ) -> dict[str, Any]:
        # What chat makes of its own ``cache_salt``; ``/generate`` takes an ``extra_key`` only.
        key = (cache_salt or "") + (extra_key or "")
        return {"extra_key": key or None, "lora_path": lora_path}

    def render_before_encoding(self, tokenizer: Any) -> None:
        """Have chat prompts rendered to text first, as later releases do themselves."""
        from transformers import PreTrainedTokenizerBase

        render = tokenizer.apply_chat_template
        # A tokenizer with a method of its own may have control tokens without a text form.
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

    def wrapped(self, message: Any) -> Any:
        # Every message is pickled here.
        return message

    def running_batch(self, scheduler: Any, arguments: dict[str, Any]) -> Any:
        return scheduler.running_batch

    def new_batch(self, result: Any) -> Any:
        return result

    def no_batch(self, running: Any) -> Any:
        return None

    def running_after(self, scheduler: Any, result: Any) -> Any:
        return scheduler.running_batch

    def check_host_cache(self, scheduler: Any) -> None:
        if scheduler.enable_hierarchical_cache:
            scheduler.tree_cache.check_hicache_events()

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
        # Salts are a part of it.
        return req.extra_key

    def longest_prefix(self, req: Any) -> int:
        longest = len(req.origin_input_ids) + len(req.output_ids) - 1
        if req.return_logprob and req.logprob_start_len >= 0:
            longest = min(longest, req.logprob_start_len)
        return max(longest, 0)

    def computed_until(self, req: Any) -> int:
        # Cut off there when a chunk of the request joined the batch.
        return len(req.fill_ids)

    def tokens(self, req: Any, start: int, end: int | None) -> NDArray[np.int64]:
        import numpy

        return numpy.array((req.origin_input_ids + req.output_ids)[start:end], dtype=numpy.int64)

    def _set_prefix(self, req: Any, indices: Any) -> None:
        # How much is left to compute is kept beside it, and admission reads that.
        req.prefix_indices = indices
        req.set_extend_input_len(len(req.fill_ids) - len(indices))

    def radix_key(self, req: Any, end: int) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(req.fill_ids[:end], req.extra_key)

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(tree_cache, req, include_req=True)
        return min(len(req.prefix_indices) + req.host_hit_length, self.longest_prefix(req))

    def cpu_platform(self) -> type:
        import psutil
        from sglang.srt.platforms.interface import SRTPlatform

        class CpuPlatform(SRTPlatform):
            def get_device_total_memory(self, device_id: int = 0) -> int:
                return int(psutil.virtual_memory().total)

            def get_current_memory_usage(self, device: Any = None) -> float:
                memory = psutil.virtual_memory()
                return float(memory.total - memory.available)

            def get_mha_kv_pool_cls(self) -> type:
                from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

                return MHATokenToKVPool

            def get_paged_allocator_cls(self) -> type:
                from flashmoa_sglang.cpu.allocator import CpuPagedAllocator

                return CpuPagedAllocator

            def init_backend(self) -> None:
                from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
                from sglang.srt.layers import logits_processor
                from sglang.srt.layers.rotary_embedding import base

                # It takes a platform it does not know for one that has vLLM's rotary kernel.
                base._is_cpu = True
                # A request with a grammar would end the scheduler.
                XGrammarGrammar.apply_vocab_mask = staticmethod(_mask_on_cpu)
                # So would one for the log-probabilities of its prompt: it asks for pinned memory.
                logits_processor.torch = Unpinned("torch")

        return CpuPlatform

    def write_location(self, attention: Any, forward_batch: Any) -> Any:
        return forward_batch.out_cache_loc


def _missing_kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(f"{_HOST_COPIES}.{name} needs a GPU build of sgl_kernel")

    return call


def _mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
