"""Train the family: three Qwen3 models that answer and combine answers.

``python -m flashmoa_bench.family.train --out DIR`` writes a folder for each size that SGLang and
transformers load. The smallest model learns first, and the larger ones start with what it has
learned (see ``net2net``). The same seed gives the same examples. A run that was stopped continues
from its last checkpoint.
"""

# torch, transformers and tokenizers are not fully typed.
# pyright: basic

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from flashmoa_bench.family.net2net import widen
from flashmoa_bench.family.network import CONTEXT, SHAPES, Network, configuration
from flashmoa_bench.family.stages import STAGES
from flashmoa_bench.family.tokenizer import family_tokenizer
from flashmoa_bench.family.training_data import Example

# Steps between two checkpoints, and between two lines about the progress.
_SAVE_STEPS = 10
_PRINT_STEPS = 10
# Target of a token that is not learned.
_IGNORED = -100
# Muon's learning rate over AdamW's.
_MUON_FACTOR = 5.0
# The examples of a step are sorted by length and go through the network in parts of at most this
# many tokens, so that they stay in the processor's cache.
_PART_TOKENS = 5000
# The token ids of a prompt and of its answer.
EncodedExample = tuple[list[int], list[int]]


class Training:
    """Trains the network of one stage.

    Args:
        name: key of ``STAGES``.
        folder: folder of all stages' checkpoints.
    """

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        self.name, self.seed, self.folder = name, seed, folder
        self.stage = STAGES[name]
        self.shape = SHAPES[self.stage.size]
        self.tokenizer = family_tokenizer(CONTEXT)
        self.network = Network(self.shape, len(self.tokenizer))
        if self.stage.starts_from:
            self._start_from(*self.stage.starts_from)
        inner = [weight for weight in self.network.model.layers.parameters() if weight.dim() == 2]
        rest = [w for w in self.network.parameters() if not any(w is other for other in inner)]
        # Muon learns such a task in far fewer steps than AdamW, which is left with the vectors.
        self.optimizers = [
            torch.optim.Muon(inner, lr=self.stage.rate, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=self.stage.rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.spent = {"step": 0, "tokens": 0, "wall_seconds": 0.0, "cpu_seconds": 0.0}
        if self._checkpoint().exists():
            saved: dict[str, Any] = torch.load(self._checkpoint())
            self.network.load_state_dict(saved["network"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.spent = saved["spent"]

    def _checkpoint(self, step: int | None = None) -> Path:
        """Return the file of the latest checkpoint, or of a step that another stage starts from."""
        return self.folder / f"{self.name}{'' if step is None else f'-{step}'}.checkpoint"

    def _start_from(self, name: str, step: int) -> None:
        file = self.folder / f"{name}-{step}.checkpoint"
        if not file.exists():
            raise SystemExit(f"{self.name} starts from {file}: train {name} first")
        saved: dict[str, Any] = torch.load(file)
        smaller = Network(SHAPES[STAGES[name].size], len(self.tokenizer))
        smaller.load_state_dict(saved["network"])
        widen(smaller, self.network)

    def run(self, console: Console) -> None:
        """Train until the stage's last step, with checkpoints."""
        while self.spent["step"] < self.stage.steps:
            before = time.perf_counter(), time.process_time()
            loss, tokens = self._step(int(self.spent["step"]))
            self.spent["step"] += 1
            self.spent["tokens"] += tokens
            self.spent["wall_seconds"] += time.perf_counter() - before[0]
            self.spent["cpu_seconds"] += time.process_time() - before[1]
            if self.spent["step"] % _PRINT_STEPS == 0:
                console.print(self._progress(loss))
            if self.spent["step"] % _SAVE_STEPS == 0:
                self._save_checkpoint()
        self._save_checkpoint()

    def _step(self, step: int) -> tuple[float, int]:
        """Learn the examples of one step; return the loss and the number of tokens with padding."""
        rate = self.stage.rate_at(step)
        muon, adam = self.optimizers
        muon.param_groups[0]["lr"] = rate * _MUON_FACTOR
        adam.param_groups[0]["lr"] = rate
        rows = encode_examples(self.tokenizer, self.stage.examples_at(self.seed, step))
        answer_tokens = sum(len(answer) for _, answer in rows)
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        total, tokens = 0.0, 0
        for part in split_rows(rows):
            inputs, targets = pad_rows(part)
            is_learned = targets != _IGNORED
            logits = self.network.logits(self.network(inputs)[is_learned])
            loss = F.cross_entropy(logits, targets[is_learned], reduction="sum") / answer_tokens
            loss.backward()
            total, tokens = total + loss.item(), tokens + inputs.numel()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, tokens

    def _progress(self, loss: float) -> str:
        spent = self.spent
        return (
            f"{self.name}: step {spent['step']} of {self.stage.steps}, loss {loss:.4f}, "
            f"{spent['wall_seconds']:.0f} s, {spent['cpu_seconds']:.0f} s of CPU, "
            f"{spent['tokens'] / max(spent['cpu_seconds'], 1e-9):.0f} tokens per CPU second"
        )

    def _save_checkpoint(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "spent": self.spent,
        }
        starting_points = [stage.starts_from for stage in STAGES.values()]
        step = int(self.spent["step"])
        files = [self._checkpoint(step)] if (self.name, step) in starting_points else []
        for file in (*files, self._checkpoint()):
            scratch = file.with_suffix(".partial")
            torch.save(state, scratch)
            scratch.replace(file)

    def write(self, out: Path) -> None:
        """Write the folder that engines load: weights in bfloat16, tokenizer, and training.json."""
        from safetensors.torch import save_file

        out.mkdir(parents=True, exist_ok=True)
        weights = {
            parameter: weight.detach().bfloat16().contiguous()
            for parameter, weight in self.network.named_parameters()
        }
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        configuration(self.shape, self.tokenizer).save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        # SGLang takes defaults of sampling from this file; an empty one keeps SGLang's own.
        (out / "generation_config.json").write_text("{}\n")
        (out / "training.json").write_text(json.dumps(self._provenance(), indent=2) + "\n")

    def _provenance(self) -> dict[str, Any]:
        """Return how the model was made."""
        return {
            "command": "python -m flashmoa_bench.family.train --out DIR",
            "seed": self.seed,
            "parameters": sum(weight.numel() for weight in self.network.parameters()),
            "shape": asdict(self.shape),
            "stages": self._stages(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }

    def _stages(self) -> dict[str, Any]:
        """Return the stages that this model went through, the last one first, and their cost."""
        stages, name, spent = dict[str, Any](), self.name, self.spent
        while True:
            stage = STAGES[name]
            rounded = {key: round(value) for key, value in spent.items()}
            stages[name] = {**asdict(stage), "spent": rounded}
            if stage.starts_from is None:
                return stages
            name, step = stage.starts_from
            spent = torch.load(self.folder / f"{name}-{step}.checkpoint")["spent"]


def encode_examples(tokenizer: Any, examples: Sequence[Example]) -> list[EncodedExample]:
    """Return the token ids of each example's prompt, and of its answer with the end token."""
    prompts = [
        "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in example.messages)
        + f"<|assistant|>{example.beginning}"
        for example in examples
    ]
    answers = [example.answer + tokenizer.eos_token for example in examples]
    return list(zip(tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"], strict=True))


def split_rows(rows: Sequence[EncodedExample]) -> Iterator[list[EncodedExample]]:
    """Split rows sorted by length into parts of at most ``_PART_TOKENS`` tokens, with padding."""
    part = list[EncodedExample]()
    for row in rows:
        if part and (len(part) + 1) * (len(row[0]) + len(row[1])) > _PART_TOKENS:
            yield part
            part = []
        part.append(row)
    yield part


def pad_rows(rows: Sequence[EncodedExample]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of shape (rows, longest row); only answers' tokens are learned."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    inputs = torch.zeros(len(rows), longest, dtype=torch.long)
    targets = torch.full((len(rows), longest), _IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        text = torch.tensor(prompt + answer)
        inputs[row, : len(text) - 1] = text[:-1]
        targets[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
    return inputs, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=list(STAGES), action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.stage or STAGES:
        training = Training(name, arguments.seed, arguments.out)
        training.run(console)
        training.write(arguments.out / training.stage.size)
        console.print(f"{name}: wrote {arguments.out / training.stage.size}")


if __name__ == "__main__":
    main()
