"""``due``: when which increments are computed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from flashmoa_sglang.http.trigger import Due, Policy, due
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
    policy: Policy = POLICY,
    now: float = 100.0,
    alone: bool = False,
) -> Due[Stream]:
    return due(streams, policy, now=now, alone=alone)


def test_a_few_tokens_are_worth_an_increment_and_fewer_are_not() -> None:
    stream = Stream(certain=POLICY.least)
    assert ask(stream).increments == ((stream, POLICY.least),)
    assert ask(Stream(certain=POLICY.least - 1)).increments == ()


def test_the_end_of_a_text_is_due_after_the_grace_period() -> None:
    stream = Stream(certain=3, ended_at=100.0)
    early = ask(stream, now=100.0)
    assert early.increments == ()
    assert early.wait == pytest.approx(POLICY.end_grace)
    assert ask(stream, now=100.0 + 2 * POLICY.end_grace).increments == ((stream, 3),)


def test_increments_are_larger_for_a_lone_stream() -> None:
    stream = Stream(certain=5000)
    assert ask(stream).increments == ((stream, POLICY.chunk),)
    assert ask(stream, alone=True).increments == ((stream, POLICY.lone_chunk),)


def test_a_stream_without_room_asks_again_later() -> None:
    stream = Stream(certain=500, stalled_until=100.5)
    assert ask(stream) == Due((), 0.5)
    assert ask(stream, now=100.5).increments == ((stream, 500),)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=12),
    ended=st.booleans(),
    page=st.sampled_from([1, 16, 64, 1024]),
)
def test_every_stream_progresses_within_its_bounds(
    sizes: list[tuple[int, int]], ended: bool, page: int
) -> None:
    policy = Policy(page=page)
    streams = [
        Stream(max(size), prefilled=min(size) - min(size) % page, ended_at=0.0 if ended else None)
        for size in sizes
    ]
    todo = ask(*streams, policy=policy)
    chosen = {id(stream): target for stream, target in todo.increments}
    most = max(page, policy.chunk)
    for stream in streams:
        whole = stream.certain if ended else stream.certain - stream.certain % page
        left = whole - stream.prefilled
        assert (id(stream) in chosen) == (left >= (1 if ended else policy.least))
        if id(stream) in chosen:
            target = chosen[id(stream)]
            assert stream.prefilled < target <= min(whole, stream.prefilled + most)
            # Only the end of a stream may lie inside a page.
            assert target == whole or target % page == 0
    lefts = [stream.certain - stream.prefilled for stream, _ in todo.increments]
    assert lefts == sorted(lefts)
