"""Compute how fast other ways to divide a mixture of experts prefill, from NVIDIA's tables.

Nothing runs: a time is a sum of operations that were measured one by one. Every way's known error
is in ``KNOWN_ERRORS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from flashmoa_bench.modelled_gpu.expert_parallelism import Division, layer_traffic
from flashmoa_bench.modelled_gpu.gpu import (
    Forward,
    Gpu,
    MeasuredTables,
    Model,
    Prefills,
    comm_table,
)

DEEP_EP, SHORT_PP, IDEAL_PP = "DP+EP, DeepEP", "PP, chunks of 8,192", "PP, no bubbles"
_SHORT_CHUNK = 8192
PIPELINES = (Division.PP, SHORT_PP, IDEAL_PP)
# The assumed tokens of the busiest GPU over the mean; the package's tables have 1.8 to 2.1.
_DEEP_EP_IMBALANCE = 1.3
KNOWN_ERRORS = {
    "all": "Rows for experts and attention end at 16,384 tokens, and grow in proportion beyond. "
    "SGLang's and vLLM's tables differ: for experts in BF16 on an H100 twofold (--tables).",
    "AsyncEP": "Copies take no bandwidth of the GPU's memory from the computation. They reach "
    "the same share (0.8) of PCIe's and NVLink's bandwidth as the data sheet gives for memory. "
    "No limit of host memory: eight GPUs copy from it at once.",
    Division.DP_EP: "All-gather and reduce-scatter. Of the experts' tokens, the busiest of eight "
    "GPUs has 1.8 to 2.1 times the mean, more than a server that balances them. The tables of "
    "SGLang on A100 are defective (too slow): compare with --tables vllm.",
    DEEP_EP: f"An assumed imbalance of {_DEEP_EP_IMBALANCE} between GPUs. Measured on H100 and "
    "H200 and on eight GPUs only; nothing overlaps.",
    Division.DP_TP: "Experts' matrices are narrow: FP8 in blocks cannot be divided by eight.",
    Division.TP_TP: "As DP+TP. A forward's tokens are of all GPUs together.",
    Division.TP_EP: "The imbalance of DP+EP. A forward's tokens are of all GPUs together.",
    Division.PP: "As many chunks in flight as stages, all of equal tokens. With more of them "
    "(SGLang: --pp-async-batch-depth) or chunks of equal time (--enable-dynamic-chunking) there "
    "are fewer bubbles.",
    SHORT_PP: "As PP. SGLang chooses such chunks on these GPUs; longer ones are an option.",
    IDEAL_PP: "A bound: every stage always computes.",
}


def forwards(prompt: int, tokens: int) -> list[Forward]:
    """Return the forwards of prompts of equal length.

    Either a forward has several prompts, as many as fit, or a prompt is computed in several
    forwards.

    Args: tokens: most tokens in a forward.
    """
    if prompt <= tokens:
        count = tokens // prompt
        return [Forward(Prefills(count, count * prompt))]
    cached = range(0, prompt, tokens)
    return [Forward(Prefills(1, min(tokens, prompt - begin), begin)) for begin in cached]


def tokens_of(each: Sequence[Forward]) -> int:
    """Return the number of tokens that forwards prefill."""
    return sum(forward.prefills.tokens for forward in each)


def makespan(stage_seconds: Sequence[float], stages: int) -> float:
    """Return when a pipeline has computed chunks, with as many chunks in flight as stages.

    Args: stage_seconds: by chunk, the seconds that each stage computes.
    """
    free_at = [0.0] * stages
    left: list[float] = []
    for chunk, seconds in enumerate(stage_seconds):
        at = left[chunk - stages] if chunk >= stages else 0.0
        for stage in range(stages):
            at = free_at[stage] = max(at, free_at[stage]) + seconds
        left.append(at)
    return left[-1]


class Rivals:
    """Times of a model's prefills on several GPUs of one machine.

    Args: tables: ``sglang`` or ``vllm``.

    Raises: ValueError if the package has no tables for this GPU and model.
    """

    def __init__(self, gpu: Gpu, model: Model, tables: str = "sglang") -> None:
        self._gpu, self._model, self._tables = gpu, model, tables
        self.alone = MeasuredTables(gpu.name, model.name, 1, model.weights, tables)

    def rate(self, way: str, gpus: int, prompt: int, tokens: int) -> float | None:
        """Return tokens per second and GPU; ``None`` where the package has no table.

        ``SHORT_PP`` has a single number of tokens.

        Args: tokens: number of tokens in a forward: with TP of all GPUs, otherwise of each.
        """
        if way == SHORT_PP and tokens != _SHORT_CHUNK:
            return None
        if way in PIPELINES:
            return self._pipelined(prompt, tokens, gpus, bubbles=way != IDEAL_PP)
        each = forwards(prompt, tokens)
        if way == DEEP_EP:
            sent = self._deep_ep_seconds(tokens) if gpus == 8 else None
            if sent is None:
                return None
            seconds = sum(
                self.alone.seconds(forward)
                + (_DEEP_EP_IMBALANCE - 1) * self.alone.expert_seconds(forward)
                + self._model.layers * sent
                for forward in each
            )
            return tokens_of(each) / seconds
        divided = self._divided(Division(way), gpus)
        if divided is None:
            return None
        together = gpus if way in (Division.TP_TP, Division.TP_EP) else 1
        return tokens_of(each) / sum(map(divided.seconds, each)) / together

    @lru_cache(maxsize=64)  # noqa: B019 - there is one object for each run
    def _divided(self, way: Division, gpus: int) -> MeasuredTables | None:
        attention = gpus if way in (Division.TP_TP, Division.TP_EP) else 1
        experts = "moe_ep_size" if way in (Division.DP_EP, Division.TP_EP) else "moe_tp_size"
        division = {experts: gpus, "attention_dp_size": gpus // attention}
        gpu, model = self._gpu.name, self._model
        try:
            return MeasuredTables(
                gpu, model.name, attention, model.weights, self._tables, **division
            )
        except ValueError:
            return None

    def _pipelined(self, prompt: int, tokens: int, gpus: int, *, bubbles: bool) -> float:
        each = forwards(prompt, tokens)
        # The largest stage counts.
        stage = -(-self._model.layers // gpus) / self._model.layers
        state = layer_traffic(Division.PP, self._model, gpus, tokens).peers * self._model.layers
        hop = state / 2 / gpus / (self._gpu.nvlink * self._gpu.copy_efficiency)
        # The beginning and the end of a run do not count.
        runs = max(1, 512 // len(each))
        chunks = [self.alone.seconds(forward) * stage + hop for forward in each] * runs
        seconds = makespan(chunks, gpus) if bubbles else sum(chunks)
        return tokens_of(each) * runs / seconds / gpus

    def _deep_ep_seconds(self, tokens: int) -> float | None:
        """Return the seconds to send a layer's tokens to their experts and back."""
        rows = [row for row in self._deep_ep if row[0] <= tokens]
        if not rows:
            return None
        measured, seconds = max(rows)
        return seconds * tokens / measured

    @cached_property
    def _deep_ep(self) -> list[tuple[int, float]]:
        """Measured pairs of tokens and seconds, with SGLang's number of multiprocessors."""
        config = self._model.config
        wanted = {
            "hidden_size": config["hidden_size"],
            "num_experts": self._model.experts,
            "num_topk": self._model.experts_per_token,
            "node_num": 1,
            "dispatch_sms": 20,
            "combine_sms": 20,
        }
        rows = comm_table(self._gpu.name, "wideep_deepep_normal_perf")
        return [
            (row["num_token"], (row["dispatch_transmit_us"] + row["combine_transmit_us"]) / 1e6)
            for row in rows
            if all(row[name] == value for name, value in wanted.items())
        ]
