"""The CPU platform's attention: new rows against the cached keys, nothing else.

Costs O(new x total) per extend (stock ``torch_native``: O(total x total)). One request at a
time through ``scaled_dot_product_attention``; where a request's KV slots are consecutive,
which they are unless the pool is fragmented, keys and values are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from flashmoa_sglang import releases

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Rows:
    """One request of a batch: its query rows and where its keys lie in the KV pool."""

    start: int
    end: int
    slots: slice | torch.Tensor
    kv_len: int


class CpuAttentionBackend(TorchNativeAttnBackend):
    """Causal attention over a paged KV pool on CPU.

    Encoder, cross and sliding-window attention keep the stock code (correct, slow).
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        # Not every release keeps these itself.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._rows: list[_Rows] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        totals: list[int] = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            news = [1] * len(totals)
        else:
            news = forward_batch.extend_seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        self._rows = []
        start = 0
        for request, new, total in zip(
            forward_batch.req_pool_indices.tolist(), news, totals, strict=True
        ):
            slots = _consecutive(table[request, :total])
            self._rows.append(_Rows(start, start + new, slots, total))
            start += new

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if not _is_plain_causal(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if not _is_plain_causal(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            # Every key of the batch is written before any is read, so one request of a
            # batch may attend to keys that another of the same batch has just written.
            location = releases.write_location(self, forward_batch)
            pool.set_kv_buffer(layer, location, k, v)
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        gqa = layer.tp_q_head_num != layer.tp_k_head_num
        for rows in self._rows:
            new = rows.end - rows.start
            square = new == rows.kv_len
            bias = None if square or new == 1 else causal_lower_right(new, rows.kv_len)
            attended = scaled_dot_product_attention(
                _heads_first(queries[rows.start : rows.end]),
                _heads_first(_read(keys, rows.slots).to(q.dtype)),
                _heads_first(_read(values, rows.slots).to(q.dtype)),
                attn_mask=bias,
                is_causal=square and new > 1,
                scale=layer.scaling,
                enable_gqa=gqa,
            )
            out[rows.start : rows.end] = attended[0].transpose(0, 1)
        return out.view(queries.shape[0], -1)


def _is_plain_causal(layer: RadixAttention) -> bool:
    window = layer.sliding_window_size
    return (
        not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and (window is None or window < 0)
    )


def _consecutive(slots: torch.Tensor) -> slice | torch.Tensor:
    """Turn consecutive slot numbers into a slice: a view of the pool instead of a copy."""
    count = slots.numel()
    first = int(slots[0])
    if int(slots[-1]) - first == count - 1 and bool((slots[1:] > slots[:-1]).all()):
        return slice(first, first + count)
    return slots.to(torch.int64)


def _read(buffer: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(slots, slice):
        return buffer[slots]
    return buffer.index_select(0, slots)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> [1, heads, rows, dim], a view."""
    return rows.transpose(0, 1).unsqueeze(0)
