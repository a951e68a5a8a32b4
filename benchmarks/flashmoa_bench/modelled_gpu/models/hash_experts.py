"""A hash model with layers of experts, whose bytes change its words.

The layers are SGLang's own ``FusedMoE``, so that the plugin's offloader takes them over. They
compute no hidden states: a layer hashes all bytes of its experts where it finds them. So a layer
that reads another layer's slot, or a slot that is not filled yet, changes the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.utils import make_layers

from flashmoa_bench.modelled_gpu.experts import virtual_gpu
from flashmoa_bench.modelled_gpu.hash_model import EXPERT_WIDTH, EXPERTS, PRIME
from flashmoa_bench.modelled_gpu.models.hash_causal_lm import HashForCausalLM


class HashExperts(FusedMoE):
    """The experts of one layer."""

    def run_moe_core(self, dispatch_output: Any = None) -> Any:
        """Take the time of the layer's experts; return a hash of their bytes."""
        weights = [parameter.data for parameter in self.parameters(recurse=False)]
        if (gpu := virtual_gpu()) is not None:
            gpu.compute_experts(weights)
        sums = [weight.view(torch.int32).sum(dtype=torch.int64) for weight in weights]
        return int(torch.stack(sums).sum()) % PRIME


class HashLayer(torch.nn.Module):
    """A layer with experts, as SGLang's models have."""

    def __init__(self, number: int, prefix: str) -> None:
        super().__init__()
        self.experts = HashExperts(
            num_experts=EXPERTS,
            hidden_size=EXPERT_WIDTH,
            intermediate_size=EXPERT_WIDTH,
            layer_id=number,
            top_k=1,
            params_dtype=torch.float32,
            prefix=prefix,
        )

    def forward(self) -> int:
        if (gpu := virtual_gpu()) is not None:
            gpu.compute_others()
        return self.experts.run_moe_core()


class HashExpertsForCausalLM(HashForCausalLM):
    """Hashes each request's context, and all layers' experts."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        made: Any = make_layers(
            config.hash_layers, lambda idx, prefix: HashLayer(idx, prefix), prefix="layers"
        )
        # Before pipeline stages, the layers come with the stage's first and last number.
        self.layers: Any = made[0] if isinstance(made, tuple) else made

    def _hash_layers(self) -> int:
        found = 0
        for layer in self.layers:
            found = (31 * found + layer()) % PRIME
        return found

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill each layer's experts with weights of its own."""
        super().load_weights(weights)
        for number, layer in enumerate(self.layers):
            dice = torch.Generator().manual_seed(number)
            for parameter in layer.parameters():
                parameter.data.copy_(torch.rand(parameter.shape, generator=dice))


EntryClass = HashExpertsForCausalLM
