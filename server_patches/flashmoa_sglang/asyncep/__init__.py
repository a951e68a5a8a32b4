"""Asynchronous expert parallelism: experts come to the layer that computes with them.

The weights of a mixture-of-experts model's experts stay in host memory, or divided among replicas;
a few slots on the device hold those of the layers that are next (MoE-Prefill §4 and §6). Forwards
of many tokens, as prefill-only work has them, take longer to compute a layer than to copy the next
one's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.asyncep.replicas import ONLY_CPUS
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.asyncep.experts import Experts, ExpertSource
    from flashmoa_sglang.asyncep.offloader import ExpertOffloader
    from flashmoa_sglang.saturation import LayerTimes

_WRITES = "it writes to experts where the device has them"
_MERGE = (
    "layers with adapters compute past the place where they wait for copied experts (adapters "
    "merged into the model's weights are fine)"
)
# SGLang's arguments and why not; older releases lack some of them.
_EXCLUDED = {
    "enable_memory_saver": _WRITES,
    "enable_eplb": _WRITES,
    "enable_elastic_expert_backup": _WRITES,
    "speculative_algorithm": "a draft model would take the place of the one with the experts",
    "enable_lora": _MERGE,
    "lora_paths": _MERGE,
    "kt_weight_path": "it keeps experts in host memory, too, and computes some of them there",
    "enable_two_batch_overlap": "it computes each layer twice, so that every second copy is late",
    "enable_pdmux": "two streams would compute with one slot, and copies wait for one of them",
    "dwdp_size": "both say where a layer finds its experts, and the layer has only one place",
}
# Values of --moe-a2a-backend with which FusedMoE.run_moe_core is not called.
_OF_THEIR_OWN = ("megamoe", "ascend_fuseep")


_WEIGHTS_REFUSED = (
    "With --flashmoa-asyncep the experts are in host memory, and weights cannot be updated in "
    "place. Restart the engine with the new weights, or run it without --flashmoa-asyncep."
)


async def update_weights(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse an update, around ``TokenizerManager.update_weights_from_...``.

    What a layer's parameters point to is a slot, or the copy that goes there: an update would be
    lost with the next forward for some layers, and be half there for others. So it is refused.
    """
    if Options.from_environment().asyncep == "off":
        return await original(manager, *args, **kwargs)
    return False, _WEIGHTS_REFUSED


async def update_from_disk(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Do the same for ``update_weights_from_disk``, which also returns the paused requests."""
    if Options.from_environment().asyncep == "off":
        return await original(manager, *args, **kwargs)
    return False, _WEIGHTS_REFUSED, 0


def create_offloader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make our offloader in place of SGLang's, where ``--flashmoa-asyncep`` asks for it.

    Raises: SystemExit where SGLang is to offload, too.
    """
    usual, options = original(*args, **kwargs), Options.from_environment()
    if options.asyncep == "off":
        return usual
    from sglang.srt.distributed import get_pp_group
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.utils.offloader import NoopOffloader

    from flashmoa_sglang.asyncep.offloader import ExpertOffloader

    if not isinstance(usual, NoopOffloader):
        raise SystemExit("--flashmoa-asyncep and SGLang's own offloading exclude each other.")
    return ExpertOffloader(
        FusedMoE,
        "run_moe_core",
        options.asyncep_slots,
        _keep(options),
        whole=get_pp_group().world_size == 1,
    )


def _keep(options: Options) -> Callable[[Sequence[Experts]], list[ExpertSource]]:
    """Return what puts experts where ``--flashmoa-asyncep`` says. Raises: SystemExit."""
    from flashmoa_sglang.asyncep.experts import in_host_memory
    from flashmoa_sglang.asyncep.replicas import Meeting, Replica, ReplicaError
    from flashmoa_sglang.asyncep.sharing import share_with

    if options.asyncep == "h2d":
        return in_host_memory

    def among_replicas(layers: Sequence[Experts]) -> list[ExpertSource]:
        try:
            return share_with(layers, replica, meeting, options.asyncep_wait)
        except ReplicaError as error:
            raise SystemExit(f"--flashmoa-asyncep d2d: {error}.") from error

    try:
        replica = Replica(options.asyncep_group, *options.replica())
        # Before the weights are loaded, which takes long.
        meeting = Meeting(replica)
    except (ReplicaError, ValueError) as error:
        raise SystemExit(f"--flashmoa-asyncep d2d: {error}.") from error
    return among_replicas


def problem(arguments: Any, options: Options) -> str | None:
    """Say why ``--flashmoa-asyncep`` does not go with SGLang's arguments, as it resolved them."""
    if options.asyncep == "off":
        return None
    for name, why in _EXCLUDED.items():
        if _is_given(getattr(arguments, name, None)):
            return (
                f"--flashmoa-asyncep does not go with --{name.replace('_', '-')}: {why}; start "
                "without one of the two."
            )
    if arguments.moe_a2a_backend in _OF_THEIR_OWN:
        return (
            f"--flashmoa-asyncep does not go with --moe-a2a-backend {arguments.moe_a2a_backend}, "
            "which computes with the experts' tensors itself; choose another one."
        )
    if options.asyncep == "d2d":
        return _problem_of_replicas(arguments, options)
    if arguments.device == "cuda" and not RELEASE.graphs_are_off(arguments):
        return (
            f"--flashmoa-asyncep needs {RELEASE.NO_GRAPHS}: a graph would look for experts where "
            "they were when it was made."
        )
    if arguments.device == "cuda" and arguments.mem_fraction_static <= 0:
        return (
            "--flashmoa-asyncep: by SGLang's estimate of 1.5 MiB for each token of a forward, "
            "nothing of the device is left for weights and KV (--mem-fraction-static "
            f"{arguments.mem_fraction_static}); give --mem-fraction-static yourself, 0.75 for "
            "example, or shorter forwards (--chunked-prefill-size, --max-prefill-tokens)."
        )
    return None


def _is_given(value: Any) -> bool:
    """Return whether an argument was given; a size of one is a default."""
    return value > 1 if type(value) is int else bool(value)


def _problem_of_replicas(arguments: Any, options: Options) -> str | None:
    mode = "--flashmoa-asyncep d2d"
    if arguments.device != "cpu":
        return f"{mode}: {ONLY_CPUS}."
    try:
        options.replica()
    except ValueError as error:
        return f"{mode}: {error}"
    sizes = (arguments.tp_size, arguments.pp_size, RELEASE.data_parallel_ranks(arguments))
    if max(sizes) > 1:
        return (
            f"{mode} needs a server for each replica: start without --tp-size, --pp-size and "
            "--dp-size."
        )
    return None


def memory() -> dict[str, int] | None:
    """Return where this process's experts are; ``None`` where SGLang keeps them."""
    ours = _ours()
    return asdict(ours.memory()) if ours is not None else None


def time_next(tokens: int) -> None:
    """Time the layers of the next forward, of so many tokens, where experts come from elsewhere."""
    if (ours := _ours()) is not None:
        ours.time_next(tokens)


def times() -> LayerTimes | None:
    """Return what the last timed forward took by layer; ``None`` where SGLang keeps the experts."""
    ours = _ours()
    return ours.times() if ours is not None else None


def _ours() -> ExpertOffloader | None:
    from sglang.srt.utils.offloader import get_offloader

    from flashmoa_sglang.asyncep.offloader import ExpertOffloader

    offloader = get_offloader()
    return offloader if isinstance(offloader, ExpertOffloader) else None
