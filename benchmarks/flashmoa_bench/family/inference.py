"""A model of the family asked through transformers, many prompts at a time."""

# torch and transformers do not tell all of their types.
# pyright: basic

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ROWS = 256
_LONGEST = 64
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and its confidence: exp of the mean log-probability of its tokens."""

    text: str
    confidence: float


class FamilyModel:
    """``folder``: a model of the family. Computes in bfloat16, as an engine does."""

    def __init__(self, folder: Path) -> None:
        from flashmoa_sglang.cpu import torchvision_ops

        torchvision_ops.allow_mismatched_build()
        from transformers import AutoTokenizer, Qwen3ForCausalLM

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def say(
        self,
        asked: Sequence[Messages],
        temperature: float = 0.0,
        begun: Sequence[str] | None = None,
        longest: int = _LONGEST,
    ) -> list[Reply]:
        """Answer each prompt: greedily at temperature 0, else drawn with torch's random numbers.

        ``begun``: what has been written of each answer already; what comes then is given.
        ``longest``: the most tokens that are written now.
        """
        if not asked:
            return []
        prompts = self.tokenizer.apply_chat_template(
            list(asked), tokenize=False, add_generation_prompt=True
        )
        if begun is not None:
            prompts = [prompt + text for prompt, text in zip(prompts, begun, strict=True)]
        # Prompts of like length together, so that little is padded.
        order = sorted(range(len(asked)), key=lambda at: len(prompts[at]))
        replies = dict[int, Reply]()
        for at in range(0, len(order), _ROWS):
            rows = order[at : at + _ROWS]
            texts = [prompts[row] for row in rows]
            replies |= zip(rows, self._say(texts, temperature, longest), strict=True)
        return [replies[at] for at in range(len(asked))]

    @torch.inference_mode()
    def _say(self, prompts: list[str], temperature: float, longest: int) -> list[Reply]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = self._model.generate(
            **inputs,
            max_new_tokens=longest,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            **(drawn if temperature else {"do_sample": False}),
        )
        tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
        scores = torch.stack(out.logits, 1).float().log_softmax(-1)
        scores = scores.gather(-1, tokens[..., None])[..., 0]
        written = tokens != self.tokenizer.pad_token_id
        means = (scores * written).sum(1) / written.sum(1)
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        pairs = zip(texts, means.exp().tolist(), strict=True)
        return [Reply(text, confidence) for text, confidence in pairs]
