"""``ModelledGpu``: the GPU whose time an engine on a CPU takes, as its options say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from flashmoa_sglang.modelled_gpu.forward import Forward, StepTimes
from flashmoa_sglang.modelled_gpu.roofline import Roofline
from flashmoa_sglang.modelled_gpu.specs import Gpu, Model, kv_tokens, memory_fraction
from flashmoa_sglang.modelled_gpu.tables import MeasuredTables
from flashmoa_sglang.options import Options


@dataclass(frozen=True, slots=True)
class ModelledGpu:
    """A GPU, the model that is on it, and how long forwards and transfers take there.

    Args:
        slowdown: factor of all times, so that a slow machine keeps up.
        eager: forwards whose kernels are launched one by one: ``none``, ``prefill`` or ``all``.
        launch: seconds that launching the kernels of one layer takes.
    """

    gpu: Gpu
    model: Model
    tensor_parallel: int
    times: StepTimes
    slowdown: float = 1.0
    eager: str = "none"
    launch: float = 0.0

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
        """Return the seconds of a forward, slowed down.

        Kernels are launched while earlier ones compute, so a forward that no CUDA graph replays
        takes as long as its kernels or their launches, whichever is longer.
        """
        seconds = self.times.seconds(forward)
        is_eager = self.eager == "all" or (self.eager == "prefill" and forward.prefills.tokens)
        if is_eager and seconds:
            seconds = max(seconds, self.launch * self.model.layers)
        return seconds * self.slowdown

    def transfer_seconds(self, tokens: int) -> float:
        """Return the seconds in which the KV of ``tokens`` tokens is sent, slowed down.

        Each rank sends its part over a link of its own.
        """
        size = tokens * self.model.kv_bytes_per_token
        return size / (self.gpu.link * self.tensor_parallel) * self.slowdown

    def size_engine(self, server_args: Any) -> None:
        """Give an engine the KV pool that it would have on this GPU, unless the user sized it.

        Raises: ValueError if the weights do not fit.
        """
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = memory_fraction(self.gpu, self.tensor_parallel)
        if server_args.max_total_tokens is None:
            fraction = server_args.mem_fraction_static
            server_args.max_total_tokens = kv_tokens(
                self.gpu, self.model, self.tensor_parallel, fraction
            )


@cache
def modelled_gpu() -> ModelledGpu | None:
    """Return the GPU whose time this process's engine takes, ``None`` for none.

    Raises: ValueError if it, its model or its times are not known.
    """
    options = Options.from_environment()
    if not options.device:
        return None
    if not options.device_model:
        raise ValueError("--flashmoa-device needs --flashmoa-device-model, such as Qwen/Qwen3-32B.")
    if options.device_eager != "none" and not options.device_launch:
        raise ValueError(
            f"--flashmoa-device-eager {options.device_eager} needs --flashmoa-device-launch, the "
            "milliseconds per layer that you measured: no table has them for SGLang."
        )
    model = Model.load(options.device_model, options.device_weights)
    gpu = Gpu.load(options.device)
    times: StepTimes
    if options.device_times == "roofline" or options.device.endswith(".json"):
        times = Roofline(gpu, model, options.device_tp)
    else:
        times = MeasuredTables(gpu.name, model.name, options.device_tp, model.weights)
    return ModelledGpu(
        gpu,
        model,
        options.device_tp,
        times,
        options.device_slowdown,
        options.device_eager,
        options.device_launch / 1000,
    )
