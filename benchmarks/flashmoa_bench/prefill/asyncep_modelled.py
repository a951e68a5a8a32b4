"""Compute AsyncEP and its rivals on a modelled GPU (``flashmoa bench asyncep --device``).

AsyncEP's rows come from the plugin's real offloader and saturation gate in modelled time. The
rivals are sums of measured operations. No engine runs.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from flashmoa_sglang.moe.saturation import MARGIN, find_saturation

from flashmoa.errors import EngineError
from flashmoa.router.flops import true_flops
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.modelled_gpu.expert_parallelism import Division, weight_bytes
from flashmoa_bench.modelled_gpu.gpu import Forward, Gpu, LayerSeconds, Model, Prefills
from flashmoa_bench.prefill.offloaded import OffloadedModel, offloaded
from flashmoa_bench.prefill.rivals import (
    DEEP_EP,
    IDEAL_PP,
    KNOWN_ERRORS,
    PIPELINES,
    SHORT_PP,
    Rivals,
    forwards,
    tokens_of,
)

ASYNCEP = (Division.H2D, Division.HYBRID, Division.D2D)
RIVALS = (
    Division.DP_EP, DEEP_EP, Division.DP_TP, Division.TP_TP, Division.TP_EP, *PIPELINES,
)  # fmt: skip
TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
# Shorter forwards are no way's best.
COMPARED = TOKENS[2:]
CONTEXTS = (1024, 4096, 8192, 32_768, 131_072)
GPUS = (1, 2, 4, 8)
# The sizes of prefills that an engine times at its start.
_CALIBRATED = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
# For CUDA, and for logits.
_OTHER_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """One size of forwards with AsyncEP.

    Attributes:
        computing: seconds with all experts on the device.
        exposed: seconds that copies add.
        tokens_per_second, mfu: of one GPU.
    """

    tokens: Annotated[int, Column("tokens", "{:,}")]
    way: Annotated[str, Column("way")]
    computing: Annotated[float, Column("computing", "{:,.1f} ms", 1000)]
    seconds: Annotated[float, Column("forward", "{:,.1f} ms", 1000)]
    exposed: Annotated[float, Column("exposed", "{:,.1f} ms", 1000)]
    tokens_per_second: Annotated[float, Column("tokens/s a GPU", "{:,.0f}")]
    mfu: Annotated[float, Column("MFU", "{:.1%}")]


@dataclass(frozen=True, slots=True)
class Crossing:
    """From how many tokens on a forward hides its copies.

    Attributes:
        transfer: seconds of the slowest copy of a layer's experts.
        hidden_from: tokens of the shortest forward without exposed copies.
        gate: tokens that prefills wait for, as an engine finds them at its start (with the margin).
        gate_measured: the same rule, if the engine measured up to the longest forward.
        at_peak: the paper's Eq. (1), which takes the GPU's peak FLOP/s for the computation's.
    """

    way: Annotated[str, Column("way")]
    transfer: Annotated[float, Column("copies a layer", "{:,.1f} ms", 1000)]
    hidden_from: Annotated[int | None, Column("hidden from", "{:,}")]
    gate: Annotated[int | None, Column("gate", "{:,}")]
    gate_measured: Annotated[int | None, Column("gate, all sizes", "{:,}")]
    at_peak: Annotated[float, Column("Eq. (1)", "{:,.0f}")]


@dataclass(frozen=True, slots=True)
class Throughput:
    """The best throughput of a way, over the sizes of forwards that fit.

    Attributes:
        weights: bytes of weights on a GPU.
        tokens: number of tokens in the best forward; ``None``: no forward fits, or no table.
        tokens_per_second, mfu: of one GPU.
    """

    context: Annotated[int, Column("context", "{:,}")]
    gpus: Annotated[int, Column("GPUs")]
    way: Annotated[str, Column("way")]
    weights: Annotated[float, Column("weights", "{:,.1f} GB", 1e-9)]
    tokens: Annotated[int | None, Column("forward", "{:,}")]
    tokens_per_second: Annotated[float | None, Column("tokens/s a GPU", "{:,.0f}")]
    mfu: Annotated[float | None, Column("MFU", "{:.1%}")]


@dataclass(frozen=True, slots=True)
class Gain:
    """The throughput of AsyncEP over others, each with its best forwards.

    Attributes:
        gain: over the best rival.
        over_short, over_bound: over pipelines with short chunks, and without bubbles; ``None``
            if none fit.
    """

    context: Annotated[int, Column("context", "{:,}")]
    gpus: Annotated[int, Column("GPUs")]
    way: Annotated[str, Column("AsyncEP")]
    rival: Annotated[str, Column("best rival")]
    gain: Annotated[float, Column("over it", "{:.2f}")]
    over_short: Annotated[float | None, Column(f"over {SHORT_PP}", "{:.2f}")]
    over_bound: Annotated[float | None, Column(f"over {IDEAL_PP}", "{:.2f}")]


def check(options: argparse.Namespace) -> str | None:
    """Return why these options do not go with ``--device``; ``None`` if they do."""
    if options.device_tp != 1 or options.device_slowdown != 1:
        return "--device computes 1 to 8 GPUs: leave --device-tp and --device-slowdown out"
    if len(options.device_model) != 1 or "=" in options.device_model[0]:
        return "--device computes one model: give one --device-model, as Qwen/Qwen3-30B-A3B"
    if options.device.endswith(".json"):
        return "--device needs a GPU in NVIDIA's tables, as h100_sxm: rivals have no other times"
    return None


async def compute(report: Report) -> None:
    """Compute all tables, print and save them.

    Raises: EngineError if the GPU, the model or its times are unknown.
    """
    options = report.options
    report.print_head()
    # Replicas warn while they wait for one another.
    logging.getLogger("flashmoa_sglang").setLevel(logging.ERROR)
    with ExitStack() as stack:
        try:
            model = Model.load(options.device_model[0], options.device_weights)
            if model.experts == 1:
                raise ValueError(
                    f"{model.name} has no experts: give --device-model Qwen/Qwen3-30B-A3B"
                )
            node = Node(Gpu.load(options.device), model, options.tables, stack)
        except ValueError as error:
            raise EngineError(str(error)) from error
        sizes: Sequence[int] = options.tokens or TOKENS
        times = list(node.forward_times(options.prompt, sizes))
        crossings = [node.crossing(way, options.prompt) for way in ASYNCEP]
        degrees = [row for gpus in GPUS for row in node.compare(options.prompt, gpus)]
        contexts = [row for context in CONTEXTS for row in node.compare(context, GPUS[-1])]
    gains = [gain for context in CONTEXTS if (gain := find_gain(contexts, context))]
    name = f"{options.device}, {model.name} in {model.weights}, {options.tables} tables; computed"
    left = ("way", "AsyncEP", "best rival")
    report.show(f"Forwards on {GPUS[-1]} GPUs ({name})", times, left=left)
    report.show("Tokens that hide copies", crossings, left=left)
    report.show(f"1 to {GPUS[-1]} GPUs", [row for row in degrees if row.tokens], left=left)
    report.show("Contexts", [row for row in contexts if row.tokens], left=left)
    report.show("AsyncEP over the best rival", gains, left=left)
    for way, error in KNOWN_ERRORS.items():
        report.console.print(f"{way}: {error}", highlight=False)
    report.save(
        {
            "computed": True,
            "forwards": times,
            "crossings": crossings,
            "degrees": degrees,
            "contexts": contexts,
            "gains": gains,
            "known_errors": KNOWN_ERRORS,
        }
    )


class Node:
    """GPUs of one machine, which prefill with AsyncEP and with its rivals.

    Args: stack: ends the replicas of AsyncEP.
    """

    def __init__(self, gpu: Gpu, model: Model, tables: str, stack: ExitStack) -> None:
        self._gpu, self._model, self._stack = gpu, model, stack
        self._rivals = Rivals(gpu, model, tables)
        self._flops = true_flops(model.config)
        self._peak = gpu.flops if model.weights == "bfloat16" else gpu.fp8_flops

    def forward_times(self, prompt: int, sizes: Sequence[int]) -> Iterator[ForwardTime]:
        for tokens in sizes:
            own = min(prompt, tokens)
            computing = sum(map(self._rivals.alone.seconds, forwards(own, tokens)))
            for way in ASYNCEP:
                group = 1 if way is Division.H2D else GPUS[-1]
                seconds = self._seconds(way, group, own, tokens)
                rate = tokens_of(forwards(own, tokens)) / seconds
                # Sums of floats in two orders differ in their last bits.
                exposed = max(0.0, seconds - computing)
                mfu = self._mfu(rate, own)
                yield ForwardTime(tokens, way, computing, seconds, exposed, rate, mfu)

    def crossing(self, way: Division, prompt: int) -> Crossing:
        replica = self._replica(way, 1 if way is Division.H2D else GPUS[-1])

        def find(sizes: Sequence[int]) -> int | None:
            times = [replica.time_layers(size, self._layer(prompt, size)) for size in sizes]
            found = find_saturation(times, TOKENS[-1])
            return found.tokens if found else None

        transfer = replica.time_layers(1024, self._layer(prompt, 1024)).transfer
        layer_flops = self._flops.work(0, prompt) / prompt / self._model.layers
        return Crossing(
            way=way,
            transfer=transfer,
            hidden_from=self._hidden_from(way, prompt),
            gate=find(_CALIBRATED),
            gate_measured=find((*_CALIBRATED, *TOKENS)),
            at_peak=MARGIN * transfer * self._peak / layer_flops,
        )

    def compare(self, context: int, gpus: int) -> Iterator[Throughput]:
        """Yield each way's best throughput with a number of GPUs."""
        ways = [Division.H2D] if gpus == 1 else [*ASYNCEP, *RIVALS]
        for way in ways:
            rates = {
                size: rate
                for size in COMPARED
                if self._fits(way, gpus, context, size)
                and (rate := self._rate(way, gpus, context, size))
            }
            best = max(rates, key=lambda size: rates[size], default=None)
            rate = None if best is None else rates[best]
            mfu = None if rate is None else self._mfu(rate, context)
            yield Throughput(context, gpus, way, self._weights(way, gpus), best, rate, mfu)

    def _rate(self, way: str, gpus: int, context: int, tokens: int) -> float | None:
        if way not in ASYNCEP:
            return self._rivals.rate(way, gpus, context, tokens)
        count = tokens_of(forwards(context, tokens))
        # Replicas that copy from the host have nothing in common.
        group = 1 if way is Division.H2D else gpus
        return count / self._seconds(Division(way), group, context, tokens)

    @cache  # noqa: B019 - there is one object for each run
    def _seconds(self, way: Division, gpus: int, prompt: int, tokens: int) -> float:
        times, layers = self._rivals.alone, self._model.layers
        each = [LayerSeconds.of(times, forward, layers) for forward in forwards(prompt, tokens)]
        return self._replica(way, gpus).seconds(*each)

    def _layer(self, prompt: int, tokens: int) -> LayerSeconds:
        """Return a layer's times in a forward of whole prompts and the beginning of another."""
        whole, rest = divmod(tokens, prompt)
        prefills = Prefills.of([(0, prompt)] * whole + [(0, rest)])
        return LayerSeconds.of(self._rivals.alone, Forward(prefills), self._model.layers)

    def _hidden_from(self, way: Division, prompt: int) -> int | None:
        """Bisect for the fewest tokens, to 256, whose forward has no exposed copies."""
        replica = self._replica(way, 1 if way is Division.H2D else GPUS[-1])

        def hides(tokens: int) -> bool:
            layer = self._layer(prompt, tokens)
            computing = (layer.experts + layer.others) * self._model.layers
            return replica.seconds(layer) < 1.001 * computing

        low, high = 0, 2 * TOKENS[-1] // 256
        if not hides(256 * high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if hides(256 * middle) else (middle, high)
        return 256 * high

    @cache  # noqa: B019
    def _replica(self, way: Division, gpus: int) -> OffloadedModel:
        return self._stack.enter_context(offloaded(way, self._model, self._gpu, gpus))

    def _weights(self, way: str, gpus: int) -> float:
        base = {DEEP_EP: Division.DP_EP, SHORT_PP: Division.PP, IDEAL_PP: Division.PP}
        division = base.get(way) or Division(way)
        return weight_bytes(division, self._model, gpus)

    def _fits(self, way: str, gpus: int, context: int, tokens: int) -> bool:
        """Return whether weights, KV and a forward's tensors fit into the memory."""
        model = self._model
        kept = max(context, tokens)
        if way in (Division.TP_TP, Division.TP_EP):
            kept /= gpus
        elif way in PIPELINES:
            # A stage has a part of the layers. Chunks in flight may be of two prompts.
            kept = max(2 * context, gpus * tokens) / gpus
        kv = kept * model.kv_bytes_per_token
        width = 2 * model.expert_weights // (3 * model.config["hidden_size"])
        # The largest tensors are of all experts of a token, and there are half as many others.
        row = 1.5 * 2 * model.experts_per_token * (width + model.config["hidden_size"])
        needed = self._weights(way, gpus) + kv + tokens * row + _OTHER_BYTES
        return needed <= self._gpu.memory

    def _mfu(self, rate: float, prompt: int) -> float:
        return rate * self._flops.work(0, prompt) / prompt / self._peak


def find_gain(rows: Sequence[Throughput], context: int) -> Gain | None:
    """Return the gain for a context; ``None`` if AsyncEP or all rivals have no throughput.

    Of AsyncEP's ways within 1 % of the best, the one with the fewest copies from the host counts.
    """
    rates = {
        row.way: row.tokens_per_second
        for row in rows
        if row.context == context and row.tokens_per_second
    }
    own = [way for way in ASYNCEP if way in rates]
    rivals = [way for way in RIVALS if way in rates and way != IDEAL_PP]
    if not own or not rivals:
        return None
    best = max(rates[one] for one in own)
    way = [one for one in own if rates[one] > 0.99 * best][-1]
    rival = max(rivals, key=lambda one: rates[one])
    gain, *bounds = (
        rates[way] / rates[name] if name in rates else None for name in (rival, SHORT_PP, IDEAL_PP)
    )
    assert gain is not None
    return Gain(context, rows[0].gpus, way, rival, gain, *bounds)
