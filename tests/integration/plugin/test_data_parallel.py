"""Prompt streams on an engine with two data-parallel ranks, each with its own KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngines
from tests.integration.support import TWO_REPLICAS, complete_stream, generate, start_special_engine

pytestmark = [pytest.mark.anyio, pytest.mark.nightly]


async def test_siblings_share_a_rank_and_other_streams_are_spread(
    engines: LocalEngines, model: Path, words: Callable[[int, int], str]
) -> None:
    shared = words(600, 700)
    async with (
        start_special_engine(engines, model, "--dp-size", "2", environment=TWO_REPLICAS) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        texts = [shared + words(50, 710 + number)[3:] for number in range(4)]
        streams = [await client.open_stream(text=text) for text in texts]
        states = [await complete_stream(client, stream.id) for stream in streams]
        computed = sum(state.computed_tokens for state in states)
        assert computed < 600 + 4 * 50 + 4 * 8
        stranger = await client.open_stream(text=words(300, 720))
        await complete_stream(client, stranger.id)
        pins = [rank.pinned_streams for rank in (await client.info()).kv]
        assert sorted(pins) == [1, 4]
        for text, stream in zip(texts, streams, strict=True):
            _, usage = await generate(client, text + " of", 2, stream.id)
            assert usage.late_tokens is not None and usage.late_tokens < 20
        await client.delete_stream(stranger.id)
