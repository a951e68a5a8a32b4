"""``ModelledGpu``: the GPU whose time an engine on a CPU takes.

``Gpu`` is a data sheet, ``Model`` the sizes in a ``config.json``. ``Roofline`` and
``MeasuredTables`` give the time of a ``Forward``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashmoa_bench.modelled_gpu.options import DeviceOptions

# The package with data sheets and models' configurations.
_PACKAGE = "aiconfigurator_core"
# Fields that a model's configuration must have.
_SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet.

    Args:
        memory: bytes.
        bandwidth: bytes of its memory that it reads per second.
        flops: dense operations per second in bfloat16.
        link: bytes per second to a GPU of another engine.
        fp8_flops: dense operations per second in FP8; 0 if it has no FP8.
        pcie, nvlink: bytes per second from host memory, and from other GPUs of the machine; 0 if
            unknown.
        copy_efficiency: share of a bandwidth that copies reach.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    link: float
    fp8_flops: float = 0.0
    pcie: float = 0.0
    nvlink: float = 0.0
    copy_efficiency: float = 0.8

    @classmethod
    def load(cls, name: str) -> Gpu:
        """Read a data sheet: a JSON file that has these fields, or aiconfigurator-core's.

        Raises: ValueError if it does not exist, or lacks a field.
        """
        if name.endswith(".json"):
            fields = _read_json(Path(name))
            wanted = {"name", "memory", "bandwidth", "flops", "link"}
            optional = {field.name for field in dataclasses.fields(cls)} - wanted
            if fields.keys() - optional != wanted:
                raise ValueError(
                    f"{name} has {sorted(fields)}; a GPU's data sheet has {sorted(wanted)} and, if "
                    f"known, {sorted(optional)}."
                )
            return cls(**fields)
        import yaml

        folder = _package_folder("systems")
        sheets = {file.stem: file for file in folder.glob("*.yaml")} if folder else {}
        if name not in sheets:
            known = [stem for stem, file in sheets.items() if "mem_capacity" in file.read_text()]
            names = ", ".join(sorted(known)) or "none, aiconfigurator-core is not installed"
            raise ValueError(
                f"No data sheet of a GPU {name!r}. Known are: {names}. Others: a JSON file with "
                "name, memory (bytes), bandwidth and link (bytes/s) and flops (1/s)."
            )
        sheet = yaml.safe_load(sheets[name].read_text())
        gpu, node = sheet["gpu"], sheet["node"]
        return cls(
            name,
            int(gpu["mem_capacity"]),
            float(gpu["mem_bw"]),
            float(gpu["bfloat16_tc_flops"]),
            float(node["inter_node_bw"]),
            float(gpu.get("fp8_tc_flops") or 0),
            float(node.get("pcie_bw") or 0),
            float(node.get("intra_node_bw") or 0),
            # The sheets know this share for the GPU's own memory only.
            float(gpu["mem_bw_empirical_scaling_factor"]),
        )


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder with grouped-query attention, dense or with experts.

    Args:
        weights: precision of the layers' weights. Embeddings, logits and KV are in bfloat16.
    """

    name: str
    config: dict[str, Any]
    weights: str = "bfloat16"

    @classmethod
    def load(cls, name: str, weights: str = "bfloat16") -> Model:
        """Read the configuration from a folder, or from aiconfigurator-core.

        Raises: ValueError if it does not exist, or has another architecture.
        """
        file = Path(name) / "config.json"
        if not file.is_file():
            folder = _package_folder("model_configs")
            file = (folder or Path(name)) / f"{name.replace('/', '--')}_config.json"
        if not file.is_file():
            raise ValueError(
                f"No config.json of the model {name!r}: give a folder that has one, or the name of "
                "a model that aiconfigurator-core knows, as Qwen/Qwen3-32B."
            )
        config = _read_json(file)
        # A model with vision has its decoder's sizes here.
        config = config.get("text_config", config)
        model = cls(name, config, weights)
        if missing := _SIZES - config.keys():
            names = ", ".join(sorted(missing))
            raise ValueError(f"{file} has no {names}, so the model's size is unknown.")
        if "kv_lora_rank" in config:
            raise ValueError(f"{name} has latent attention (MLA), whose KV is not modelled yet.")
        return model

    @cached_property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @cached_property
    def head_size(self) -> int:
        heads = self.config["num_attention_heads"]
        return self.config.get("head_dim") or self.config["hidden_size"] // heads

    @cached_property
    def kv_bytes_per_token(self) -> int:
        heads = self.config.get("num_key_value_heads") or self.config["num_attention_heads"]
        return 2 * 2 * self.layers * heads * self.head_size

    @cached_property
    def experts(self) -> int:
        """The number of experts in a layer; 1 for a dense model."""
        return self.config.get("num_experts") or self.config.get("num_local_experts") or 1

    @cached_property
    def experts_per_token(self) -> int:
        return self.config.get("num_experts_per_tok") or 1

    @cached_property
    def attention_weights(self) -> int:
        """The number of attention weights in one layer."""
        query = self.config["num_attention_heads"] * self.head_size
        kv = self.kv_bytes_per_token // (2 * self.layers)
        return self.config["hidden_size"] * (2 * query + kv)

    @cached_property
    def expert_weights(self) -> int:
        """The number of weights in one expert, or in the feed-forward part of a dense layer."""
        width = self.config["intermediate_size"]
        if self.experts > 1:
            width = self.config.get("moe_intermediate_size") or width
        return 3 * self.config["hidden_size"] * width

    @cached_property
    def head_weights(self) -> int:
        """The number of weights that turn hidden states into logits."""
        return self.config["vocab_size"] * self.config["hidden_size"]

    @property
    def bytes_per_weight(self) -> int:
        return 2 if self.weights == "bfloat16" else 1

    @cached_property
    def expert_bytes(self) -> int:
        """The bytes of one layer's experts."""
        return self.experts * self.expert_weights * self.bytes_per_weight

    @cached_property
    def weight_bytes(self) -> int:
        embeddings = self.head_weights * (1 if self.config.get("tie_word_embeddings") else 2)
        layer = self.attention_weights + self.experts * self.expert_weights
        return self.bytes_per_weight * self.layers * layer + 2 * embeddings


