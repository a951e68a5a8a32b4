"""Builds a small Qwen3 with random weights and its own tokenizer, in seconds, without a model hub.

``python -m flashmoa_cpu.tiny_model --out DIR --text FILE...`` trains a byte-level BPE tokenizer
on the given texts and writes a model that SGLang serves on a CPU. The architecture, the tokenizer
and the chat template with tools are real, and the seed is fixed; the answers are noise.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashmoa_sglang.sglang import torchvision_ops

from flashmoa_cpu.whole_folder import whole_folder

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
You may call a function by answering with <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif not (message.role == 'system' and loop.first) %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a tiny model.

    ``labels``: number of scores for a prompt, in place of a next token; 0: it generates text.
    """

    layers: int = 6
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 4096
    context: int = 32768
    experts: int = 0
    labels: int = 0


_GENERATORS = {
    "test": Shape(layers=2, hidden=128, intermediate=384, heads=4, kv_heads=2),
    "small": Shape(layers=4, hidden=384, intermediate=1024, heads=6, kv_heads=3),
    "large": Shape(),
    "bench": Shape(layers=8),
    "moe": Shape(layers=2, hidden=128, intermediate=384, heads=4, kv_heads=2, experts=8),
    "experts": Shape(hidden=256, intermediate=1024, heads=4, kv_heads=2, experts=16, layers=8),
}
SHAPES = _GENERATORS | {
    f"{name}_cross_encoder": replace(shape, labels=1)
    for name, shape in _GENERATORS.items()
    if not shape.experts
}


def train_tokenizer(texts: list[Path], vocabulary: int, context: int) -> Any:
    """Train a byte-level BPE tokenizer on ``texts`` and return it as a fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def build(out: Path, texts: list[Path], shape: Shape, seed: int = 0) -> None:
    """Write tokenizer, configuration and weights to the folder ``out``, if it is still missing."""
    torchvision_ops.allow_mismatched_build()
    import torch
    from transformers import (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    tokenizer = train_tokenizer(texts, shape.vocabulary, shape.context)
    common: dict[str, Any] = {
        # A fixed size, so that models trained on other texts share weights and shapes.
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.context,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    if shape.experts:
        config = Qwen3MoeConfig(
            **common,
            num_experts=shape.experts,
            num_experts_per_tok=2,
            moe_intermediate_size=shape.intermediate // 2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
        model: Any = Qwen3MoeForCausalLM(config)
    elif shape.labels:
        config = Qwen3Config(**common)
        config.num_labels = shape.labels
        model = Qwen3ForSequenceClassification(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    if not shape.labels:
        silence_unprintable(model.lm_head.weight, tokenizer)
    with whole_folder(out) as folder:
        model.to(torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # Generation defaults come from this file; an empty one keeps SGLang's own.
        (folder / "generation_config.json").write_text(json.dumps({}))


def silence_unprintable(head: Any, tokenizer: Any) -> None:
    """Zero the rows of tokens that are not words, so that greedy output consists of words.

    Such output is streamed and tokenised again like real text; with a random head it would contain
    parts of characters, which a detokenizer delays. A zero row gives a logit of zero, and among
    thousands of random logits there is always a larger one.
    """
    import torch

    is_word = torch.zeros(head.shape[0], 1)
    for token in range(len(tokenizer)):
        if re.fullmatch(r" [A-Za-z]+", tokenizer.decode([token])):
            is_word[token] = 1
    with torch.no_grad():
        head.mul_(is_word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out.exists():
        print(f"{arguments.out} exists, nothing to do")
        return
    build(arguments.out, arguments.text, SHAPES[arguments.shape], arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
