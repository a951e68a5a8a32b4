"""An attention backend for a CPU, which computes only the new rows against the cached keys.

An extend costs O(new x total), and stock ``torch_native`` O(total x total); requests are computed
one at a time. A request's KV slots are usually allocated in runs. Keys and values in runs are read
in place, because for a short extend copying them would cost more than attending to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from flashmoa_cpu.releases import write_location

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Rows:
    """One request of a batch: its query rows, and its keys' slots in the KV pool.

    ``runs`` are slices of the pool, or the slot numbers if slices would be short.
    """

    start: int
    end: int
    runs: list[slice] | torch.Tensor
    kv_len: int


# The fused kernel is faster for an extend with more rows than this.
_MAX_ROWS_IN_PLACE = 64
# One copy is faster than reading runs in place that are shorter than this.
_MIN_RUN_IN_PLACE = 64


class CpuAttentionBackend(TorchNativeAttnBackend):
    """Computes causal attention over a paged KV pool on a CPU.

    Encoder, cross and sliding-window attention use the stock code, which is correct and slow.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        # In some releases the base class does not keep these.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._rows: list[_Rows] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        totals: list[int] = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            news = [1] * len(totals)
        else:
            news = forward_batch.extend_seq_lens.tolist()  # pyright: ignore[reportOptionalMemberAccess]
        table = self.req_to_token_pool.req_to_token  # pyright: ignore[reportOptionalMemberAccess]
        self._rows = []
        start = 0
        for request, new, total in zip(
            forward_batch.req_pool_indices.tolist(), news, totals, strict=True
        ):
            runs = _runs(table[request, :total])
            self._rows.append(_Rows(start, start + new, runs, total))
            start += new

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        attend = self._attend if _is_plain_causal(layer) else super().forward_extend
        return attend(q, k, v, layer, *args, **kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        attend = self._attend if _is_plain_causal(layer) else super().forward_decode
        return attend(q, k, v, layer, *args, **kwargs)

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
        if save_kv_cache and k is not None and v is not None:
            # Every key of the batch is written before any is read, so a request may attend to keys
            # that another request of the same batch has just written.
            location = write_location(self, forward_batch)
            pool.set_kv_buffer(layer, location, k, v)
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        for rows in self._rows:
            query = queries[rows.start : rows.end]
            in_place = isinstance(rows.runs, list) and rows.end - rows.start <= _MAX_ROWS_IN_PLACE
            attend = _attend_in_place if in_place else _attend_fused
            out[rows.start : rows.end] = attend(query, keys, values, rows, layer.scaling)
        return out.view(queries.shape[0], -1)


def _attend_in_place(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: _Rows, scaling: float
) -> torch.Tensor:
    """Attend with few query rows to runs of the pool, all query heads of a key head at once."""
    new, heads, dim = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    grouped = query.view(new, kv_heads, group, dim).permute(1, 2, 0, 3) * scaling
    grouped = grouped.reshape(kv_heads, group * new, dim)
    parts = [torch.bmm(grouped, keys[run].to(query.dtype).permute(1, 2, 0)) for run in rows.runs]
    scores = torch.cat(parts, dim=-1)
    if new > 1:
        hidden = torch.ones(new, new, dtype=torch.bool).triu(1)
        last = scores.view(kv_heads, group, new, rows.kv_len)[..., rows.kv_len - new :]
        last.masked_fill_(hidden, float("-inf"))
    weights = scores.softmax(-1).split([part.shape[-1] for part in parts], dim=-1)
    out = torch.zeros(kv_heads, group * new, values.shape[-1], dtype=query.dtype)
    for run, weight in zip(rows.runs, weights, strict=True):
        out.baddbmm_(weight, values[run].to(query.dtype).transpose(0, 1))
    return out.view(kv_heads, group, new, -1).permute(2, 0, 1, 3).reshape(new, heads, -1)


def _attend_fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: _Rows, scaling: float
) -> torch.Tensor:
    new = rows.end - rows.start
    square = new == rows.kv_len
    attended = scaled_dot_product_attention(
        _heads_first(query),
        _heads_first(read_slots(keys, rows.runs).to(query.dtype)),
        _heads_first(read_slots(values, rows.runs).to(query.dtype)),
        attn_mask=None if square or new == 1 else causal_lower_right(new, rows.kv_len),
        is_causal=square and new > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)


def _is_plain_causal(layer: RadixAttention) -> bool:
    window = layer.sliding_window_size
    return (
        not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and (window is None or window < 0)
    )


def _runs(slots: torch.Tensor) -> list[slice] | torch.Tensor:
    """Turn slot numbers into slices of the pool. Return them unchanged if runs would be short."""
    slots = slots.to(torch.int64)
    ends = (slots[1:] - slots[:-1] != 1).nonzero().flatten() + 1
    if (len(ends) + 1) * _MIN_RUN_IN_PLACE > max(len(slots), _MIN_RUN_IN_PLACE):
        return slots
    bounds = [0, *ends.tolist(), len(slots)]
    firsts = slots[torch.tensor(bounds[:-1])].tolist()
    sizes = [end - start for start, end in pairwise(bounds)]
    return [slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


def read_slots(buffer: torch.Tensor, runs: list[slice] | torch.Tensor) -> torch.Tensor:
    if isinstance(runs, torch.Tensor):
        return buffer.index_select(0, runs)
    if len(runs) == 1:
        return buffer[runs[0]]
    return torch.cat([buffer[run] for run in runs])


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """Return a view of shape [1, heads, rows, dim] on a tensor of shape [rows, heads, dim]."""
    return rows.transpose(0, 1).unsqueeze(0)
