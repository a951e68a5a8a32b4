"""Links through a front end of Dynamo with two workers; ``make test-dynamo`` runs these."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import tiny_model
from flashmoa.observe import Event, LinkClosed, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.observe.summary import link_status
from flashmoa.openai import AsyncOpenAI, run
from tests.conftest import GUIDE, ROOT

pytest.importorskip("dynamo.frontend", reason="make test-dynamo has Dynamo")
sys.path.insert(0, str(ROOT / "examples"))
from dynamo_team import MODEL, Dynamo, start_dynamo

pytestmark = pytest.mark.anyio
PAGE = 16


@pytest.fixture
async def dynamo(tmp_path: Path) -> AsyncGenerator[Dynamo]:
    model = tiny_model("small", [GUIDE], ROOT / ".cache" / "models")
    pool = ("--max-total-tokens", "12000", "--enable-cache-report")
    async with start_dynamo(model, tmp_path, *pool) as running:
        yield running


def prompts(name: str) -> tuple[str, str]:
    """Return what two agents are told, of which neither begins as that of another pair."""
    guide = GUIDE.read_text()
    return f"{name} writes. {guide[:2000]}", f"{name} is checked. {guide[2000:5000]}"


async def write_and_check(
    client: EngineClient, name: str, events: list[Event], *, linked: bool = True, tokens: int = 100
) -> tuple[list[str], float]:
    """Let one agent check what another writes; return both texts, and the share that was cached."""
    of_writer, of_checker = prompts(name)
    ahead = "text" if linked else "nothing"
    async with Workflow(client, ahead=ahead, listener=events.append) as flow:
        draft = flow.ask(
            [{"role": "user", "content": of_writer}],
            name="writer", max_tokens=tokens, temperature=0,
        )  # fmt: skip
        system = {"role": "system", "content": of_checker}
        checked = flow.ask(
            [system, {"role": "user", "content": f"Check: {draft}"}],
            name="checker", max_tokens=20, temperature=0,
        )  # fmt: skip
        texts = [await draft, await checked]
        assert checked.usage is not None
        return texts, (checked.usage.cached_tokens or 0) / checked.usage.prompt_tokens


async def count_streams(dynamo: Dynamo) -> int:
    counts: list[int] = []
    for url in dynamo.engines:
        async with EngineClient(url) as engine:
            counts.append((await engine.info()).prompt_streams)
    return sum(counts)


async def test_links_through_a_front_end(dynamo: Dynamo) -> None:
    """Answers are the same, prompts are there, and streams are used where they were opened."""
    events: list[Event] = []
    async with EngineClient(dynamo.url, model=MODEL) as client:
        for pair in range(4):
            texts, cached = await write_and_check(client, f"pair {pair}", events)
            assert cached > 0.8  # The end is left to the request; see LAG in tests.integration.
            assert await count_streams(dynamo) == 0
            again, _ = await write_and_check(client, f"pair {pair}", [], linked=False)
            assert texts == again
        opened = [event.stream_id for event in events if isinstance(event, LinkOpened)]
        assert len(opened) == 4
        # Front ends tell nothing of streams; the engines do.
        assert [link_status(call) for call in calls(events)] == ["", "hit"] * 4
        # Dynamo divides the pairs among its workers.
        assert len({stream_id.split()[0] for stream_id in opened}) == 2

    async with AsyncOpenAI(base_url=f"{dynamo.url}/v1", api_key="-") as openai:
        for number in range(2):
            async with run("pair") as report:
                text = ""
                for name in ("writer", "checker"):
                    content = f"{prompts(f'run {number}')[name == 'checker']}\n{text}"
                    answer = await openai.chat.completions.create(
                        model=MODEL, max_tokens=60, temperature=0,
                        messages=[{"role": "user", "content": content}],
                    )  # fmt: skip
                    text = answer.choices[0].message.content or ""
    reasons = [event.reason for event in report.events if isinstance(event, LinkClosed)]
    assert "used" in reasons, report


def kill_machine(pid: int) -> None:
    """Kill a worker as the end of its machine does.

    Dynamo's sidecar goes first: if it outlives its engine, it reports an error for each request
    that runs, linked or not, and the front end does not move these.
    """
    worker = psutil.Process(pid)
    processes = [worker, *worker.children(recursive=True)]
    processes.sort(key=lambda each: "sidecar" not in " ".join([each.name(), *each.cmdline()]))
    for process in processes:
        process.suspend()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def test_a_worker_that_dies_changes_no_answer(dynamo: Dynamo) -> None:
    """Its requests are moved by the front end, and links go on elsewhere within seconds."""
    async with EngineClient(dynamo.url, model=MODEL) as client:
        expected = [
            (await write_and_check(client, name, [], linked=False, tokens=300))[0]
            for name in ("first", "second", "third")
        ]
        events: list[Event] = []
        results: dict[str, list[str]] = {}

        async def write(name: str) -> None:
            results[name], _ = await write_and_check(client, name, events, tokens=300)

        async with anyio.create_task_group() as group:
            for name in ("first", "second"):
                group.start_soon(write, name)
            with anyio.fail_after(60):
                while sum(isinstance(event, LinkOpened) for event in events) < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            kill_machine(dynamo.workers[0].pid)
        events.clear()
        died = anyio.current_time()
        await write("third")
        assert [results[name] for name in ("first", "second", "third")] == expected
        opened = [event for event in events if isinstance(event, LinkOpened)]
        assert [event.stream_id.split()[0] for event in opened] == [dynamo.engines[1]]
        print(f"linked again {anyio.current_time() - died:.1f} s after the worker's end")
