"""Links through a front end of Dynamo with two workers; ``make test-dynamo`` runs these."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import WITHOUT_OVERLAP, tiny_model
from flashmoa.observe import Event, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.observe.summary import link_status
from flashmoa.openai import AsyncOpenAI, run
from tests.conftest import GUIDE, ROOT
from tests.integration.ears import listening, text_of
from tests.integration.support import fetch_kv_state
from tests.waiting import until

pytest.importorskip("dynamo.frontend", reason="make test-dynamo has Dynamo")
sys.path.insert(0, str(ROOT / "examples"))
from dynamo_team import MODEL, Dynamo, start_dynamo

# Workers take a minute to start, and two on a busy machine.
pytestmark = pytest.mark.timeout(600)
HANG_SECONDS = 4


def serve_dynamo(
    folder: Path, *more: str, pool: int = 12000, workers: int = 2
) -> AbstractAsyncContextManager[Dynamo]:
    model = tiny_model("small", [GUIDE], ROOT / ".cache" / "models")
    arguments = ["--max-total-tokens", str(pool), "--enable-cache-report", *WITHOUT_OVERLAP]
    return start_dynamo(model, folder, *arguments, *more, workers=workers)


@pytest.fixture
async def dynamo(tmp_path: Path) -> AsyncGenerator[Dynamo]:
    async with serve_dynamo(tmp_path) as running:
        yield running


def prompts(name: str) -> tuple[str, str]:
    """Return the prompts of two agents. Prompts of different pairs begin differently."""
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
        # Dynamo divides pairs among its workers, if not necessarily the first ones.
        for pair in range(20):
            texts, cached = await write_and_check(client, f"pair {pair}", events)
            assert cached > 0.8  # The end is left to the request; see LAG in tests.integration.
            assert await count_streams(dynamo) == 0
            again, _ = await write_and_check(client, f"pair {pair}", [], linked=False)
            assert texts == again
            if len({link.stream_id.split()[0] for link in opened(events)}) == 2:
                break
        assert len(opened(events)) == pair + 1
        # Front ends tell nothing of streams; the engines do.
        assert [link_status(call) for call in calls(events)] == ["whole", "hit"] * (pair + 1)
        assert pair < 19, "all went to one worker"

    async with AsyncOpenAI(base_url=f"{dynamo.url}/v1", api_key="-") as openai:
        for number in range(2):
            async with run("pair") as report:
                text = f"Task {number}."
                for content in prompts("run"):
                    content = f"{content}\n{text}"
                    # With the same answer as before, all of the KV would be there already.
                    answer = await openai.chat.completions.create(
                        model=MODEL, max_tokens=60, temperature=1, seed=number,
                        messages=[{"role": "user", "content": content}],
                    )  # fmt: skip
                    text = answer.choices[0].message.content or ""
    # An engine leaves the tokens of so short an answer to the request.
    first, second = [link_status(call) for call in calls(report.events)]
    assert first == "first" and second in ("hit", "no gain"), report


async def test_calls_are_heard_at_their_worker(tmp_path: Path) -> None:
    """Dynamo makes the id in its header the id of SGLang's request, and parses the text itself."""
    async with (
        serve_dynamo(tmp_path, workers=1) as dynamo,
        httpx.AsyncClient(base_url=dynamo.url, timeout=60) as front_end,
        httpx.AsyncClient(base_url=dynamo.engines[0], timeout=60) as worker,
        listening(worker) as ear,
    ):
        for number in range(2):
            call = ear.name_call()
            message = {"role": "user", "content": f"{number}: {GUIDE.read_text()[:200]}"}
            body = {"model": MODEL, "messages": [message], "max_tokens": 40, "temperature": 0}
            headers = {"X-Dynamo-Request-Id": str(uuid.UUID(call))}
            answer = await front_end.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            heard = await ear.until_end(call)
            assert text_of(heard, "text") == choice["message"]["content"]
            assert heard[-1]["end"] == choice["finish_reason"]


def processes_of(worker: psutil.Process) -> list[psutil.Process]:
    """Return a worker's processes, Dynamo's sidecar first.

    If the sidecar outlives its engine, it reports an error for each running request, linked or not,
    and the front end does not move these requests. If a machine ends, all its processes end.
    """
    processes = [worker, *worker.children(recursive=True)]
    return sorted(processes, key=lambda each: not is_named("sidecar", each))


def is_named(word: str, process: psutil.Process) -> bool:
    return word in " ".join([process.name(), *process.cmdline()])


async def die(worker: psutil.Process) -> None:
    processes = processes_of(worker)
    for process in processes:
        process.suspend()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def hang(worker: psutil.Process) -> None:
    processes = processes_of(worker)
    for process in processes:
        process.suspend()
    await anyio.sleep(HANG_SECONDS)
    for process in processes:
        process.resume()


async def drain(worker: psutil.Process) -> None:
    worker.terminate()


