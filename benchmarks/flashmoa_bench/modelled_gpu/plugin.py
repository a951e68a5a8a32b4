"""The SGLang plugin of modelled GPUs: options, and hooks into ``flashmoa_cpu``'s platform.

SGLang calls :func:`register` in each process, through the entry point ``sglang.srt.plugins``. It
needs no other plugin (``SGLANG_PLUGINS=flashmoa_modelled_gpu``).
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from typing import Any

_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_PLATFORM = "flashmoa_cpu.platform.TorchCpuPlatform"


def register() -> None:
    """Register the hooks of this process with SGLang; do nothing without ``flashmoa-sglang``."""
    if find_spec("flashmoa_sglang") is None:
        return
    from flashmoa_sglang.sglang.options import lacks_accelerator
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from flashmoa_bench.modelled_gpu.options import DeviceOptions

    HookRegistry.register(f"{_ARGUMENTS}.add_cli_args", DeviceOptions.add_arguments)
    HookRegistry.register(f"{_ARGUMENTS}.from_cli_args", read_arguments, HookType.BEFORE)
    if lacks_accelerator():
        sized = f"{_PLATFORM}.apply_server_args_defaults"
        HookRegistry.register(sized, size_engine, HookType.BEFORE)
        HookRegistry.register(f"{_PLATFORM}.get_device_total_memory", device_memory)
        HookRegistry.register("flashmoa_cpu.platform.make_attention", time_forwards)
        HookRegistry.register("flashmoa_sglang.moe.asyncep.cuda.CudaDevice.of", open_virtual_gpu)


def read_arguments(_cls: type, args: Namespace) -> None:
    """Check the device, and serve a hash model, before ``ServerArgs.from_cli_args``."""
    from flashmoa_sglang.sglang.options import lacks_accelerator

    from flashmoa_bench.modelled_gpu.hash_model import serve_hash_model
    from flashmoa_bench.modelled_gpu.options import DeviceOptions

    if DeviceOptions.from_environment().device and not lacks_accelerator():
        raise SystemExit("--flashmoa-device is for engines on a CPU; leave it out on a GPU.")
    serve_hash_model(args)


def size_engine(_platform: Any, server_args: Any) -> None:
    """Size the KV pool as on the GPU, before ``apply_server_args_defaults``.

    Raises: SystemExit if the GPU, the model or its times are unknown.
    """
    from flashmoa_bench.modelled_gpu.experts import check_model, resident_bytes
    from flashmoa_bench.modelled_gpu.gpu import modelled_gpu

    try:
        if (modelled := modelled_gpu()) is not None:
            check_model(server_args.model_path)
            modelled.size_engine(server_args, resident_bytes(modelled.model))
    except ValueError as error:
        raise SystemExit(f"flashmoa serve: {error}") from error


def open_virtual_gpu(_gpu: Any, *_arguments: Any) -> Any:
    """Return the GPU that experts are copied to; ``None`` if the engine takes no GPU's time.

    This runs after ``CudaDevice.of``, which finds no GPU on a CPU.
    """
    from flashmoa_bench.modelled_gpu.experts import virtual_gpu

    return virtual_gpu()


def device_memory(_memory: int, _platform: Any, _device_id: int = 0) -> int | None:
    """Return the GPU's memory in bytes; SGLang chooses the size of a chunk by it."""
    from flashmoa_bench.modelled_gpu.gpu import modelled_gpu

    modelled = modelled_gpu()
    return None if modelled is None else modelled.gpu.memory


def time_forwards(_backend: Any, runner: Any) -> Any:
    """Apply hooks to forwards, and return the attention of a hash model, else ``None``.

    This runs after ``make_attention``. The classes to hook cannot be imported earlier.
    """
    from flashmoa_bench.modelled_gpu.hash_model import ARCHITECTURE, EXPERTS_ARCHITECTURE
    from flashmoa_bench.modelled_gpu.hooks import install

    install()
    architectures = set(runner.model_config.hf_config.architectures or ())
    if not architectures & {ARCHITECTURE, EXPERTS_ARCHITECTURE}:
        return None
    from flashmoa_bench.modelled_gpu.models.hash_causal_lm import HashAttentionBackend

    return HashAttentionBackend(runner)
