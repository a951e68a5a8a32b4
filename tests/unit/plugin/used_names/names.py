"""What the plugin's names stand for: which variable is an object of which class of SGLang.

The plugin names what it gets from SGLang alike everywhere: ``req`` is a ``Req``. What it uses of
SGLang therefore follows from its own source (``walk.py``), and no use is given here but those that
only strings tell.

A class is written ``module:Class``. Of classes divided by ``|`` any may have what is used (a class
that moved between releases, two bases); of those divided by ``&`` each that is there must.
``[...]`` is a list of such objects, ``module:*`` whatever has an attribute assigned in that
module, ``package/*`` any class of a package.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashmoa_sglang.internals.used_names import Use
from flashmoa_sglang.releases.base import Release


def _srt(*classes: str) -> str:
    return "|".join(f"sglang.srt.{one}" for one in classes)


SCHEDULER = _srt("managers.scheduler:Scheduler")
REQ = _srt("managers.schedule_batch:Req")
BATCH = _srt("managers.schedule_batch:ScheduleBatch")
TREE = "&".join(
    _srt(f"mem_cache.{one}")
    for one in ("radix_cache:RadixCache", "unified_radix_cache:UnifiedRadixCache")
)
ALLOCATOR = _srt("mem_cache.allocator:BaseTokenToKVPoolAllocator")
POOL = _srt("mem_cache.memory_pool:MHATokenToKVPool")
TOKEN_POOL = _srt("mem_cache.memory_pool:ReqToTokenPool")
MANAGER = _srt("managers.tokenizer_manager:TokenizerManager")
SPECULATION = _srt("speculative.spec_info:SpeculativeAlgorithm")
STATE = _srt("managers.tokenizer_manager:ReqState")
ARGUMENTS = _srt("server_args:ServerArgs", "arg_groups.fields/*")
MODEL_CONFIG = _srt("configs.model_config:ModelConfig")
REQUEST = _srt("managers.io_struct:GenerateReqInput")
TOKENIZED_REQUEST = _srt("managers.io_struct:TokenizedGenerateReqInput")
SAMPLING = _srt("sampling.sampling_params:SamplingParams")
BOOTSTRAP_QUEUE = _srt("disaggregation.prefill:PrefillBootstrapQueue")
SENDER = _srt(
    "managers.scheduler_components.output_sender:SenderWrapper", "managers.scheduler:SenderWrapper"
)
IPC_CHANNELS = _srt("managers.scheduler_components.ipc_channels:SchedulerIpcChannels")
DISPATCHER = "sglang.utils:TypeBasedDispatcher"
CHAT = _srt("entrypoints.openai.serving_chat:OpenAIServingChat")
HTTP_SERVER = _srt("entrypoints.http_server")
MODEL_RUNNER = _srt("model_executor.model_runner:ModelRunner")
WORKER = _srt("managers.tp_worker:TpModelWorker")
FORWARD_BATCH = _srt("model_executor.forward_batch_info:ForwardBatch")
FORWARD_MODE = _srt("model_executor.forward_batch_info:ForwardMode")
GRAPHS = _srt("model_executor.cuda_graph_config:CudaGraphConfig")
EXPERTS = _srt("layers.moe.fused_moe_triton.layer:FusedMoE")
OFFLOADER = _srt("utils.offloader:BaseOffloader")
PLATFORM = _srt("platforms.cpu:CpuDeviceMixin", "platforms.interface:SRTPlatform")
# Nothing of SGLang's, or a number, text, list or tensor: what is used of it is not SGLang's.
PLAIN = ""

# Variables, parameters and attributes of ``self``; ``name()`` is what a function returns,
# ``name{}`` what the keys of the dictionary that it returns are of.
NAMES: Mapping[str, str] = {
    "adder": _srt("managers.schedule_policy:PrefillAdder"),
    "agent": PLAIN,
    "agent_config": PLAIN,
    "app": PLAIN,
    "arguments": ARGUMENTS,
    "self._arguments": ARGUMENTS,
    "batch": BATCH,
    "chat": CHAT,
    "self._chat()": CHAT,
    "chunked": REQ,
    "given": ARGUMENTS,
    "http_request": PLAIN,
    "manager": MANAGER,
    "prefix_match": _srt("mem_cache.base_prefix_cache:MatchResult"),
    "self._manager": MANAGER,
    "namespace_fields{}": REQUEST,
    "obj": REQUEST,
    "policy": _srt("managers.schedule_policy:SchedulePolicy"),
    "pool": POOL,
    "_pool()": POOL,
    "queue": f"[{REQ}]",
    "req": REQ,
    "reqs": f"[{REQ}]",
    "running": BATCH,
    "running_batch": BATCH,
    "scheduler": SCHEDULER,
    "self._scheduler": SCHEDULER,
    "server_args": ARGUMENTS,
    "ServerArgs": ARGUMENTS,
    "taken": f"[{REQ}]",
    "tokenizer": PLAIN,
    "tokenizer_channel()": SENDER,
    "tokenizer_manager": MANAGER,
    "tree": TREE,
    "tree_cache": TREE,
    "self._tree_cache": TREE,
    "unsent{}": REQUEST,
}

# The same for one file, where a name stands for something else.
IN_FILE: Mapping[str, Mapping[str, str]] = {
    "asyncep/__init__.py": {
        "get_pp_group()": _srt("distributed.parallel_state:GroupCoordinator"),
    },
    "asyncep/experts.py": {"layer": EXPERTS, "self.layer": EXPERTS, "name": PLAIN},
    "asyncep/offloader.py": {"layer": EXPERTS, "self._computing": "'run_moe_core", "module": PLAIN},
    "cpu/platform.py": {"cpu_platform()": PLATFORM},
    # Fields that ``namespace_fields{}`` has.
    "http/token_boundaries.py": {"backend": PLAIN},
    "http/stream_requests.py": {
        "name": PLAIN,
        "request": PLAIN,
        "result": _srt("entrypoints.openai.protocol:ChatCompletionResponse"),
    },
    "http/rendering.py": {
        "request": _srt("entrypoints.openai.protocol:ChatCompletionRequest"),
        "result": _srt("entrypoints.openai.protocol:MessageProcessingResult"),
    },
    "modelled_gpu/models/hash_causal_lm.py": {"config": PLAIN},
    "kv_free.py": {"module": _srt("layers.radix_attention:RadixAttention")},
    "plugin.py": {
        "http_server": HTTP_SERVER,
        "registry": _srt("plugins.hook_registry:HookRegistry"),
    },
    "messages.py": {"dispatcher": DISPATCHER},
    "releases/v0_5_12.py": {
        "current_platform": PLATFORM,
        "forward_batch": FORWARD_BATCH,
        "message": _srt("managers.io_struct:AbortReq"),
        "state": STATE,
    },
    "releases/base.py": {
        "attention": _srt("layers.attention.torch_native_backend:TorchNativeAttnBackend"),
        "forward_batch": FORWARD_BATCH,
        "result": PLAIN,
    },
    "releases/requests.py": {"indices": PLAIN},
    "releases/v0_5_18.py": {"get_memory()": ARGUMENTS, "logprobs": PLAIN, "stage": PLAIN},
    "releases/v0_5_23.py": {
        # It looks up what it is asked for among these.
        "get_parallel()": _srt(
            "runtime_context:ParallelContext", "runtime_context:SpawnRanks", "arg_groups.fields/*"
        ),
        "resolved_view()": ARGUMENTS,
    },
    "http/engine.py": {"request": REQUEST},
    "http/engine_changes.py": {"obj": _srt("managers.io_struct:UnloadLoRAAdapterReqInput")},
    "scheduler/state.py": {"recv_req": TOKENIZED_REQUEST},
    "scheduler/queue.py": {"message": TOKENIZED_REQUEST},
    "scheduler/streams.py": {"message": TOKENIZED_REQUEST},
}

# What attributes of these objects are, and what their methods return.
MEMBERS: Mapping[str, Mapping[str, str]] = {
    BATCH: {
        "forward_mode": FORWARD_MODE,
        "seq_lens_cpu": PLAIN,
        "spec_algorithm": SPECULATION,
    },
    BOOTSTRAP_QUEUE: {"queue": f"[{REQ}]"},
    CHAT: {
        "_process_messages()": _srt("entrypoints.openai.protocol:MessageProcessingResult"),
        "tokenizer_manager": MANAGER,
    },
    _srt("managers.schedule_policy:PrefillAdder"): {"running_batch": BATCH},
    EXPERTS: {"_buffers": PLAIN, "_parameters": PLAIN},
    FORWARD_BATCH: {
        "forward_mode": FORWARD_MODE,
        **dict.fromkeys(("extend_seq_lens", "req_pool_indices", "seq_lens"), PLAIN),
    },
    GRAPHS: {
        phase: _srt("model_executor.cuda_graph_config:PhaseConfig")
        for phase in ("decode", "prefill")
    },
    HTTP_SERVER: {"app": PLAIN},
    IPC_CHANNELS: {"send_to_tokenizer": SENDER},
    MANAGER: {
        "model_config": MODEL_CONFIG,
        **dict.fromkeys(("rid_to_state", "send_to_scheduler", "server_status", "tokenizer"), PLAIN),
    },
    MODEL_CONFIG: {
        "attention_arch": _srt("configs.model_config:AttentionArch"),
        "hf_config": PLAIN,
    },
    MODEL_RUNNER: {"model": PLAIN, "model_config": MODEL_CONFIG, "req_to_token_pool": TOKEN_POOL},
    POOL: {"get_key_buffer()": PLAIN},
    REQ: {
        "extend_range": _srt("managers.schedule_batch:Range"),
        "prefix_indices": PLAIN,
        "sampling_params": SAMPLING,
    },
    REQUEST: {"sampling_params": PLAIN},
    TOKENIZED_REQUEST: {"sampling_params": SAMPLING},
    SCHEDULER: {
        "chunked_req": REQ,
        "disagg_prefill_bootstrap_queue": BOOTSTRAP_QUEUE,
        "grammar_manager": _srt("constrained.grammar_manager:GrammarManager"),
        "ipc_channels": IPC_CHANNELS,
        "last_batch": BATCH,
        "model_config": MODEL_CONFIG,
        "new_token_ratio_tracker": _srt(
            "managers.scheduler_components.new_token_ratio_tracker:NewTokenRatioTracker"
        ),
        "ps": _srt("distributed.parallel_state_wrapper:ParallelState"),
        "req_to_token_pool": TOKEN_POOL,
        "running_batch": BATCH,
        "server_args": ARGUMENTS,
        "spec_algorithm": SPECULATION,
        "token_to_kv_pool_allocator": ALLOCATOR,
        "tp_worker": WORKER,
        "tree_cache": TREE,
        "waiting_queue": f"[{REQ}]",
    },
    ARGUMENTS: {"cuda_graph_config": GRAPHS},
    STATE: {"time_stats": _srt("observability.req_time_stats:APIServerReqTimeStats")},
    TREE: {
        "inc_lock_ref()": _srt("mem_cache.base_prefix_cache:IncLockRefResult"),
        "match_prefix()": _srt("mem_cache.base_prefix_cache:MatchResult"),
        "token_to_kv_pool_allocator": ALLOCATOR,
    },
    WORKER: {"model_runner": MODEL_RUNNER},
}

# What only some of them have, of which the plugin asks nothing else.
OF_SOME: Mapping[tuple[str, str], str] = {
    (TREE, "release_aborted_request"): _srt(
        "mem_cache.hiradix_cache:HiRadixCache", "mem_cache.unified_radix_cache:UnifiedRadixCache"
    ),
}

# What only strings in the plugin's source name, and where; ``'...'``: a string in a class's source.
BY_STRING: tuple[tuple[str, Use], ...] = (
    ("asyncep/offloader.py:ExpertOffloader", Use(OFFLOADER, "wrap_modules")),
    ("asyncep/offloader.py:ExpertOffloader", Use(OFFLOADER, "post_init")),
    ("http/engine.py:Engine", Use(MANAGER, "'meta_info'")),
    ("http/stream.py:Prefilled.read", Use(MANAGER, "'prompt_tokens'")),
    ("http/stream.py:Prefilled.read", Use(MANAGER, "'cached_tokens'")),
    ("http/stream.py:Prefilled.read", Use(MANAGER, "'finish_reason'")),
    ("plugin.py:attach_api", Use(f"{HTTP_SERVER}:*", "openai_serving_chat")),
    # SGLang passes it by keyword.
    (
        "releases/base.py:Release.running_batch",
        Use(SCHEDULER, "_get_new_batch_prefill_raw", keywords=("running_batch",)),
    ),
)

# What a release, by its module, may well not have: asked for with ``getattr`` or ``hasattr``, or in
# functions that an engine with it does not come to.
NOT_NEEDED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        # In every release: an answer that is streamed is none of SGLang's classes.
        ("http/stream_requests.py:annotate_chat", "body_iterator"),
        # Arguments that only 0.5.23 has, of those that are tested.
        ("asyncep/__init__.py:problem", "enable_amd_monokernel"),
        ("asyncep/__init__.py:problem", "enable_nvidia_megakernel"),
        ("asyncep/__init__.py:problem", "enable_paged_experts"),
    ),
    "v0_5_12": (
        ("asyncep/__init__.py:problem", "dwdp_size"),
        ("http/rendering.py:ChatRenderer.render", "input_ids"),
        ("kv_free.py:_has_scales", "is_quantized_kv_cache"),
        ("releases/base.py:Release.graphs_are_off", ""),
        ("releases/v0_5_12.py:Release0512.graphs_are_off", "cuda_graph_config"),
    ),
    "v0_5_23": (
        # No request of a batch reads what another one of it computes.
        ("scheduler/shared_prefill.py:adopt", ""),
        ("releases/requests.py:RequestAccess.grow_prefix", ""),
        ("releases/requests.py:RequestAccess._set_prefix", ""),
    ),
}

# Files with nothing that an engine needs of SGLang: their imports fail at once and say so.
APART = ("internals/", "forkserver.py", "gguf_model.py", "tiny_model.py")


def stand_for(file: str, release: type[Release]) -> dict[str, str]:
    """Return what names stand for in a file of the plugin, in an engine with a release."""
    module, _, streamer = release.STREAM_OUTPUT.rpartition(".")[0].rpartition(".")
    return {**NAMES, "streamer": f"{module}:{streamer}", **IN_FILE.get(file, {})}


def member(owner: str, name: str) -> str | None:
    """Return what an attribute is, or what a method, ``name()``, returns; ``None``: unknown."""
    for one in owner.replace("&", "|").split("|"):
        for known, members in MEMBERS.items():
            if one in known.replace("&", "|").split("|") and name in members:
                return members[name]
    return None
