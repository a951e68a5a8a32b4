"""The arguments of modelled GPUs on SGLang's command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashmoa_sglang.sglang.options import ServerOptions, option


@dataclass(frozen=True, slots=True)
class DeviceOptions(ServerOptions):
    """The arguments ``--flashmoa-device...``.

    Raises: ValueError if a value is invalid.
    """

    TITLE: ClassVar[str] = "FlashMoA's modelled GPUs"

    device: str = option(
        "",
        "On a CPU: take the time of this GPU, such as h200_sxm, h100_sxm, a100_sxm or the JSON "
        "file of a data sheet.",
    )
    device_model: str = option(
        "",
        "With --flashmoa-device: the model whose times are taken, such as Qwen/Qwen3-32B, or a "
        "folder with its config.json.",
    )
    device_tp: int = option(
        1, "With --flashmoa-device: among how many such GPUs the model is divided."
    )
    device_times: str = option(
        "measured",
        "With --flashmoa-device: times from NVIDIA's measured tables (measured) or the lower bound "
        "from the GPU's data sheet (roofline).",
        ("measured", "roofline"),
    )
    device_weights: str = option(
        "bfloat16",
        "With --flashmoa-device: precision of the weights there: bfloat16, fp8 (scales per tensor) "
        "or fp8_block (scales per block).",
        ("bfloat16", "fp8", "fp8_block"),
    )
    device_slowdown: float = option(
        1.0, "With --flashmoa-device: factor of all its times, for a machine that does not keep up."
    )

    def __post_init__(self) -> None:
        self.check_choices()
        self.require("device_tp", self.device_tp >= 1, "at least 1")
        self.require("device_slowdown", self.device_slowdown > 0, "above 0")
