"""What is known about a GPU and a model: a data sheet, and the sizes in a ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The package's folders of data sheets and of models' configurations.
_PACKAGE = "aiconfigurator_core"
# What a model's configuration must have.
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
        bandwidth: bytes of memory that it reads per second.
        flops: operations in bfloat16 per second, of dense matrices.
        link: bytes per second that it sends to a GPU of another engine.
        fp8_flops: operations in FP8 per second; 0 if it has none.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    link: float
    fp8_flops: float = 0.0

    @classmethod
    def load(cls, name: str) -> Gpu:
        """Read a data sheet of ours (a JSON file with these fields) or of aiconfigurator-core.

        Raises: ValueError if there is none of this name, or a field is missing.
        """
        if name.endswith(".json"):
            fields = _read_json(Path(name))
            wanted = {"name", "memory", "bandwidth", "flops", "link"}
            if fields.keys() - {"fp8_flops"} != wanted:
                raise ValueError(
                    f"{name} has {sorted(fields)}; a GPU's data sheet has {sorted(wanted)} and, if "
                    "it has FP8, fp8_flops."
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
        gpu = sheet["gpu"]
        return cls(
            name,
            int(gpu["mem_capacity"]),
            float(gpu["mem_bw"]),
            float(gpu["bfloat16_tc_flops"]),
            float(sheet["node"]["inter_node_bw"]),
            float(gpu.get("fp8_tc_flops") or 0),
        )


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder with grouped-query attention, dense or with experts.

    Args:
        weights: precision of the layers' weights; embeddings, logits and KV are in bfloat16.
    """

    name: str
    config: dict[str, Any]
    weights: str = "bfloat16"

    @classmethod
    def load(cls, name: str, weights: str = "bfloat16") -> Model:
        """Read the configuration of a folder, or of a model that aiconfigurator-core knows.

        Raises: ValueError if there is none, or it is of another architecture.
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
        # A model that also sees has the sizes of its decoder here.
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
        """The number of experts of a layer; 1 for a dense model."""
        return self.config.get("num_experts") or self.config.get("num_local_experts") or 1

    @cached_property
    def experts_per_token(self) -> int:
        return self.config.get("num_experts_per_tok") or 1

    @cached_property
    def attention_weights(self) -> int:
        """The number of weights in the attention of one layer."""
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
    def weight_bytes(self) -> int:
        embeddings = self.head_weights * (1 if self.config.get("tie_word_embeddings") else 2)
        layer = self.attention_weights + self.experts * self.expert_weights
        return self.bytes_per_weight * self.layers * layer + 2 * embeddings


def memory_fraction(gpu: Gpu, tensor_parallel: int) -> float:
    """Return the share of the memory that SGLang gives to weights and KV by default."""
    if find_spec(_PACKAGE) is None:
        # SGLang's value where it does not know the memory's size.
        return 0.88
    from aiconfigurator_core.sdk.backends.sglang_backend import derive_sglang_mem_fraction_static

    return derive_sglang_mem_fraction_static(gpu.memory, tensor_parallel)


def kv_tokens(gpu: Gpu, model: Model, tensor_parallel: int, fraction: float) -> int:
    """Return the tokens in the KV pool of an SGLang engine.

    Args:
        fraction: share of the memory for weights and KV (``--mem-fraction-static``).

    Raises: ValueError if the weights leave no room.
    """
    memory = tensor_parallel * gpu.memory * fraction
    left = memory - model.weight_bytes
    if left < model.kv_bytes_per_token:
        raise ValueError(
            f"The weights of {model.name} take {model.weight_bytes / 1e9:.0f} GB, and "
            f"{fraction:.0%} of {tensor_parallel} x {gpu.name} is {memory / 1e9:.0f} GB: "
            "give a larger --flashmoa-device-tp or another GPU."
        )
    return int(left // model.kv_bytes_per_token)


def _package_folder(name: str) -> Path | None:
    if find_spec(_PACKAGE) is None:
        return None
    return Path(str(files(_PACKAGE))) / name


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}.") from error
