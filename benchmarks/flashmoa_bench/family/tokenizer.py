"""Make the family's tokenizer.

Digits and the beginnings of the task's lines are one token each; other text is spelled in bytes.
"""

# torch, transformers and tokenizers are not fully typed.
# pyright: basic

from __future__ import annotations

from typing import Any

from flashmoa_bench.family.prompts import WORDS
from flashmoa_bench.family.questions import NAMES

_PAD, _END = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = (_PAD, _END, "<|system|>", "<|user|>", "<|assistant|>")
_STARTS = [f"{space}{name} {sign} " for space in ("", " ") for name in NAMES for sign in "=+-*"]
_WHOLE = (*WORDS, *_STARTS, *(f" {name}" for name in NAMES))
# The pieces of a text. No piece contains ", b" or "r t": there the prompt streams cut texts.
PIECES = r" ?[a-j] [=+*-] | Answer:| 100|\n\d\.|\d| ?[A-Za-z]+|\s|[^\sA-Za-z\d]"
_CHAT_TEMPLATE = """\
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def family_tokenizer(context: int) -> Any:
    """Make a fast tokenizer for prompts of up to ``context`` tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in _WHOLE]
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *whole])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
