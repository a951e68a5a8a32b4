"""Test blocks, tables, loads and costs against plain sets, lists and sums, and known models."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flashmoa.router import cache_tables
from flashmoa.router.cache_tables import Blocks, text_blocks, token_blocks
from flashmoa.router.flops import Measure, UnknownShape, true_flops
from flashmoa.router.prompts import find_blocks
from tests.unit.router.support import (
    MEASURES,
    PROMPTS,
    SIZE,
    STEPS,
    FakeConnections,
    blocks,
    prefixes,
)


@given(one=PROMPTS, other=PROMPTS)
def test_hashes_are_equal_in_the_shared_prefix(one: list[int], other: list[int]) -> None:
    shared = len(prefixes(one) & prefixes(other))
    pairs = zip(blocks(one).hashes, blocks(other).hashes, strict=False)
    assert [a == b for a, b in pairs].count(True) == shared
    assert blocks(one).hashes[:shared] == blocks(other).hashes[:shared]
    assert len(blocks(one).hashes) == len(one) // SIZE


def test_salted_and_text_prompts_share_no_hashes() -> None:
    tokens = list(range(8))
    assert not set(cache_tables.token_blocks(tokens, SIZE, "a").hashes) & set(blocks(tokens).hashes)
    text = cache_tables.text_blocks("x" * 130)
    assert (len(text.hashes), text.length) == (2, 33)
    assert cache_tables.text_blocks("x" * 130 + "\ud800").hashes == text.hashes


class Tables(RuleBasedStateMachine):
    """Compares a table with plain sets of block prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = cache_tables.BlockTable()
        self.committed: set[tuple[int, ...]] = set()
        self.promised: list[list[int]] = []

    @rule(prompt=PROMPTS)
    def promise(self, prompt: list[int]) -> None:
        self.table.promise(blocks(prompt).hashes)
        self.promised.append(prompt)

    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick: random.Random) -> None:
        if self.promised:
            prompt = self.promised.pop(pick.randrange(len(self.promised)))
            self.table.release(blocks(prompt).hashes)

    @rule(prompt=PROMPTS)
    def commit(self, prompt: list[int]) -> None:
        new = prefixes(prompt) - self.committed
        promised = set().union(*map(prefixes, self.promised))
        assert self.table.commit(blocks(prompt).hashes) == len(new & promised)
        self.committed |= prefixes(prompt)

    @rule(prompt=PROMPTS)
    def evict(self, prompt: list[int]) -> None:
        """Evict all that begins with a prompt, as engines evict ends before beginnings."""
        whole = tuple(prompt[: len(prompt) // SIZE * SIZE])
        evicted = {one for one in self.committed if whole and one[: len(whole)] == whole}
        self.table.evict(blocks(list(one)).hashes[-1] for one in evicted)
        self.committed -= evicted

    @rule()
    def clear(self) -> None:
        self.table.evict(None)
        self.committed.clear()

    @rule(prompt=PROMPTS)
    def match(self, prompt: list[int]) -> None:
        known = self.committed.union(*(prefixes(other) for other in self.promised))
        naive = 0
        while tuple(prompt[: (naive + 1) * SIZE]) in known and (naive + 1) * SIZE <= len(prompt):
            naive += 1
        assert self.table.match(blocks(prompt).hashes) == naive
        committed = max((len(one) // SIZE for one in self.committed & prefixes(prompt)), default=0)
        assert self.table.match_committed(blocks(prompt).hashes) == committed

    @invariant()
    def counts(self) -> None:
        assert len(self.table) == len(self.committed)
        assert len(self.table._pending) == len(set().union(*map(prefixes, self.promised)))


TestTables = Tables.TestCase
TestTables.settings = STEPS


@given(prompts=st.lists(PROMPTS, max_size=12), capacity=st.integers(0, 6))
def test_a_bounded_table_forgets_ends_first(prompts: list[list[int]], capacity: int) -> None:
    table = cache_tables.BlockTable(capacity)
    for prompt in prompts:
        table.commit(blocks(prompt).hashes)
        assert len(table) <= capacity
        assert table.match(blocks(prompt).hashes) == min(capacity, len(prompt) // SIZE)


class Loads(RuleBasedStateMachine):
    """Compares a load with a list of the single tokens that are still to be computed."""

    @initialize(measure=MEASURES)
    def begin(self, measure: Measure) -> None:
        self.measure = measure
        self.load = cache_tables.PrefillLoad(measure)
        self.left: list[tuple[str, int]] = []
        self.names = 0

    @rule(start=st.integers(0, 30), more=st.integers(-3, 30))
    def add(self, start: int, more: int) -> None:
        self.names += 1
        self.load.add(str(self.names), start, start + more)
        self.left += [(str(self.names), token) for token in range(start, start + more)]

    @rule(tokens=st.integers(0, 50))
    def executed(self, tokens: int) -> None:
        self.load.subtract_computed(tokens)
        self.left = self.left[tokens:]

    @rule(name=st.integers(0, 20))
    def end(self, name: int) -> None:
        self.load.finish(str(name))
        self.left = [one for one in self.left if one[0] != str(name)]

    @invariant()
    def is_what_is_left(self) -> None:
        assert self.load.total == sum(self.measure.work(t, t + 1) for _, t in self.left)
        assert self.load.tokens == len(self.left)


TestLoads = Loads.TestCase
TestLoads.settings = STEPS


QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
}  # fmt: skip
QWEN3_235B = {
    "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@given(measure=MEASURES, start=st.integers(0, 40), more=st.integers(0, 40))
def test_work_adds_up_tokens_and_pairs(measure: Measure, start: int, more: int) -> None:
    tokens = range(start, start + more)
    expected = sum(measure.linear + measure.pair * (token + 1) for token in tokens)
    assert measure.work(start, start + more) == expected
    assert measure.work(start, start - more) == 0


def test_flops_are_twice_the_parameters() -> None:
    dense = true_flops(QWEN3_8B)
    # Its model card says 6.95 billion parameters without embeddings.
    assert dense.linear / 2 == pytest.approx(6.95e9, rel=0.002)
    assert dense.pair == 36 * 4 * 32 * 128
    sparse = true_flops({"text_config": QWEN3_235B})
    # 22 billion parameters are active, 1.24 billion of them in the two vocabulary matrices.
    assert sparse.linear / 2 == pytest.approx(22e9 - 1.24e9, rel=0.02)
    windowed = true_flops(
        QWEN3_8B
        | {"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128}
    )
    assert windowed.pair == dense.pair // 2
    # A token costs as many pairs as its window has tokens.
    assert windowed.linear - dense.linear == windowed.pair * 128


def test_flops_include_latent_attention() -> None:
    config = {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
    }  # fmt: skip
    # 37 billion of DeepSeek-V3's are active, 1.85 billion of them in two vocabulary matrices.
    assert true_flops(config).linear / 2 == pytest.approx(37e9 - 1.85e9, rel=0.04)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers"),
        (QWEN3_8B | {"hidden_size": "big"}, "hidden_size"),
        (QWEN3_8B | {"layer_types": ["linear_attention"] * 36}, "layer_types"),
        ({k: v for k, v in QWEN3_8B.items() if k != "intermediate_size"}, "intermediate_size"),
    ],
)
def test_unknown_shape_names_the_missing_field(config: dict[str, int], message: str) -> None:
    with pytest.raises(UnknownShape, match=message):
        true_flops(config)


PROMPT = token_blocks([1] * 32)
QUERY, DOCUMENTS = "a" * 200, ["b" * 100, "c" * 100]
ALL = text_blocks(QUERY + "".join(DOCUMENTS))


async def found(body: dict[str, Any], answer: object = None) -> tuple[Blocks, list[Any]]:
    """Return a prompt's blocks if an engine tokenises so, or none is asked, and the questions."""
    connections = FakeConnections(lambda _host, _path: answer)
    engine = None if answer is None else "http://a"
    return await find_blocks(body, connections, engine, {}), connections.asked


async def test_an_engine_tokenises_a_text() -> None:
    answer = {"tokens": [1] * 32}
    assert await found({"text": "a b"}, answer) == (PROMPT, [{"prompt": "a b"}])
    assert await found({"input_ids": [1] * 32}, answer) == (PROMPT, [])
    salted, _ = await found({"prompt": "a b", "cache_salt": "x"}, answer)
    assert salted == token_blocks([1] * 32, salt="x")
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "reasoning_effort": "low", "temperature": 1, "model": "m"}
    asked = {"messages": messages, "reasoning_effort": "low", "model": "m"}
    assert await found(chat, answer) == (PROMPT, [asked])
    for body in ({"query": QUERY, "items": DOCUMENTS}, {"labels": [QUERY], "input": "x"}):
        assert (await found(body, answer))[1] == []


@pytest.mark.parametrize("answer", [(500, {}), {"tokens": ["x"]}, {}, [1]])
async def test_an_untokenised_prompt_has_blocks_of_text(answer: object) -> None:
    assert (await found({"text": QUERY}, answer))[0] == text_blocks(QUERY)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Scores and ranks begin with the query, and classes with the labels.
        ({"query": QUERY, "items": DOCUMENTS}, ALL),
        ({"query": QUERY, "documents": DOCUMENTS}, ALL),
        ({"labels": [QUERY], "input": DOCUMENTS}, ALL),
        # Documents may be objects with any fields.
        ({"query": QUERY, "documents": [{"x": 1}]}, text_blocks(QUERY + '{"x": 1}')),
        ({"query": QUERY, "items": "b"}, text_blocks(QUERY + "b")),
        ({"query": QUERY}, text_blocks(QUERY)),
        ({"query": [1] * 32}, PROMPT),
        ({"query": [1] * 16, "items": [[1] * 16, [1] * 8]}, token_blocks([1] * 40)),
        ({}, Blocks((), 0)),
        # The texts of embeddings share nothing.
        ({"input": QUERY}, text_blocks(QUERY)),
        ({"input": [1] * 32}, PROMPT),
        ({"input": DOCUMENTS}, text_blocks("".join(DOCUMENTS))),
        # A field that is null hides no prompt.
        ({"text": None, "prompt": QUERY}, text_blocks(QUERY)),
        ({"prompt": [QUERY, QUERY]}, text_blocks(QUERY * 2)),
        *(
            ({name: [[1] * 32, [1] * 8, [2] * 4]}, token_blocks([1] * 40 + [2] * 4))
            for name in ("input_ids", "prompt", "input")
        ),
    ],
)
async def test_prompt_of_each_route(body: dict[str, Any], expected: Blocks) -> None:
    assert (await found(body))[0] == expected
