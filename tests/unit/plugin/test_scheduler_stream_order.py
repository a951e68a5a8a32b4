"""``SchedulerStreams`` with what happens to streams in any order, on two ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from flashmoa_sglang.messages import StreamTokens
from flashmoa_sglang.scheduler.request import state_of
from flashmoa_sglang.scheduler.streams import SchedulerStreams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.plugin.fake_scheduler import FakeScheduler, new_tokens, opening

MANY = 1 << 20
IDS = st.sampled_from("abcdef")
TOKENS = st.lists(st.integers(0, 9), max_size=20)


@dataclass
class Known:
    """What a stream is known to be; ``prefilled`` is a number of tokens."""

    tokens: list[int] = field(default_factory=list)
    opened: bool = False
    claimed: bool = False
    closed: bool = False
    prefilled: int = 0
    increments: list[Any] = field(default_factory=list)


class Ranks(RuleBasedStateMachine):
    """Two tensor-parallel ranks that get the same messages in the same steps."""

    @initialize(page=st.sampled_from([1, 4]))
    def start(self, page: int) -> None:
        self.page = page
        self.ranks = [FakeScheduler(), FakeScheduler()]
        for rank in self.ranks:
            rank.page_size = page
            rank.disable_radix_cache = True
        self.known = {id_: Known() for id_ in "abcdef"}
        # The increments that run, of both ranks, and whether their KV has been published.
        self.running: list[tuple[list[Any], bool]] = []

    def streams(self) -> list[SchedulerStreams]:
        return [rank.flashmoa.streams for rank in self.ranks]

    @rule(id_=IDS, tokens=TOKENS, grows=st.booleans())
    def extend(self, id_: str, tokens: list[int], grows: bool) -> None:
        for streams in self.streams():
            streams.extend(new_tokens(id_, tokens, grows=grows))
        self.known[id_].tokens += tokens

    @rule(id_=IDS)
    def end_text(self, id_: str) -> None:
        for streams in self.streams():
            streams.extend(StreamTokens((), (id_,)))

    @rule(id_=IDS, before=TOKENS, after=TOKENS)
    def open(self, id_: str, before: list[int], after: list[int]) -> None:
        """Open a stream, of whose first tokens some come before its request."""
        if not self.known[id_].opened:
            self.extend(id_, before, grows=False)
            for rank in self.ranks:
                rank.flashmoa.streams.open(id_, opening(id_), rank.make_request)
            self.known[id_].opened = True
            self.extend(id_, after, grows=True)

    @precondition(lambda self: any(known.opened for known in self.known.values()))
    @rule(
        tokens=st.one_of(st.just(MANY), st.integers(0, 30)),
        least=st.integers(1, 10),
        room=st.one_of(st.just(MANY), st.integers(-5, 40)),
        most=st.one_of(st.just(16), st.integers(0, 3)),
        before=st.sampled_from([None, 0.0, 500.0, inf]),
    )
    def make(self, tokens: int, least: int, room: int, most: int, before: float | None) -> None:
        made = [
            streams.make(tokens, least, room, most, before=before) for streams in self.streams()
        ]
        self.note(made)
        assert len(made[0]) <= most
        new = [len(req.origin_input_ids) - self.of(req).prefilled for req in made[0]]
        assert sum(new) <= max(0, min(tokens, room))

    def note(self, made: list[list[Any]]) -> None:
        """Check increments of both ranks, and note that they run."""
        first, second = ([(req.rid, req.origin_input_ids) for req in reqs] for reqs in made)
        assert first == second
        for pair in zip(*made, strict=True):
            known, tokens = self.of(pair[0]), pair[0].origin_input_ids
            assert known.opened and not (known.claimed or known.closed)
            assert known.increments == []
            assert len(tokens) % self.page == 0 and len(tokens) > known.prefilled
            assert tokens == known.tokens[: len(tokens)]
            known.increments.append(pair[0])
            self.running.append(([*pair], False))

    def of(self, req: Any) -> Known:
        return self.known[state_of(req).increment_of or ""]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), joins=st.booleans())
    def build_batch(self, data: st.DataObject, joins: bool) -> None:
        """Let an increment join the batch, so that its KV is published, or discard it."""
        position = data.draw(st.integers(0, len(self.running) - 1))
        pair, published = self.running[position]
        if published:
            return
        for streams, req in zip(self.streams(), pair, strict=True):
            (streams.settle if joins else streams.discard)(req)
        self.of(pair[0]).increments.clear()
        if joins:
            self.of(pair[0]).prefilled = len(pair[0].origin_input_ids)
            self.running[position] = (pair, True)
        else:
            del self.running[position]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        pair, published = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for streams, req in zip(self.streams(), pair, strict=True):
            streams.finish(req, 0.1)
        if not published:
            self.of(pair[0]).increments.clear()
            self.of(pair[0]).prefilled = len(pair[0].origin_input_ids)

    @rule(id_=IDS)
    def claim(self, id_: str) -> None:
        known = self.known[id_]
        if known.opened and known.prefilled and not known.closed:
            for streams in self.streams():
                streams.claim(id_)
            known.claimed = True

    @rule(id_=IDS)
    def close(self, id_: str) -> None:
        if self.known[id_].opened and not self.known[id_].prefilled:
            return  # So that most streams are prefilled.
        for streams in self.streams():
            streams.end(id_)
        self.known[id_].closed = True

    @rule(id_=st.one_of(st.none(), IDS))
    def lose(self, id_: str | None) -> None:
        for streams in self.streams():
            streams.lose(id_)
        for known in self.known.values() if id_ is None else [self.known[id_]]:
            known.prefilled = 0

    @invariant()
    def nothing_stays_in_the_queue(self) -> None:
        assert all(rank.waiting_queue == [] for rank in self.ranks)

    @invariant()
    def what_could_be_prefilled_is_wanted(self) -> None:
        waiting = [
            len(known.tokens) // self.page * self.page > known.prefilled
            for known in self.known.values()
            if known.opened and not (known.claimed or known.closed or known.increments)
        ]
        assert [streams.can_prefill_more() for streams in self.streams()] == [any(waiting)] * 2

    def teardown(self) -> None:
        """Complete what is still open."""
        if not hasattr(self, "known"):
            return
        self.note([streams.make(MANY, 1, MANY, 16) for streams in self.streams()])
        for known in self.known.values():
            if known.opened and not (known.claimed or known.closed):
                assert known.increments or len(known.tokens) - known.prefilled < self.page


@pytest.mark.usefixtures("fake_release")
def test_increments_are_prefixes_that_grow_and_the_same_on_both_ranks() -> None:
    run_state_machine_as_test(Ranks, settings=settings(max_examples=100, stateful_step_count=40))
