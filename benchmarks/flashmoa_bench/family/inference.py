"""Ask models of the family through transformers, many prompts at a time."""

# torch and transformers are not fully typed.
# pyright: basic

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoa.moa.settings import CHARACTERS_PER_TOKEN, Order, Schedule
from flashmoa_bench.family.prompts import AGGREGATION, staircase_prompt
from flashmoa_bench.family.questions import Question

# Prompts of one batch.
_ROWS = 256
MAX_TOKENS = 64
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its confidence: exp of the mean log-probability of its tokens."""

    text: str
    confidence: float


class FamilyModel:
    """Answers prompts with a model of the family; it computes in bfloat16, as an engine does.

    Args:
        folder: folder of the model.
    """

    def __init__(self, folder: Path) -> None:
        from flashmoa_sglang.cpu import torchvision_ops

        torchvision_ops.allow_mismatched_build()
        from transformers import AutoTokenizer, Qwen3ForCausalLM

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(
        self,
        prompts: Sequence[Messages],
        temperature: float = 0.0,
        beginnings: Sequence[str] | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> list[Reply]:
        """Answer each prompt, greedily at temperature 0, else with torch's random numbers.

        Args:
            beginnings: text with which each answer begins; the reply is the text after it.
            max_tokens: most tokens of a reply.
        """
        if not prompts:
            return []
        texts: list[str] = self.tokenizer.apply_chat_template(
            list(prompts), tokenize=False, add_generation_prompt=True
        )
        if beginnings is not None:
            texts = [text + beginning for text, beginning in zip(texts, beginnings, strict=True)]
        # Prompts of similar length are batched, so that little is padded.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        replies = dict[int, Reply]()
        for start in range(0, len(order), _ROWS):
            rows = order[start : start + _ROWS]
            batch = self._answer_batch([texts[row] for row in rows], temperature, max_tokens)
            replies |= zip(rows, batch, strict=True)
        return [replies[row] for row in range(len(texts))]

    @torch.inference_mode()
    def _answer_batch(self, texts: list[str], temperature: float, max_tokens: int) -> list[Reply]:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = self._model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            **(sampling if temperature else {"do_sample": False}),
        )
        tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
        scores = torch.stack(out.logits, 1).float().log_softmax(-1)
        scores = scores.gather(-1, tokens[..., None])[..., 0]
        is_token = tokens != self.tokenizer.pad_token_id
        means = (scores * is_token).sum(1) / is_token.sum(1)
        answers = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        pairs = zip(answers, means.exp().tolist(), strict=True)
        return [Reply(text, confidence) for text, confidence in pairs]


@dataclass(slots=True)
class _StaircaseReply:
    """An aggregator's reply, as far as it is written."""

    question: Question
    answers: Sequence[str]
    text: str = ""

    @property
    def longest_answer(self) -> int:
        return max(map(len, self.answers))


def staircase_answers(
    model: FamilyModel,
    asked: Sequence[Question],
    answers: Sequence[Sequence[str]],
    order: Order,
    first: int = 8,
) -> list[str]:
    """Return an aggregator's replies, written along with answers in rounds like ``Staircase``'s.

    Args:
        first: size of the first chunk, in tokens of ``CHARACTERS_PER_TOKEN``.
    """
    replies = [_StaircaseReply(*pair) for pair in zip(asked, answers, strict=True)]
    sizes: list[int] = []
    for size in Schedule(first):
        # The number of characters of each answer in the prompts of the rounds before, and of this.
        before = sum(sizes) * CHARACTERS_PER_TOKEN
        sizes.append(size)
        now = sum(sizes) * CHARACTERS_PER_TOKEN
        unfinished = [reply for reply in replies if reply.longest_answer > before]
        if not unfinished:
            break
        for is_last in (False, True):
            rows = [reply for reply in unfinished if (reply.longest_answer <= now) == is_last]
            max_tokens = MAX_TOKENS if is_last else size
            _write_round(model, rows, order, sizes, max_tokens)
    return [reply.text for reply in replies]


def _write_round(
    model: FamilyModel,
    rows: Sequence[_StaircaseReply],
    order: Order,
    sizes: Sequence[int],
    max_tokens: int,
) -> None:
    """Write a piece of each reply, from chunks of these sizes."""
    prompt = AGGREGATION["question-first"]
    prompts = [
        staircase_prompt(order, prompt, row.question.text, row.answers, sizes) for row in rows
    ]
    pieces = model.answer(prompts, 0.0, [row.text for row in rows], max_tokens)
    for row, piece in zip(rows, pieces, strict=True):
        row.text += piece.text
