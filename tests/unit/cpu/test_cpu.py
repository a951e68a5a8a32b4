"""Test SGLang on a CPU: its paged allocator, and PD pairs that leave the cores to others."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_cpu import pd_pairs


@pytest.mark.parametrize(("fully_idle", "naps"), [(False, 1), (True, 0)])
def test_a_waiting_scheduler_sleeps(
    monkeypatch: pytest.MonkeyPatch, fully_idle: bool, naps: int
) -> None:
    slept: list[float] = []
    housekeeping: list[object] = []
    monkeypatch.setattr(pd_pairs, "time", SimpleNamespace(sleep=slept.append))
    scheduler = SimpleNamespace(is_fully_idle=lambda: fully_idle)
    pd_pairs._sleep_if_busy(housekeeping.append)(scheduler)
    assert housekeeping == [scheduler]
    assert len(slept) == naps


def test_nixl_waits_for_events() -> None:
    agents: list[tuple[str, Any]] = []
    make = pd_pairs._wait_for_events(lambda name, config: agents.append((name, config)))
    make("agent", SimpleNamespace(pthrDelay=0))
    [(name, config)] = agents
    assert name == "agent" and config.pthrDelay >= 1000


def test_other_engines_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_pairs, "_patch_nixl", lambda: pytest.fail("nixl was patched"))
    for mode in (None, "null"):
        pd_pairs.prepare_pd_pairs(SimpleNamespace(disaggregation_mode=mode))


torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def allocator_class() -> type:
    from flashmoa_sglang.sglang import torchvision_ops

    torchvision_ops.allow_mismatched_build()
    from flashmoa_cpu.allocator import CpuPagedAllocator

    return CpuPagedAllocator


def grow(allocator, rows: list[list[int]], counts: list[int]) -> bool:
    """Extend each request's slots by a count; return whether there was room."""
    olds = [len(row) for row in rows]
    news = [old + count for old, count in zip(olds, counts, strict=True)]
    old_lens, new_lens = torch.tensor(olds), torch.tensor(news)
    last = torch.tensor([row[-1] if row else -1 for row in rows])
    out = allocator.alloc_extend(old_lens, old_lens, new_lens, new_lens, last, sum(counts))
    if out is None:
        return False
    at = 0
    for row, count in zip(rows, counts, strict=True):
        row.extend(out[at : at + count].tolist())
        at += count
    return True


@pytest.mark.parametrize("page", [2, 16])
def test_no_slot_is_given_twice(allocator_class: type, page: int) -> None:
    import random

    dice = random.Random(page)
    pages = 64
    allocator = allocator_class(pages * page, page, torch.float32, "cpu", None, False)
    rows: list[list[int]] = [[], [], []]
    while grow(allocator, rows, [dice.randrange(0, 2 * page) for _ in rows]):
        used = [slot for row in rows for slot in row]
        assert len(set(used)) == len(used)
        for row in rows:
            for position, slot in enumerate(row):
                assert slot // page == row[position - position % page] // page
                assert slot % page == position % page
        held = sum(-(-len(row) // page) for row in rows)
        assert allocator.available_size() == (pages - held) * page
    for row in rows:
        allocator.free(torch.tensor(row))
    assert allocator.available_size() == pages * page


def test_decode_fills_its_page_first(allocator_class: type) -> None:
    allocator = allocator_class(64, 4, torch.float32, "cpu", None, False)
    rows: list[list[int]] = [[]]
    assert grow(allocator, rows, [3])
    for length in (4, 5):
        lens = torch.tensor([length])
        out = allocator.alloc_decode(lens, lens, torch.tensor([rows[0][-1]]))
        rows[0].extend(out.tolist())
    assert [slot % 4 for slot in rows[0]] == [0, 1, 2, 3, 0]
    assert allocator.available_size() == 64 - 8
