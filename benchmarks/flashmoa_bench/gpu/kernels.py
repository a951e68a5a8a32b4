"""Check each kernel that SGLang uses on a GPU by itself, and measure the GPU's ceilings.

``python -m flashmoa_bench.gpu.kernels`` prints a line of JSON after each step, so that a crash
leaves the earlier results. An error is relative, against torch in float32.
"""

# Type checkers do not find SGLang and its kernels.
# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

# Largest relative error. Rounding to bfloat16 causes at most 0.004.
TOLERANCE = 0.02
_ROWS = 64


def error_of(found: Any, right: Any) -> float:
    """Return the norm of the difference over the norm of the right result."""
    found, right = found.float(), right.float()
    return float((found - right).norm() / right.norm().clamp(min=1e-9))


def rotated(heads: Any, cos_sin: Any, positions: Any) -> Any:
    """Return heads as rotary embeddings turn them, the first half against the second."""
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    one, two = heads.float().chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class Kernels:
    """Random inputs on a device, and a method for each kernel that returns its error."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        torch.manual_seed(0)

    def random(self, *shape: int) -> Any:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def norm(self) -> float:
        import sgl_kernel

        rows, weight = self.random(_ROWS, 4096), self.random(4096)
        scale = torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        found = sgl_kernel.rmsnorm(rows, weight, 1e-6)
        return error_of(found, rows.float() * scale * weight.float())

    def activation(self) -> float:
        from sglang.jit_kernel.activation import silu_and_mul

        rows = self.random(_ROWS, 8192)
        gate, up = rows.float().chunk(2, -1)
        return error_of(silu_and_mul(rows), torch.nn.functional.silu(gate) * up)

    def rope(self) -> float:
        from sglang.jit_kernel.rope import apply_rope_with_cos_sin_cache_inplace

        head_size = 128
        positions = torch.arange(_ROWS, device=self.device) * 37
        powers = torch.arange(0, head_size, 2, device=self.device) / head_size
        angles = torch.arange(4096, device=self.device)[:, None] / 1e6**powers
        table = torch.cat((angles.cos(), angles.sin()), -1)
        query, key = self.random(_ROWS, 32, head_size), self.random(_ROWS, 8, head_size)
        right = rotated(query, table, positions), rotated(key, table, positions)
        apply_rope_with_cos_sin_cache_inplace(
            q=query, k=key, cos_sin_cache=table, positions=positions, is_neox=True
        )
        return max(error_of(query, right[0]), error_of(key, right[1]))

    def experts(self) -> float:
        import sgl_kernel

        gates = torch.randn(_ROWS, 128, device=self.device)
        weights = torch.empty(_ROWS, 8, device=self.device)
        places = torch.empty(_ROWS, 8, device=self.device, dtype=torch.int32)
        sgl_kernel.topk_softmax(weights, places, gates, True)
        best = gates.softmax(-1).topk(8).values
        return error_of(weights.sort(-1)[0], (best / best.sum(-1, keepdim=True)).sort(-1)[0])

    def clamp(self) -> float:
        from sglang.jit_kernel.clamp_position import clamp_position_cuda

        lengths = torch.tensor([0, 1, 2, 9], device=self.device)
        right = torch.tensor([0, 0, 1, 8], device=self.device)
        return error_of(clamp_position_cuda(lengths), right)

    def resolve(self) -> float:
        from sglang.jit_kernel.resolve_future_token_ids import resolve_future_token_ids_cuda

        ids = torch.tensor([5, -2, 7], device=self.device)
        resolve_future_token_ids_cuda(ids, torch.tensor([0, 11, 22, 33], device=self.device))
        return error_of(ids, torch.tensor([5, 22, 7], device=self.device))


def seconds(run: Callable[[], object], times: int = 10) -> float:
    """Return the GPU's mean seconds for one run, after two runs that do not count."""
    for _ in range(2):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times / 1000


def ceilings() -> dict[str, float]:
    """Return the rates of matrix products, of copies in GPU memory, and of copies from the host."""
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    here, there = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    return {
        "matmul_tflops": 2 * 8192**3 / seconds(lambda: one @ two) / 1e12,
        "copy_tb_per_second": 2 * 2**30 / seconds(lambda: there.copy_(here)) / 1e12,
        "host_gb_per_second": 2**28
        / seconds(lambda: here[: 2**28].copy_(host, non_blocking=True))
        / 1e9,
    }


def main() -> None:
    def say(**found: Any) -> None:
        print(json.dumps(found), flush=True)

    gpu = torch.cuda.get_device_properties(0)
    packages = ("torch", "triton", "transformers", "sglang", "sglang-kernel")
    say(gpu=gpu.name, memory=gpu.total_memory, **{name: version(name) for name in packages})
    kernels, checked = Kernels(), dict[str, Any]()
    for name in ("norm", "activation", "rope", "experts", "clamp", "resolve"):
        try:
            checked[name] = getattr(kernels, name)()
            torch.cuda.synchronize()
        except Exception as error:
            checked[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        say(kernels=checked)
    wrong = [name for name, off in checked.items() if not isinstance(off, float) or off > TOLERANCE]
    say(wrong_kernels=wrong)
    say(**ceilings())


if __name__ == "__main__":
    main()