def memory_fraction(gpu: Gpu, tensor_parallel: int) -> float:
    """Return SGLang's default share of the memory for weights and KV."""
    if find_spec(_PACKAGE) is None:
        # SGLang's default for an unknown memory size.
        return 0.88
    from aiconfigurator_core.sdk.backends.sglang_backend import derive_sglang_mem_fraction_static

    return derive_sglang_mem_fraction_static(gpu.memory, tensor_parallel)


def kv_tokens(
    gpu: Gpu, model: Model, tensor_parallel: int, fraction: float, weights: float | None = None
) -> int:
    """Return the tokens in the KV pool of an SGLang engine.

    Args:
        fraction: share of the memory for weights and KV (``--mem-fraction-static``).
        weights: bytes of weights on the GPUs; by default all.

    Raises: ValueError if the weights leave no room.
    """
    memory = tensor_parallel * gpu.memory * fraction
    weights = model.weight_bytes if weights is None else weights
    left = memory - weights
    if left < model.kv_bytes_per_token:
        raise ValueError(
            f"The weights of {model.name} take {weights / 1e9:.0f} GB, and "
            f"{fraction:.0%} of {tensor_parallel} x {gpu.name} is {memory / 1e9:.0f} GB: "
            "give a larger --flashmoa-device-tp or another GPU."
        )
    return int(left // model.kv_bytes_per_token)


def comm_table(gpu: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of SGLang's newest table of this name on communication; empty without one."""
    folder = _package_folder("systems")
    files = folder.glob(f"data/{gpu}/comm/sglang/*/{name}.parquet") if folder else []
    # Releases have numbers, as in 0.5.6.post2.
    newest = max(
        files, key=lambda file: [int(n) for n in re.findall(r"\d+", file.parent.name)], default=None
    )
    if newest is None:
        return []
    import pandas

    return pandas.read_parquet(newest).to_dict("records")


def _package_folder(name: str) -> Path | None:
    if find_spec(_PACKAGE) is None:
        return None
    return Path(str(files(_PACKAGE))) / name


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}.") from error


@dataclass(frozen=True, slots=True)
class Prefills:
    """Equal prefills, which cost as much together as a forward's real prefills.

    Args:
        tokens: new tokens of all requests together.
        cached: tokens before the new tokens, per request. Attention reads them.
    """

    requests: int = 0
    tokens: int = 0
    cached: int = 0

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> Prefills:
        """Return equal prefills for requests, given as pairs of cached and new tokens.

        The tables have times for equal requests only. Equal requests keep the number of requests,
        the new tokens, and the pairs of tokens that attention compares.
        """
        pairs = [(cached, new) for cached, new in requests if new > 0]
        tokens = sum(new for _, new in pairs)
        if not tokens:
            return cls()
        compared = sum(new * (cached + new / 2) for cached, new in pairs)
        cached = compared / tokens - tokens / len(pairs) / 2
        return cls(len(pairs), tokens, max(0, round(cached)))


@dataclass(frozen=True, slots=True)
class Forward:
    """The work of a forward: prefills, and decodes of a single token each.

    Args:
        context: mean context of the requests in tokens, with the new token.
    """

    prefills: Prefills = Prefills()
    decodes: int = 0
    context: int = 0


class Roofline:
    """Times forwards by the roofline model: no kernel is faster than its arithmetic or its reads.

    This is a lower bound, without launches, synchronization and inefficiency. It needs no package,
    and serves for GPUs and models without measurements.

    Raises: ValueError if the weights are in FP8 and the GPU has no FP8.
    """

    def __init__(self, gpu: Gpu, model: Model, tensor_parallel: int = 1) -> None:
        layer_flops = gpu.flops if model.weights == "bfloat16" else gpu.fp8_flops
        if not layer_flops:
            raise ValueError(f"{gpu.name} has no FP8, so its weights cannot be {model.weights}.")
        self._layer_flops = layer_flops * tensor_parallel
        self._flops = gpu.flops * tensor_parallel
        self._bandwidth = gpu.bandwidth * tensor_parallel
        self._model = model

    def seconds(self, forward: Forward) -> float:
        prefills, model = forward.prefills, self._model
        requests = prefills.requests + forward.decodes
        tokens = prefills.tokens + forward.decodes
        if not tokens:
            return 0.0
        linear = max(
            model.attention_weights * model.bytes_per_weight / self._bandwidth,
            2 * tokens * model.attention_weights / self._layer_flops,
        )
        logits = max(
            2 * model.head_weights / self._bandwidth,
            2 * requests * model.head_weights / self._flops,
        )
        others = model.layers * linear + self._attention(forward) + logits
        return others + self.expert_seconds(forward)

    def expert_seconds(self, forward: Forward) -> float:
        """Return the part of a forward's time in experts, or in a dense model's MLPs."""
        model, tokens = self._model, forward.prefills.tokens + forward.decodes
        # Expected number of experts that some token needs, if tokens choose experts at random.
        idle = (1 - model.experts_per_token / model.experts) ** tokens
        needed = model.experts * (1 - idle) if model.experts > 1 else 1
        weights = needed * model.expert_weights
        reads = weights * model.bytes_per_weight / self._bandwidth
        computed = 2 * tokens * model.experts_per_token * model.expert_weights / self._layer_flops
        return model.layers * max(reads, computed)

    def _attention(self, forward: Forward) -> float:
        prefills, model = forward.prefills, self._model
        query = model.config["num_attention_heads"] * model.head_size
        # Attention multiplies each new token's query with the keys before it, and each weight with
        # a value.
        pairs = prefills.tokens * prefills.cached + prefills.tokens**2 / 2 / max(
            1, prefills.requests
        )
        computed = model.layers * 4 * query * (pairs + forward.decodes * forward.context)
        read = prefills.requests * prefills.cached + prefills.tokens
        read += forward.decodes * forward.context
        return max(computed / self._flops, read * model.kv_bytes_per_token / self._bandwidth)


class MeasuredTables:
    """Times the forwards of SGLang from NVIDIA's measurements of a model on a GPU.

    The tables have the time of each operation by its size, and a forward's time is the sum. Prefill
    attention and decode attention are looked up apart. Everything else is looked up once for all
    tokens together, as a mixed batch computes it.

    Args:
        gpu: such as ``h200_sxm``, ``h100_sxm`` or ``a100_sxm``.
        model: a name on Hugging Face that the package knows, or a folder with a ``config.json``.
        tensor_parallel: number of GPUs that share the model.
        weights: precision of the weights, ``bfloat16``, ``fp8`` or ``fp8_block``.
        backend: the engine whose kernels were measured, ``sglang`` or ``vllm``.
        division: the package's other arguments on dividing the model, such as ``moe_ep_size``.

    Raises: ValueError if the package is not installed, or has no tables for this GPU and model.
    """

    def __init__(
        self,
        gpu: str,
        model: str,
        tensor_parallel: int = 1,
        weights: str = "bfloat16",
        backend: str = "sglang",
        **division: int,
    ) -> None:
        try:
            # Pandas, which the package imports, may warn.
            with warnings.catch_warnings(action="ignore"):
                from aiconfigurator_core import sdk
        except ImportError as error:
            raise ValueError(
                f"The times of {gpu} need aiconfigurator-core ({error}): "
                "pip install 'flashmoa-bench[engines]'."
            ) from error
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        modes = ("gemm_quant_mode", "moe_quant_mode")
        precision = {} if weights == "bfloat16" else dict.fromkeys(modes, weights)
        try:
            self.engine = sdk.EngineHandle.compile(
                model, gpu, backend, tp_size=tensor_parallel, **precision, **division
            )
            self.engine.predict_decode_latency(1, 1)
        except Exception as error:  # The package raises errors of many classes.
            message = f"aiconfigurator-core has no times for {model} ({weights}) on {gpu}: {error}."
            raise ValueError(message) from error

    def seconds(self, forward: Forward) -> float:
        prefills, decodes = forward.prefills, forward.decodes
        if not prefills.tokens:
            return self._decode(decodes, forward.context) if decodes else 0.0
        together = self._other_than_attention(
            prefills.requests + decodes, prefills.tokens + decodes
        )
        return together + self._attention(prefills) + self._kv_reads(forward)

    def expert_seconds(self, forward: Forward) -> float:
        """Return the part of a forward's time in experts; 0 for a dense model."""
        tokens = forward.prefills.tokens + forward.decodes
        return self._experts(tokens) if tokens else 0.0

    @lru_cache(maxsize=4096)  # noqa: B019 - there is one object for the whole process
    def _experts(self, tokens: int) -> float:
        operations, _ = self.engine.run_static_per_op(
            batch_size=1, isl=tokens, osl=1, mode="static_ctx"
        )
        return sum(ms for name, ms, *_ in operations if name == "context_moe") / 1000

    @lru_cache(maxsize=4096)  # noqa: B019
    def _decode(self, requests: int, context: int) -> float:
        return self.engine.predict_decode_latency(requests, context) / 1000

    @lru_cache(maxsize=4096)  # noqa: B019
    def _other_than_attention(self, requests: int, tokens: int) -> float:
        """Return the seconds of all tokens together, and of a row of logits per request.

        The tokens count as one request, to look up their exact number. Kernels compute blocks of 64
        or 128 tokens, so one more token can take a whole block's time.
        """
        together, _ = self.engine.run_static_per_op(
            batch_size=1, isl=tokens, osl=1, mode="static_ctx"
        )
        milliseconds = sum(
            ms for name, ms, *_ in together if "attention" not in name and "logits" not in name
        )
        return (milliseconds + self._logits(requests)) / 1000

    @lru_cache(maxsize=4096)  # noqa: B019
    def _logits(self, requests: int) -> float:
        operations, _ = self.engine.run_static_per_op(
            batch_size=requests, isl=1, osl=1, mode="static_ctx"
        )
        return sum(ms for name, ms, *_ in operations if "logits" in name)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _attention(self, prefills: Prefills) -> float:
        new = max(1, round(prefills.tokens / prefills.requests))
        operations, _ = self.engine.run_static_per_op(
            batch_size=prefills.requests,
            isl=prefills.cached + new,
            osl=1,
            prefix=prefills.cached,
            mode="static_ctx",
        )
        return sum(ms for name, ms, *_ in operations if "attention" in name) / 1000

    def _kv_reads(self, forward: Forward) -> float:
        """Return the attention's seconds for the KV of all requests that have some.

        The tables have no prefills behind cached tokens. The package gives such a prefill its share
        of the compared pairs of the whole prompt's prefill. The rest of the pairs takes the time of
        a decode behind the same context: to start, and to read the cached KV. One kernel computes
        the attention of a mixed batch, so prefills count as more requests of the same decode.
        """
        prefills, decodes = forward.prefills, forward.decodes
        end = prefills.cached + prefills.tokens / prefills.requests
        rest = (prefills.cached / end) ** 2
        requests = prefills.requests + decodes
        context = round((prefills.requests * end + decodes * forward.context) / requests)
        alone = self._decode_attention(decodes, forward.context)
        return (1 - rest) * alone + rest * self._decode_attention(requests, context)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _decode_attention(self, requests: int, context: int) -> float:
        if not requests:
            return 0.0
        operations = self.engine.decode_step_per_op(requests, context, 2)
        return sum(ms for name, ms, *_ in operations if "attention" in name) / 1000


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds that one layer computes in a forward: with its experts, and everything else."""

    experts: float = 0.0
    others: float = 0.0

    @classmethod
    def of(
        cls, times: Roofline | MeasuredTables, forward: Forward, layers: int, slowdown: float = 1.0
    ) -> LayerSeconds:
        """Return the mean over the layers."""
        experts = times.expert_seconds(forward)
        others = max(0.0, times.seconds(forward) - experts)
        return cls(experts * slowdown / layers, others * slowdown / layers)


@dataclass(frozen=True, slots=True)
class ModelledGpu:
    """A GPU, the model on it, and the times of forwards and transfers there.

    Args:
        slowdown: factor of all times, for a slow machine.
    """

    gpu: Gpu
    model: Model
    tensor_parallel: int
    times: Roofline | MeasuredTables
    slowdown: float = 1.0

    @property
    def name(self) -> str:
        times = "roofline of " if isinstance(self.times, Roofline) else ""
        weights = f" in {self.model.weights}" if self.model.weights != "bfloat16" else ""
        slower = f", {self.slowdown:g} times slower" if self.slowdown != 1 else ""
        return (
            f"modelled {times}{self.gpu.name} "
            f"({self.model.name}{weights}, TP{self.tensor_parallel}{slower})"
        )

    def seconds(self, forward: Forward) -> float:
        """Return the seconds of a forward, with the slowdown."""
        return self.times.seconds(forward) * self.slowdown

    def layer_seconds(self, forward: Forward) -> LayerSeconds:
        """Return the seconds of a layer in a forward, with the slowdown."""
        return LayerSeconds.of(self.times, forward, self.model.layers, self.slowdown)

    def transfer_seconds(self, tokens: int) -> float:
        """Return the seconds to send the KV of ``tokens`` tokens, with the slowdown.

        Each rank sends its part over its own link.
        """
        size = tokens * self.model.kv_bytes_per_token
        return size / (self.gpu.link * self.tensor_parallel) * self.slowdown

    def size_engine(self, server_args: Any, weights: float | None = None) -> None:
        """Give an engine its KV pool on this GPU, unless the user has set the pool's size.

        Args: weights: as for :func:`kv_tokens`.

        Raises: ValueError if the weights do not fit.
        """
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = memory_fraction(self.gpu, self.tensor_parallel)
        if server_args.max_total_tokens is None:
            fraction = server_args.mem_fraction_static
            server_args.max_total_tokens = kv_tokens(
                self.gpu, self.model, self.tensor_parallel, fraction, weights
            )


@cache
def modelled_gpu() -> ModelledGpu | None:
    """Return the GPU whose time this process's engine takes; ``None`` without one.

    Raises: ValueError if the GPU, the model or its times are unknown.
    """
    options = DeviceOptions.from_environment()
    if not options.device:
        return None
    if not options.device_model:
        raise ValueError("--flashmoa-device needs --flashmoa-device-model, such as Qwen/Qwen3-32B.")
    model = Model.load(options.device_model, options.device_weights)
    gpu = Gpu.load(options.device)
    times: Roofline | MeasuredTables
    if options.device_times == "roofline" or options.device.endswith(".json"):
        times = Roofline(gpu, model, options.device_tp)
    else:
        times = MeasuredTables(gpu.name, model.name, options.device_tp, model.weights)
    return ModelledGpu(gpu, model, options.device_tp, times, options.device_slowdown)
