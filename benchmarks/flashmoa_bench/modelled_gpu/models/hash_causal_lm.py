"""The model class of :mod:`flashmoa_bench.modelled_gpu.hash_model`, and its attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from flashmoa_cpu.attention import CpuAttentionBackend, read_slots
from flashmoa_cpu.releases import write_location
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention

from flashmoa_bench.modelled_gpu.hash_model import FACTORS, PRIME, WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class HashForCausalLM(torch.nn.Module):
    """Hashes each request's context. The hash decides which word is the next token."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.attention = RadixAttention(1, WIDTH, 1.0, num_kv_heads=1, layer_id=0)
        self.words = torch.tensor(config.hash_words)
        self._size = int(self.words.max()) + 1
        # Logits fall with a token's distance after the word, around the vocabulary. So all differ,
        # and if a grammar forbids the word, the next allowed token is certain.
        self._logits = -(torch.arange(2 * self._size) % self._size).float()

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        **_kwargs: Any,
    ) -> LogitsProcessorOutput:
        ids = input_ids.to(torch.float32).unsqueeze(1).expand(-1, WIDTH).contiguous()
        hashes = self.attention(ids, ids, ids, forward_batch)[:, 0].to(torch.int64)
        # A prefill has a row for each new token. The last row has the hash.
        if (rows := forward_batch.extend_seq_lens) is not None:
            hashes = hashes[rows.cumsum(0) - 1]
        hashes = (hashes + self._hash_layers()) % PRIME
        # After equal further tokens, two contexts' hashes keep their difference. Their squares do
        # not, so two contexts that agree in one word differ in the next.
        words = self.words[hashes * hashes % PRIME % len(self.words)]
        starts = (self._size - words).tolist()
        logits = torch.stack([self._logits[start : start + self._size] for start in starts])
        return LogitsProcessorOutput(next_token_logits=logits)

    def _hash_layers(self) -> int:
        """Return what the layers add to the hashes of all contexts: nothing, without layers."""
        return 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load nothing: there are no weights."""
        for _ in weights:
            pass


class HashAttentionBackend(CpuAttentionBackend):
    """Reads the ids of a request's context from the KV pool, and returns their hash.

    The last row of each request has the hash. The other rows are zero.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        generator = torch.Generator().manual_seed(0)
        size = (model_runner.model_config.context_len + 1,)
        self._factors = torch.randint(1, FACTORS, size, generator=generator).double()

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, write_location(self, forward_batch), k, v)
        keys = pool.get_key_buffer(layer.layer_id)
        ids = keys.view(-1)
        sums = [
            torch.dot(read_slots(ids, rows.runs).double(), self._factors[: rows.kv_len])
            for rows in self._rows
        ]
        out = torch.zeros(q.shape[0], WIDTH)
        out[[rows.end - 1 for rows in self._rows], 0] = (torch.stack(sums) % PRIME).float()
        return out


EntryClass = HashForCausalLM
