"""Write tiny models and LoRA adapters for the engine tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def build_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write a LoRA adapter of rank 4 for the attention of a tiny model, in PEFT's format."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    # SGLang computes q, k and v together, and an adapter must have all three.
    heads = {"q": config["num_attention_heads"]} | dict.fromkeys(
        "kv", config["num_key_value_heads"]
    )
    dice = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for part, count in heads.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.lora_A.weight"] = torch.randn(4, hidden, generator=dice)
            weights[f"{name}.lora_B.weight"] = torch.randn(count * head, 4, generator=dice)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return folder


def build_sliding_window_model(folder: Path, model: Path, *, hybrid: bool) -> Path:
    """Write a Gemma 3 with random weights whose every other layer sees the last 64 tokens only.

    Args:
        model: a tiny model, whose tokenizer it gets.
        hybrid: whether SGLang is told to keep the windows' KV in a pool of its own.
    """
    from flashmoa_sglang.sglang import torchvision_ops

    torchvision_ops.allow_mismatched_build()
    from flashmoa_cpu.tiny_model import silence_unprintable
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    base = json.loads((model / "config.json").read_text())
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
        "num_key_value_heads", "max_position_embeddings", "eos_token_id", "bos_token_id",
    )  # fmt: skip
    config = Gemma3TextConfig(
        **{name: base[name] for name in names},
        pad_token_id=base["bos_token_id"],
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **({"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0]} if hybrid else {}),
    )
    torch.manual_seed(0)
    gemma: Any = Gemma3ForCausalLM(config)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    # Gemma's head is its embedding, which it scales up. The layers would hardly count beside that.
    gemma.lm_head.weight.data.div_(config.hidden_size)
    silence_unprintable(gemma.lm_head.weight, tokenizer)
    gemma.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text("{}")
    return folder
