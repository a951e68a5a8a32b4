"""``ModelledGpu``: the GPU whose time an engine on a CPU takes, as its options say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from flashmoa_sglang.modelled_gpu.forward import StepTimes
from flashmoa_sglang.modelled_gpu.roofline import Roofline
from flashmoa_sglang.modelled_gpu.specs import Gpu, Model, kv_tokens, memory_fraction
from flashmoa_sglang.modelled_gpu.tables import MeasuredTables
from flashmoa_sglang.options import Options


@dataclass(frozen=True, slots=True)
class ModelledGpu:
    """A GPU, the model that is on it, and how long forwards take there.

    Args:
        slowdown: factor of all times, so that a slow machine keeps up.
    """

    gpu: Gpu
    model: Model
    tensor_parallel: int
    times: StepTimes
    slowdown: float = 1.0

    @property
    def name(self) -> str:
        times = "roofline of " if isinstance(self.times, Roofline) else ""
        slower = f", {self.slowdown:g} times slower" if self.slowdown != 1 else ""
        return (
            f"modelled {times}{self.gpu.name} ({self.model.name}, TP{self.tensor_parallel}{slower})"
        )

    def size_engine(self, server_args: Any) -> None:
        """Give an engine the KV pool that it would have on this GPU, unless the user sized it.

        Raises: ValueError if the weights do not fit, or the engine has a second model, for
            speculative decoding, whose times are not known.
        """
        if server_args.speculative_algorithm:
            raise ValueError(
                "--flashmoa-device knows no times of draft models: leave out "
                f"--speculative-algorithm {server_args.speculative_algorithm}."
            )
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
    model = Model.load(options.device_model)
    gpu = Gpu.load(options.device)
    times: StepTimes
    if options.device_times == "roofline" or options.device.endswith(".json"):
        times = Roofline(gpu, model, options.device_tp)
    else:
        times = MeasuredTables(gpu.name, options.device_model, options.device_tp)
    return ModelledGpu(gpu, model, options.device_tp, times, options.device_slowdown)
