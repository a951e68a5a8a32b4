"""A paged KV allocator for a CPU: the kernels of SGLang's allocator need Triton and a GPU."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):
    """Allocates KV slots in pages; a request fills its last page before it takes a new one."""

    def alloc_extend(  # noqa: PLR0913 - SGLang's signature
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Return slots that extend each prefix to its new length; ``None`` if too few are free."""
        return self._grow(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist())

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a slot for the last token of each request; ``None`` if too few are free."""
        lengths = seq_lens_cpu.tolist()
        return self._grow([length - 1 for length in lengths], lengths, last_loc.tolist())

    def _grow(self, olds: list[int], news: list[int], lasts: list[int]) -> torch.Tensor | None:
        """Return slots that extend requests from old to new lengths, given their last slots."""
        page = self.page_size
        needed = sum(-(-new // page) - -(-old // page) for old, new in zip(olds, news, strict=True))
        if needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        fresh = (self.free_pages[:needed, None] * page + torch.arange(page)).reshape(-1)
        pieces: list[torch.Tensor] = []
        at = 0
        for old, new, last in zip(olds, news, lasts, strict=True):
            in_page = min(new - old, -old % page)
            pieces.append(torch.arange(last + 1, last + 1 + in_page))
            rest = new - old - in_page
            pieces.append(fresh[at : at + rest])
            at += -(-rest // page) * page
        self.free_pages = self.free_pages[needed:]
        return torch.cat(pieces).to(torch.int64)
