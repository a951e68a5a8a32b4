"""When increments are due."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from flashmoa_sglang.trigger import Policy, due
from hypothesis import given
from hypothesis import strategies as st

POLICY = Policy()


@dataclass(eq=False)
class Stream:
    certain: int
    prefilled: int = 0
    ended_at: float | None = None
    stalled_until: float = 0.0

    def certain_tokens(self) -> int:
        return self.certain


def ask(
    *streams: Stream,
    now: float = 100.0,
    shared: bool = False,
    resume_at: float = 0.0,
    alone: bool = False,
):
    return due(streams, POLICY, now=now, shared=shared, alone=alone, resume_at=resume_at)


def test_an_idle_engine_takes_little_and_a_shared_one_waits_for_more() -> None:
    stream = Stream(certain=POLICY.idle_tokens)
    assert ask(stream).increments == ((stream, POLICY.idle_tokens),)
    assert ask(stream, shared=True).increments == ()
    assert ask(Stream(certain=POLICY.idle_tokens - 1)).increments == ()


def test_the_end_is_due_after_its_grace() -> None:
    stream = Stream(certain=3, ended_at=100.0)
    early = ask(stream, now=100.0)
    assert early.increments == ()
    assert early.wait == pytest.approx(POLICY.end_grace)
    assert ask(stream, now=100.0 + 2 * POLICY.end_grace).increments == ((stream, 3),)


def test_with_others_running_increments_pause() -> None:
    stream = Stream(certain=500)
    paused = ask(stream, shared=True, resume_at=100.5)
    assert (paused.increments, paused.wait) == ((), 0.5)
    assert ask(stream, shared=True, resume_at=100.0).increments == ((stream, POLICY.shared_chunk),)


def test_a_lone_stream_is_not_cut_into_small_chunks() -> None:
    stream = Stream(certain=5000)
    assert ask(stream).increments == ((stream, POLICY.chunk),)
    assert ask(stream, alone=True).increments == ((stream, POLICY.lone_chunk),)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=12),
    shared=st.booleans(),
)
def test_one_go_stays_within_its_budget_and_moves_forward(
    sizes: list[tuple[int, int]], shared: bool
) -> None:
    streams = [Stream(certain=max(size), prefilled=min(size)) for size in sizes]
    todo = ask(*streams, shared=shared)
    budget = POLICY.shared_chunk if shared else POLICY.chunk
    taken = [target - stream.prefilled for stream, target in todo.increments]
    assert sum(taken) <= budget
    assert all(tokens > 0 for tokens in taken)
    assert all(target <= stream.certain for stream, target in todo.increments)
    need = POLICY.shared_tokens if shared else POLICY.idle_tokens
    fresh = [stream.certain - stream.prefilled for stream in streams]
    assert bool(todo.increments) == any(tokens >= need for tokens in fresh)
    # Whoever is left out has at least as much to go as whoever was taken in full.
    chosen = {id(stream) for stream, _ in todo.increments}
    left_out = [s.certain - s.prefilled for s in streams if id(s) not in chosen]
    waiting = [tokens for tokens in left_out if tokens >= need]
    full = [t for (s, target), t in zip(todo.increments, taken, strict=True) if target == s.certain]
    assert not waiting or not full or min(waiting) >= max(full)
