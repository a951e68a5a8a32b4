"""Compute how SGLang would divide a GPU's memory, by SGLang's own arithmetic and without a GPU.

This is a separate program, because parsing SGLang's arguments leaves traces in its process. It
reads requests as JSON, one per line: ``argv`` of ``flashmoa serve``, ``model`` (a folder with a
``config.json``), ``total`` MiB of memory as nvidia-smi shows it, ``taken`` bytes that are in use
when the server starts, and whether the plugin ``sees`` the memory. It answers each with a line: a
``Budget``, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["SGLANG_PLUGINS"] = "none"

from flashmoa_sglang.cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

import torch  # noqa: E402
from flashmoa_sglang import asyncep, kv_free  # noqa: E402
from flashmoa_sglang.asyncep import choices, memory_plan  # noqa: E402
from flashmoa_sglang.options import Options, add_arguments  # noqa: E402
from sglang.srt import server_args as sglang_arguments  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator  # noqa: E402
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator  # noqa: E402
from sglang.srt.model_executor import pool_configurator  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

_GIB = 1 << 30


@dataclass
class Budget:
    """Says how a server divides the GPU's memory.

    Attributes:
        problem: why the plugin or SGLang refuses to start, ``None`` if they do not.
        fraction: share of the free memory for weights and KV (``--mem-fraction-static``).
        weights, kv: bytes of the weights on the device, and of the KV pool.
        tokens: number of tokens in the KV pool.
        left: bytes that remain for forwards.
        forward: number of tokens in the largest forward.
    """

    problem: str | None
    fraction: float
    weights: int
    kv: int = 0
    tokens: int = 0
    left: int = 0
    forward: int = 0


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(asdict(budget(**request))), flush=True)


def budget(argv: list[str], model: str, total: int, taken: int, sees: bool) -> Budget:
    # nvidia-smi does not show what this server itself will take.
    shown = (total << 20) - taken + memory_plan.CONTEXT if sees else None
    with _options(["--model-path", model, *argv], shown) as (rest, options):
        rest += ["--device", "cuda", "--skip-tokenizer-init"]
        with mock.patch.object(
            sglang_arguments, "get_device_memory_capacity", lambda _device: float(total)
        ):
            arguments = sglang_arguments.prepare_server_args(rest)
        config = arguments.get_model_config()
        weights = _weight_bytes(config.hf_config, options, arguments.tp_size)
        fraction = arguments.mem_fraction_static
        if problem := _plugin_problem(arguments, options):
            return Budget(problem, fraction, weights)
        free = (total << 20) - taken
        try:
            pool = _pool_tokens(arguments, config, free, free - weights)
        except ValueError as error:
            return Budget(str(error), fraction, weights)
        cell = _bytes_per_token(arguments, config)
    chunk, most = arguments.chunked_prefill_size, arguments.max_prefill_tokens
    kv = cell * pool // (config.num_hidden_layers if options.kv_cache == "off" else 1)
    return Budget(
        problem=None,
        fraction=fraction,
        weights=weights,
        kv=kv,
        tokens=pool,
        left=free - weights - kv,
        forward=min(most, chunk) if chunk > 0 else most,
    )


@contextmanager
def _options(argv: list[str], free: int | None) -> Generator[tuple[list[str], Options]]:
    """Add what the plugin chooses, and split arguments into SGLang's and the plugin's options."""
    with mock.patch.dict(os.environ):
        argv = choices.add_choices(argv, lambda _: _known(free), host_bytes=1 << 50)
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_arguments(None, parser)
        _, rest = parser.parse_known_args(argv)
        yield rest, Options.from_environment()


def _known(free: int | None) -> int:
    if free is None:
        raise ValueError("there is no nvidia-smi")
    return free


def _plugin_problem(arguments: Any, options: Options) -> str | None:
    try:
        if kv_free.is_on():
            kv_free.refuse_unsupported(arguments)
    except SystemExit as error:
        return str(error)
    return asyncep.problem(arguments, options)


def _weight_bytes(config: Any, options: Options, ranks: int) -> int:
    """Return how many bytes the loaded model's weights take on each of so many devices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers: dict[str, int] = {}
    others = 0
    for name, parameter in model.named_parameters():
        before, experts, _ = name.partition(".experts.")
        if experts:
            layers[before] = layers.get(before, 0) + parameter.nbytes
        else:
            # Routers and norms are whole on each device.
            divided = any(part in name for part in ("_proj", "embed_tokens", "lm_head"))
            others += parameter.nbytes // (ranks if divided else 1)
    first, *copied = [size // ranks for size in layers.values()] or [0]
    if options.asyncep == "off":
        return others + first + sum(copied)
    share = 0.0
    if options.asyncep != "h2d":
        share = sum(copied) * options.on_device() / options.replica()[1]
    return others + first + options.asyncep_slots * max(copied) + round(share)


def _pool_tokens(arguments: Any, config: Any, before: int, after: int) -> int:
    """Return the number of tokens in the KV pool.

    Args:
        before, after: free bytes before and after the weights are loaded.

    Raises: ValueError by SGLang if there is no memory for a pool.
    """
    schedule = SimpleNamespace(
        mem_fraction_static=arguments.mem_fraction_static,
        max_total_tokens=arguments.max_total_tokens,
        page_size=arguments.page_size,
    )
    alone = SimpleNamespace(world_size=1, cpu_group=None)
    kv = _configurator(arguments, config)
    with (
        mock.patch.object(kv_cache_configurator, "get_schedule", lambda: schedule),
        mock.patch.object(
            kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: after / _GIB
        ),
        mock.patch.object(kv_cache_configurator, "get_world_group", lambda: alone),
        mock.patch.object(kv_cache_configurator, "configured_pp_size", lambda: 1),
        _ranks(arguments.tp_size),
    ):
        left = KVCacheConfigurator._profile_available_bytes(kv, before / _GIB)
        return KVCacheConfigurator.config_from_budget(kv, left).max_total_num_tokens


def _bytes_per_token(arguments: Any, config: Any) -> int:
    """Return how many bytes the KV of one token takes in all layers."""
    with _ranks(arguments.tp_size):
        kv = _configurator(arguments, config)
        pool: Any = pool_configurator.create_memory_pool_configurator(kv)
        return pool._cell_size


def _configurator(arguments: Any, config: Any) -> Any:
    """Return SGLang's configurator with the attributes that its formulas read."""
    layers = SimpleNamespace(
        num_effective_layers=config.num_hidden_layers,
        start_layer=0,
        end_layer=config.num_hidden_layers,
    )
    no_draft = SimpleNamespace(
        is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: False
    )
    configurator = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        server_args=arguments,
        model_config=config,
        layer_info=layers,
        ps=SimpleNamespace(pp_size=1),
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        spec_algorithm=no_draft,
        is_draft_worker=False,
        is_hybrid_swa=False,
        use_mla_backend=False,
        mambaish_config=None,
        post_capture_kv_active=False,
    )
    configurator._apply_token_constraints = partial(
        KVCacheConfigurator._apply_token_constraints, configurator
    )
    return configurator


@contextmanager
def _ranks(ranks: int) -> Generator[None]:
    parallel = SimpleNamespace(attn_tp_size=ranks, attn_dcp_size=1, attn_cp_size=1)
    with mock.patch.object(pool_configurator, "get_parallel", lambda: parallel):
        yield


if __name__ == "__main__":
    main()
