"""Asynchronous expert parallelism: each layer's experts are copied to the device ahead of it.

The weights of a model's experts stay in host memory, or are divided among replicas. A few slots on
the device have the experts of the layers that compute next (MoE-Prefill §4 and §6). In a forward of
many tokens, which is usual in prefill-only work, computing a layer takes longer than copying the
experts of the next layer.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.sglang.options import Options, lacks_accelerator
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader, Store

logger = logging.getLogger(__name__)
_WRITES = "it writes to experts where the device has them"
_MERGE = (
    "layers with adapters do not call the method that waits for copied experts (adapters merged "
    "into the model's weights are fine)"
)
# SGLang's arguments that do not go with --flashmoa-asyncep, and the reasons, where "it" is the
# argument. Older releases lack some of the arguments.
_EXCLUDED = {
    "enable_memory_saver": _WRITES,
    "enable_eplb": _WRITES,
    "enable_elastic_expert_backup": _WRITES,
    "speculative_algorithm": "a draft model would take the place of the one with the experts",
    "enable_lora": _MERGE,
    "lora_paths": _MERGE,
    "enable_paged_experts": "it, too, decides which experts are in a layer's tensors",
    "enable_nvidia_megakernel": "it computes layers itself, with the tensors of their experts",
    "enable_amd_monokernel": "it computes layers itself, with the tensors of their experts",
    "kt_weight_path": "it keeps experts in host memory, too, and computes some of them there",
    "enable_two_batch_overlap": "it computes each layer twice, so that every second copy is late",
    "enable_pdmux": (
        "two CUDA streams would compute with one slot, but copies wait for only one of them"
    ),
    "dwdp_size": "both options decide where a layer finds its experts",
}
# These values of --moe-a2a-backend bypass FusedMoE.run_moe_core, where the offloader waits for
# copied experts.
_EXCLUDED_BACKENDS = ("megamoe", "ascend_fuseep")

# A layer's parameters point to a slot, or to the source of its copies. In the next forward an
# update would be lost for some layers and incomplete for others.
WEIGHTS_REFUSED = (
    "With --flashmoa-asyncep the experts are in other memory, and weights cannot be updated in "
    "place. Restart the engine with the new weights, or run it without --flashmoa-asyncep."
)


def create_offloader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create the plugin's offloader instead of SGLang's, if ``--flashmoa-asyncep`` asks for it.

    Raises: SystemExit if SGLang's own offloading is on, too, or another process has this replica's
        place in its group.
    """
    sglang_offloader, options = original(*args, **kwargs), Options.from_environment()
    if options.asyncep == "off":
        return sglang_offloader
    from sglang.srt.distributed.parallel_state import get_pp_group
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.utils.offloader import NoopOffloader

    from flashmoa_sglang.moe.asyncep.cuda import CudaDevice
    from flashmoa_sglang.moe.asyncep.experts import store_on_host
    from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader
    from flashmoa_sglang.moe.asyncep.replicas import Replica, ShareExchange, share_experts

    if not isinstance(sglang_offloader, NoopOffloader):
        raise SystemExit(
            "--flashmoa-asyncep and SGLang's own offloading exclude each other. Start without "
            "--cpu-offload-gb and --offload-group-size, or without --flashmoa-asyncep."
        )
    store: Store = store_on_host
    if options.asyncep != "h2d":
        replica = Replica(options.asyncep_group, *options.replica())
        # Loading the weights takes long, so a rank that is taken is reported before that.
        exchange = ShareExchange(replica)
        store = partial(share_experts, exchange=exchange, on_device=options.on_device())
    whole = get_pp_group().world_size == 1
    return ExpertOffloader(
        FusedMoE,
        "run_moe_core",
        options.asyncep_slots,
        store,
        whole=whole,
        open_gpu=CudaDevice.of,
    )


def choose_arguments(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    """Turn CUDA graphs off, unless the user gives their options; wraps ``from_cli_args``."""
    if Options.from_environment().asyncep == "off" or args.device == "cpu" or lacks_accelerator():
        return original(cls, args)
    for argument in RELEASE.NO_GRAPHS.split("--")[1:]:
        name, _, value = argument.strip().replace("-", "_").partition(" ")
        if not getattr(args, name):
            setattr(args, name, value or True)
    if args.chunked_prefill_size is None:
        logger.warning(
            "--flashmoa-asyncep: forwards are as long as SGLang chooses, mostly too short to hide "
            "copies of experts. Give --chunked-prefill-size, --max-prefill-tokens and "
            "--mem-fraction-static, for example 131072, 131072 and 0.75."
        )
    return original(cls, args)


def problem(arguments: Any, options: Options) -> str | None:
    """Return why ``--flashmoa-asyncep`` does not go with SGLang's resolved arguments.

    Return ``None`` if it does.
    """
    if options.asyncep == "off":
        return None
    for name, reason in _EXCLUDED.items():
        value = getattr(arguments, name, None)
        # The default is nothing, or for a size, 1.
        if value > 1 if type(value) is int else value:
            return (
                f"--flashmoa-asyncep does not go with --{name.replace('_', '-')}: {reason}; start "
                "without one of the two."
            )
    if arguments.moe_a2a_backend in _EXCLUDED_BACKENDS:
        return (
            f"--flashmoa-asyncep does not go with --moe-a2a-backend {arguments.moe_a2a_backend}, "
            "which computes with the experts' tensors itself; choose another one."
        )
    if options.asyncep != "h2d":
        mode = f"--flashmoa-asyncep {options.asyncep}"
        try:
            options.replica()
        except ValueError as error:
            return f"{mode}: {error}"
        sizes = (arguments.tp_size, arguments.pp_size, RELEASE.data_parallel_ranks(arguments))
        if max(sizes) > 1:
            return (
                f"{mode} needs a server for each replica, but this one has --tp-size, --pp-size "
                f"and --dp-size {', '.join(map(str, sizes))}; start without them."
            )
    if arguments.device == "cuda" and not RELEASE.graphs_are_off(arguments):
        return (
            f"--flashmoa-asyncep needs {RELEASE.NO_GRAPHS}: a graph would look for experts where "
            "they were when it was made."
        )
    if arguments.device == "cuda" and arguments.mem_fraction_static <= 0:
        return (
            "--flashmoa-asyncep: by SGLang's estimate of 1.5 MiB for each token of a forward, "
            "no memory of the device is left for weights and KV (--mem-fraction-static "
            f"{arguments.mem_fraction_static}); give --mem-fraction-static yourself, 0.75 for "
            "example, or shorter forwards (--chunked-prefill-size, --max-prefill-tokens)."
        )
    return None


def own_offloader() -> ExpertOffloader | None:
    """Return this process's offloader; ``None`` if SGLang stores the experts."""
    from sglang.srt.utils.offloader import get_offloader

    from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader

    offloader = get_offloader()
    return offloader if isinstance(offloader, ExpertOffloader) else None
