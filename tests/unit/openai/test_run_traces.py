"""Test which runs write to a trace, and when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from flashmoa.observe import CallFinished, Event, PromptSent
from flashmoa.observe.trace import read
from flashmoa.openai import run
from tests.unit.openai.fake_server import FakeServer, ask

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def counts(file: Path) -> Counter[type[Event]]:
    """Return how many events of each kind a trace has."""
    return Counter(type(event) for event in read(file))


async def test_an_inner_run_writes_no_trace(server: FakeServer, file: Path) -> None:
    async with server.client() as client, run("outer", trace=file):
        await ask(client, "First.")
        for other in (file, file.with_name("inner.jsonl")):
            async with run("inner", trace=other):
                await ask(client, "Second.")
    assert counts(file)[CallFinished] == 3
    assert not file.with_name("inner.jsonl").exists()


async def test_a_run_that_is_not_entered_keeps_its_trace(server: FakeServer, file: Path) -> None:
    async with server.client() as client, run("first", trace=file):
        await ask(client, "First.")
    before = read(file)
    run("second", trace=file)
    assert read(file) == before


async def test_a_run_after_another_one_replaces_its_trace(server: FakeServer, file: Path) -> None:
    async with server.client() as client:
        for _ in range(2):
            async with run("again", trace=file):
                await ask(client, "First.")
    assert counts(file)[CallFinished] == 1


async def test_runs_at_the_same_time_write_one_trace(server: FakeServer, file: Path) -> None:
    """Each says for itself whether its prompts may be written."""
    has_begun, may_end = anyio.Event(), anyio.Event()

    async def first() -> None:
        async with run("first", trace=file):
            await ask(client, "First.")
            has_begun.set()
            await may_end.wait()
            await ask(client, "Third.")

    async with server.client() as client, anyio.create_task_group() as group:
        group.start_soon(first)
        await has_begun.wait()
        async with run("second", trace=str(file), trace_prompts=True):
            await ask(client, "Second.")
        may_end.set()
    found = counts(file)
    assert (found[CallFinished], found[PromptSent]) == (3, 1)