async def test_faults_of_workers_change_no_answer(dynamo: Dynamo) -> None:
    """Requests are moved by the front end, and links by the client, also to workers that join."""
    async with EngineClient(dynamo.url, model=MODEL) as client:

        async def write(name: str, events: list[Event], *, linked: bool = True) -> list[str]:
            return (await write_and_check(client, name, events, linked=linked, tokens=300))[0]

        names = [f"{fault} {number}" for fault in ("hang", "drain", "die") for number in range(2)]
        expected = {name: await write(name, [], linked=False) for name in [*names, "last"]}
        print("\nfault of a worker     its links are open elsewhere after")
        ended: set[str] = set()

        async def endure(fault: Callable[[psutil.Process], Awaitable[None]]) -> None:
            events: dict[str, list[Event]] = {f"{fault.__name__} {n}": [] for n in range(2)}
            texts: dict[str, list[str]] = {}
            # The fault hits the worker of this workflow, perhaps also the other's.
            *_, hit = events

            async def write_one(name: str) -> None:
                texts[name] = await write(name, events[name])

            async with anyio.create_task_group() as group:
                for name in events:
                    group.start_soon(write_one, name)
                with anyio.fail_after(60):
                    while not all(map(opened, events.values())):  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                engine, _ = opened(events[hit])[0].stream_id.split()
                if fault is not hang:
                    ended.add(engine)
                at = time.time()
                await fault(psutil.Process(dynamo.workers[dynamo.engines.index(engine)].pid))
            assert texts == {name: expected[name] for name in texts}
            links = opened(events[hit])
            # While the front end sends requests to a hanging worker, links stay there, too.
            assert len(links) > 1 or fault is hang
            after = [f"{link.at - at:.1f} s on {link.stream_id.split()[0]}" for link in links[1:]]
            print(f"{fault.__name__:<20}  {', '.join(after)}")

        async with anyio.create_task_group() as joining:
            joining.start_soon(dynamo.add_worker)
            await endure(hang)
            await endure(drain)
        await endure(die)
        events: list[Event] = []
        assert await write("last", events) == expected["last"]
        (last,) = opened(events)
        assert last.stream_id.split()[0] in set(dynamo.engines) - ended


async def test_what_a_worker_has_goes_on_elsewhere_while_its_scheduler_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its HTTP server answers all the while, as with a GPU that hangs. It joins again after."""
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "4")
    async with serve_dynamo(tmp_path) as dynamo, EngineClient(dynamo.url, model=MODEL) as client:
        expected, _ = await write_and_check(client, "pair", [], linked=False, tokens=300)
        events: list[Event] = []
        texts: list[list[str]] = []

        async def write() -> None:
            texts.append((await write_and_check(client, "pair", events, tokens=300))[0])

        with anyio.fail_after(90):
            async with anyio.create_task_group() as group:
                group.start_soon(write)
                await until(lambda: bool(opened(events)))
                engine, _ = opened(events)[0].stream_id.split()
                worker = psutil.Process(dynamo.workers[dynamo.engines.index(engine)].pid)
                processes = worker.children(recursive=True)
                (scheduler,) = [each for each in processes if is_named("scheduler", each)]
                scheduler.suspend()
            assert texts == [expected] and not await takes_requests(dynamo, engine)
            scheduler.resume()
            while not await takes_requests(dynamo, engine):  # noqa: ASYNC110
                await anyio.sleep(0.1)


async def takes_requests(dynamo: Dynamo, engine: str) -> bool:
    """Return whether the front end sends requests to an engine, asked anew."""
    async with EngineClient(dynamo.url) as client:
        return await client.takes_requests(f"{engine} stream")


async def test_a_prompt_is_held_while_tools_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine is sent token ids only; others fill the pool meanwhile."""
    monkeypatch.setenv("DYN_TOOL_CALL_PARSER", "hermes")
    call = r'<tool_call>\{"name": "weather", "arguments": \{"city": "(Rome|Oslo)"\}\}</tool_call>'
    arguments = ["--tool-call-parser", "hermes"]
    arguments += ["--preferred-sampling-params", json.dumps({"regex": call})]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    guide = GUIDE.read_text()
    messages: list[Any] = [{"role": "user", "content": guide[:2000]}]
    weather = {"name": "weather", "parameters": parameters}
    async with (
        serve_dynamo(tmp_path, *arguments, pool=4000, workers=1) as dynamo,
        EngineClient(dynamo.engines[0]) as engine,
        AsyncOpenAI(base_url=f"{dynamo.url}/v1", api_key="-") as openai,
    ):

        async def ask(tokens: int) -> tuple[Any, int]:
            answer = await openai.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=tokens, temperature=1,
                tools=[{"type": "function", "function": weather}],
            )  # fmt: skip
            usage = answer.usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            return answer.choices[0].message, usage.prompt_tokens - cached

        said, whole = await ask(200)
        with anyio.fail_after(10):
            while not (await fetch_kv_state(engine)).pinned_streams:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        for number in range(3):
            await engine.prefill_only(text=f"{number} {guide[:6000]}")
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "It rains."}
        messages += [said.model_dump(exclude_none=True), result]
        _, computed = await ask(8)
        assert computed < whole / 4
        assert (await engine.info()).prompt_streams == 0


def opened(events: list[Event]) -> list[LinkOpened]:
    return [event for event in events if isinstance(event, LinkOpened)]
