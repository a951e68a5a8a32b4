"""``MeasuredTables``: step times from NVIDIA's tables of measured kernels (aiconfigurator-core)."""

from __future__ import annotations

import logging
import warnings
from functools import lru_cache

from flashmoa_sglang.modelled_gpu.forward import Forward, Prefills


class MeasuredTables:
    """Times the forwards of a model on a GPU that NVIDIA has measured, as SGLang computes them.

    The tables hold the time of each operation by its size. A forward's time is their sum: attention
    is looked up for prefills and decodes apart, everything else once for all tokens together, as a
    mixed batch computes it.

    Args:
        gpu: such as ``h200_sxm``, ``h100_sxm`` or ``a100_sxm``.
        model: name on Hugging Face, of those that the package knows, or a folder with a
            ``config.json``.
        tensor_parallel: number of GPUs among which the model is divided.
        weights: precision of the weights, ``bfloat16``, ``fp8`` or ``fp8_block``.

    Raises: ValueError if the package is not installed, or has no tables for this GPU and model.
    """

    def __init__(
        self, gpu: str, model: str, tensor_parallel: int = 1, weights: str = "bfloat16"
    ) -> None:
        try:
            # Pandas, which the package imports, may warn.
            with warnings.catch_warnings(action="ignore"):
                from aiconfigurator_core import sdk
        except ImportError as error:
            raise ValueError(
                f"The times of {gpu} need aiconfigurator-core ({error}): "
                "pip install 'flashmoa-sglang[device]'."
            ) from error
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        modes = ("gemm_quant_mode", "moe_quant_mode")
        precision = {} if weights == "bfloat16" else dict.fromkeys(modes, weights)
        try:
            self.engine = sdk.EngineHandle.compile(
                model, gpu, "sglang", tp_size=tensor_parallel, **precision
            )
            self.engine.predict_decode_latency(1, 1)
        except Exception as error:  # The package raises errors of many classes.
            message = f"aiconfigurator-core has no times for {model} ({weights}) on {gpu}: {error}."
            raise ValueError(message) from error

    def seconds(self, forward: Forward) -> float:
        prefills, decodes = forward.prefills, forward.decodes
        if not prefills.tokens:
            return self._decode(decodes, forward.context) if decodes else 0.0
        together = self._other_than_attention(
            prefills.requests + decodes, prefills.tokens + decodes
        )
        attention = self._attention(prefills)
        return together + attention + self._decode_attention(decodes, forward.context)

    @lru_cache(maxsize=4096)  # noqa: B019 - there is one object for the whole process
    def _decode(self, requests: int, context: int) -> float:
        return self.engine.predict_decode_latency(requests, context) / 1000

    @lru_cache(maxsize=4096)  # noqa: B019
    def _other_than_attention(self, requests: int, tokens: int) -> float:
        """Return the seconds of all tokens together, and of the logits of one for each request.

        Tokens are counted exactly, as one request: kernels compute blocks of 64 or 128 of them, and
        one more token can take as long as a whole block.
        """
        together, _ = self.engine.run_static_per_op(
            batch_size=1, isl=tokens, osl=1, mode="static_ctx"
        )
        milliseconds = sum(
            ms for name, ms, *_ in together if "attention" not in name and "logits" not in name
        )
        return (milliseconds + self._logits(requests)) / 1000

    @lru_cache(maxsize=4096)  # noqa: B019
    def _logits(self, requests: int) -> float:
        operations, _ = self.engine.run_static_per_op(
            batch_size=requests, isl=1, osl=1, mode="static_ctx"
        )
        return sum(ms for name, ms, *_ in operations if "logits" in name)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _attention(self, prefills: Prefills) -> float:
        new = max(1, round(prefills.tokens / prefills.requests))
        operations, _ = self.engine.run_static_per_op(
            batch_size=prefills.requests,
            isl=prefills.cached + new,
            osl=1,
            prefix=prefills.cached,
            mode="static_ctx",
        )
        tabulated = sum(ms for name, ms, *_ in operations if "attention" in name) / 1000
        # Prefills of few tokens each are not tabulated, and extrapolated by their arithmetic alone.
        # They read as much KV as decodes behind the same contexts, whose times are.
        return max(tabulated, self._decode_attention(prefills.requests, prefills.cached + new))

    @lru_cache(maxsize=4096)  # noqa: B019
    def _decode_attention(self, requests: int, context: int) -> float:
        if not requests:
            return 0.0
        operations = self.engine.decode_step_per_op(requests, context, 2)
        return sum(ms for name, ms, *_ in operations if "attention" in name) / 1000
