"""``SchedulerStreams`` on two ranks, with messages and steps in any order."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from flashmoa_sglang.messages import StreamProgress, StreamTokens
from flashmoa_sglang.scheduler import streams as module
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.scheduler.request import state_of
from flashmoa_sglang.scheduler.streams import SchedulerStreams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine as Machine
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.unit.plugin.scheduler.fakes import MANY, FakeScheduler, Tree, new_tokens, opening

IDS = st.sampled_from("abcd")
# Few different tokens, so that many prompts begin alike.
TOKENS = st.lists(st.integers(0, 1), max_size=20)


@dataclass
class Known:
    """The expected state of a stream.

    ``prefilled``, ``kept``: number of tokens with KV, and of valid tokens of a running increment.
    """

    tokens: list[int] = field(default_factory=list)
    opened: bool = False
    claimed: bool = False
    closed: bool = False
    prefilled: int = 0
    kept: int = 0
    increments: list[Any] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return self.opened and not (self.claimed or self.closed)


class Pages(Tree):
    """A radix tree of whole pages; with EAGLE, of pairs of tokens."""

    def __init__(self, page: int, beyond: int) -> None:
        super().__init__(MANY)
        self.page, self.beyond = page, beyond

    def match_and_pin(self, tokens: list[int]) -> tuple[Pin, int]:
        pin, same = super().match_and_pin(tokens)
        return pin, max(0, same - self.beyond) // self.page * self.page


class Ranks(Machine):
    """Two tensor-parallel ranks that get the same messages in the same steps."""

    @initialize(page=st.sampled_from([1, 4]), eagle=st.booleans())
    def start(self, page: int, eagle: bool) -> None:
        self.page, self.beyond = page, int(eagle)
        self.ranks = [FakeScheduler(eagle=eagle), FakeScheduler(eagle=eagle)]
        for rank in self.ranks:
            rank.page_size = page
            rank.tree_cache = rank.flashmoa.pins._tree_cache = Pages(page, self.beyond)
        # In the order of their first messages.
        self.known: dict[str, Known] = {}
        # The running increments of both ranks, and whether their KV has been published.
        self.running: list[tuple[list[Any], bool]] = []
        for id_ in "ab":
            self.open(id_, [], [0, 1] * 10)

    def streams(self) -> list[SchedulerStreams]:
        return [rank.streams for rank in self.ranks]

    def pages(self, tokens: int) -> int:
        """Return how many of a prompt's first tokens the radix tree keeps."""
        return max(0, tokens - self.beyond) // self.page * self.page

    @rule(id_=IDS, tokens=TOKENS, grows=st.booleans())
    def extend(self, id_: str, tokens: list[int], grows: bool) -> None:
        if tokens:
            self.tell(new_tokens(id_, tokens, grows=grows), id_).tokens += tokens

    @rule(id_=IDS)
    def end_text(self, id_: str) -> None:
        self.tell(StreamTokens((), (id_,)), id_)

    @rule(id_=IDS, tokens=st.integers(0, 30))
    def take_back(self, id_: str, tokens: int) -> None:
        known = self.tell(StreamTokens((), kept=((id_, tokens),)), id_)
        del known.tokens[tokens:]
        known.kept = min(known.kept, tokens)
        known.prefilled = min(known.prefilled, self.pages(tokens))

    def tell(self, message: StreamTokens, id_: str) -> Known:
        for streams in self.streams():
            streams.extend(message)
        return self.known.setdefault(id_, Known())

    @rule(id_=IDS, before=TOKENS, after=TOKENS)
    def open(self, id_: str, before: list[int], after: list[int]) -> None:
        """Open a stream. Some of its tokens come ``before`` its request."""
        if id_ in self.known and self.known[id_].opened:
            return
        self.extend(id_, before, grows=False)
        for rank in self.ranks:
            rank.streams.open(id_, opening(id_), rank.make_request)
        self.known.setdefault(id_, Known()).opened = True
        self.extend(id_, after, grows=True)

    @rule(id_=IDS, tokens=st.integers(1, 30))
    def cache(self, id_: str, tokens: int) -> None:
        """Let another request compute the beginning of a prompt."""
        if id_ in self.known:
            for rank in self.ranks:
                rank.tree_cache.cached.append(self.known[id_].tokens[:tokens])

    @rule()
    def keep_cached(self) -> None:
        for streams in self.streams():
            streams.keep_cached()
        self.read_matches()

    def read_matches(self) -> None:
        """Note the streams' tokens that other requests have computed."""
        for streams in self.streams():
            streams.report()
        sent = [[m for m in rank.sent if isinstance(m, StreamProgress)] for rank in self.ranks]
        assert sent[0] == sent[1]
        for message in sent[0]:
            for id_, tokens, computed, seconds, _ in message.increments:
                if tokens and not seconds:
                    assert not computed and tokens == self.pages(tokens + self.beyond)
                    self.known[id_].prefilled = tokens
        for rank in self.ranks:
            rank.sent.clear()

    @precondition(lambda self: any(known.opened for known in self.known.values()))
    @rule(
        tokens=st.one_of(st.just(MANY), st.integers(0, 30)),
        room=st.one_of(st.just(MANY), st.integers(-5, 40)),
        most=st.one_of(st.just(16), st.integers(0, 3)),
        before=st.sampled_from([None, 0.0, 500.0, inf]),
        joins=st.sampled_from([None, True, False]),
    )
    def make(self, tokens: int, room: int, most: int, before: Any, joins: bool | None) -> None:
        """Make increments, which join the next batch, or do not, or stay in the queue for now."""
        made = [streams.make(tokens, room, most, before=before) for streams in self.streams()]
        before_matches = {id_: known.prefilled for id_, known in self.known.items()}
        self.read_matches()
        self.note(made)
        assert len(made[0]) <= most
        new = [len(req.origin_input_ids) - self.of(req).prefilled for req in made[0]]
        assert sum(new) <= max(0, tokens) + self.beyond * len(new)
        found = sum(known.prefilled - before_matches[id_] for id_, known in self.known.items())
        assert not new or sum(new) + found <= max(0, room) + self.beyond * len(new)
        if joins is not None:
            self.what_could_be_prefilled_is_known()
            for position in reversed(range(len(self.running) - len(new), len(self.running))):
                self.leave_queue(position, joins)

    def note(self, made: list[list[Any]]) -> None:
        """Check increments of both ranks, and note that they run."""
        first, second = ([(req.rid, req.origin_input_ids) for req in reqs] for reqs in made)
        assert first == second
        for pair in zip(*made, strict=True):
            known, tokens = self.of(pair[0]), pair[0].origin_input_ids
            assert known.waits and known.increments == []
            assert len(tokens) == self.pages(len(tokens)) + self.beyond
            assert tokens == known.tokens[: len(tokens)]
            assert self.pages(len(tokens)) > known.prefilled
            known.increments.append(pair[0])
            known.kept = len(tokens)
            self.running.append(([*pair], False))

    def of(self, req: Any) -> Known:
        return self.known[state_of(req).increment_of or ""]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), joins=st.booleans())
    def build_batch(self, data: st.DataObject, joins: bool) -> None:
        self.leave_queue(data.draw(st.integers(0, len(self.running) - 1)), joins)

    def leave_queue(self, position: int, joins: bool) -> None:
        """Let an increment join the batch, so that its KV is published, or discard it."""
        pair, published = self.running[position]
        if published:
            return
        for streams, req in zip(self.streams(), pair, strict=True):
            (streams.settle if joins else streams.discard)(req)
        if joins:
            self.publish(pair)
            self.running[position] = (pair, True)
        else:
            self.of(pair[0]).increments.clear()
            del self.running[position]

    def publish(self, pair: list[Any]) -> None:
        known = self.of(pair[0])
        known.increments.clear()
        known.prefilled = self.pages(known.kept)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        pair, published = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for streams, req in zip(self.streams(), pair, strict=True):
            streams.finish(req, 0.1)
        if not published:
            self.publish(pair)

    @rule(id_=IDS, claimed=st.booleans())
    def claim(self, id_: str, claimed: bool) -> None:
        known = self.known.get(id_)
        if known and known.opened and known.prefilled and not known.closed:
            for streams in self.streams():
                streams.claim(id_, claimed=claimed)
            known.claimed = claimed

    @rule(id_=IDS)
    def close(self, id_: str) -> None:
        known = self.known.setdefault(id_, Known())
        if known.opened and not known.prefilled:
            return  # So that most streams are prefilled.
        for streams in self.streams():
            streams.end(id_)
        known.closed = True

    @rule(id_=st.one_of(st.none(), IDS))
    def lose(self, id_: str | None) -> None:
        for streams in self.streams():
            streams.lose(id_)
        for other, known in self.known.items():
            if id_ in (None, other):
                known.prefilled = 0

    @invariant()
    def nothing_stays_in_the_queue(self) -> None:
        assert all(rank.waiting_queue == [] for rank in self.ranks)

    @invariant()
    def what_could_be_prefilled_is_known(self) -> None:
        waiting = [
            new
            for known in self.known.values()
            if known.waits
            and not known.increments
            and (new := self.pages(len(known.tokens)) - known.prefilled)
        ]
        assert [streams.leading_tokens(None)[0] for streams in self.streams()] == [sum(waiting)] * 2

    def teardown(self) -> None:
        """Complete the open streams."""
        if not hasattr(self, "known"):
            return
        made = [streams.make(MANY, MANY, 16) for streams in self.streams()]
        self.read_matches()
        self.note(made)
        for known in self.known.values():
            if known.waits:
                assert known.increments or self.pages(len(known.tokens)) == known.prefilled


@pytest.mark.usefixtures("fake_release", "any_increment")
def test_ranks_make_the_same_growing_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST_MATCHED", 3)
    run_state_machine_as_test(Ranks, settings=settings(max_examples=100, stateful_step_count=40))
