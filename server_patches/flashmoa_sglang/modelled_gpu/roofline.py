"""``Roofline``: the least time that a GPU can take, from its data sheet."""

from __future__ import annotations

from flashmoa_sglang.modelled_gpu.forward import Forward
from flashmoa_sglang.modelled_gpu.specs import Gpu, Model

_BYTES_OF_BFLOAT16 = 2


class Roofline:
    """Times forwards by the roofline model: no kernel is faster than its arithmetic or its reads.

    It knows no launches, no synchronization and no inefficiency, so it is a lower bound of what is
    measured. It needs no package, and serves for GPUs and models that have not been measured.

    Raises: ValueError if the weights are in FP8, and the GPU does not compute in it.
    """

    def __init__(self, gpu: Gpu, model: Model, tensor_parallel: int = 1) -> None:
        layer_flops = gpu.flops if model.bytes_per_weight == _BYTES_OF_BFLOAT16 else gpu.fp8_flops
        if not layer_flops:
            raise ValueError(f"{gpu.name} has no FP8, so its weights cannot be {model.weights}.")
        self._layer_flops = layer_flops * tensor_parallel
        self._flops = gpu.flops * tensor_parallel
        self._bandwidth = gpu.bandwidth * tensor_parallel
        self._model = model

    def seconds(self, forward: Forward) -> float:
        prefills, model = forward.prefills, self._model
        requests = prefills.requests + forward.decodes
        tokens = prefills.tokens + forward.decodes
        if not tokens:
            return 0.0
        weight = model.bytes_per_weight
        linear = max(
            model.attention_weights * weight / self._bandwidth,
            2 * tokens * model.attention_weights / self._layer_flops,
        )
        # How many of the experts some token needs, if each token takes them at random.
        idle = (1 - model.experts_per_token / model.experts) ** tokens
        needed = model.experts * (1 - idle) if model.experts > 1 else 1
        reads = needed * model.expert_weights * weight / self._bandwidth
        computed = 2 * tokens * model.experts_per_token * model.expert_weights / self._layer_flops
        layer = linear + max(reads, computed)
        logits = max(
            model.head_weights * _BYTES_OF_BFLOAT16 / self._bandwidth,
            2 * requests * model.head_weights / self._flops,
        )
        return model.layers * layer + self._attention(forward) + logits

    def _attention(self, forward: Forward) -> float:
        prefills, model = forward.prefills, self._model
        query = model.config["num_attention_heads"] * model.head_size
        # Each new token is compared with the tokens before it: a product of the query with the
        # key, and one of the weight with the value.
        pairs = prefills.tokens * prefills.cached + prefills.tokens**2 / 2 / max(
            1, prefills.requests
        )
        computed = model.layers * 4 * query * (pairs + forward.decodes * forward.context)
        read = prefills.requests * prefills.cached + prefills.tokens
        read += forward.decodes * forward.context
        return max(computed / self._flops, read * model.kv_bytes_per_token / self._bandwidth)
