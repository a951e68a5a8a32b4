"""From an agent's last token to the next one's first, through a front end of Dynamo and directly.

The workers take the time of a GPU. ``FLASHMOA_FRONT_END=FILE`` writes the figures.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median

import anyio
import pytest
from flashmoa_bench.harness.modelled_gpus import check_keeps_up, environment_of, read_device

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import tiny_model
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from tests.conftest import GUIDE, ROOT

pytest.importorskip("dynamo.frontend", reason="make test-dynamo has Dynamo")
sys.path.insert(0, str(ROOT / "examples"))
from dynamo_team import MODEL, start_dynamo

pytestmark = pytest.mark.timeout(600)
GPU, GPU_MODEL, SLOWDOWN = "h200_sxm", "Qwen/Qwen3-8B", 4.0
ROUNDS = int(os.environ.get("FLASHMOA_ROUNDS", "1"))
WRITTEN = 128


async def hand_over(client: EngineClient, name: str, *, linked: bool) -> tuple[float, list[str]]:
    """Let an agent read a guide and what another one writes; return its wait and both texts.

    The wait is from the writer's last token to the reader's first, in ms of the GPU's time.
    """
    events: list[Event] = []
    ahead = "text" if linked else "nothing"
    async with Workflow(client, ahead=ahead, listener=events.append) as flow:
        system = {"role": "system", "content": f"{name} {GUIDE.read_text()[:8000]}"}
        written = flow.ask(
            [{"role": "user", "content": f"{name} writes."}],
            name="writer", max_tokens=WRITTEN, temperature=0,
        )  # fmt: skip
        read = flow.ask(
            [system, {"role": "user", "content": f"Read: {written}"}],
            name="reader", max_tokens=4, temperature=0,
        )  # fmt: skip
        texts = [await written, await read]
    by_agent = {call.agent: call for call in calls(events)}
    ended, first = by_agent["writer"].ended, by_agent["reader"].first_token
    assert ended is not None and first is not None
    return (first - ended.at) * 1000 / SLOWDOWN, texts


async def hand_over_at_once(
    client: EngineClient, name: str, copies: int, *, linked: bool
) -> tuple[list[float], list[list[str]]]:
    found: list[tuple[float, list[str]]] = []

    async def run(copy: int) -> None:
        found.append(await hand_over(client, f"{copy} {name}", linked=linked))

    async with anyio.create_task_group() as group:
        for copy in range(copies):
            group.start_soon(run, copy)
    return [wait for wait, _ in found], sorted(texts for _, texts in found)


async def compare(
    ways: dict[str, tuple[EngineClient, bool]], engines: list[str], copies: int
) -> list[dict[str, float | int | str]]:
    """Hand over ``copies`` times at once in each way; return a row for each way, in ms.

    ``cached`` is the lower bound: the reader's whole prompt is in the cache.
    """
    waits: dict[str, list[float]] = {way: [] for way in ways}
    cached: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS):
        texts: list[list[list[str]]] = []
        for way, (client, linked) in ways.items():
            for url in engines:
                async with EngineClient(url) as engine:
                    await engine.flush_cache()
            for found, is_linked in ((waits, linked), (cached, False)):
                took, written = await hand_over_at_once(
                    client, f"{number} of {copies}", copies, linked=is_linked
                )
                found[way] += took
                texts.append(written)
        assert all(written == texts[0] for written in texts)
    return [
        {"at once": copies, "way": way, "ms": median(took), "cached": median(cached[way])}
        for way, took in waits.items()
    ]


async def test_handoffs_through_a_front_end_and_direct_ones_give_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The direct ones have one of the two workers."""
    for name, value in environment_of(GPU, GPU_MODEL, slowdown=SLOWDOWN).items():
        monkeypatch.setenv(name, value)
    model = tiny_model("small", [GUIDE], ROOT / ".cache" / "models")
    async with (
        start_dynamo(f"hash:{model}", tmp_path, "--enable-cache-report") as dynamo,
        EngineClient(dynamo.url, model=MODEL) as front_end,
        EngineClient(dynamo.engines[0], model=MODEL) as direct,
    ):
        ways = {
            "direct, unlinked": (direct, False),
            "direct, linked": (direct, True),
            "Dynamo, unlinked": (front_end, False),
            "Dynamo, linked": (front_end, True),
        }
        rows = [row for copies in (1, 4) for row in await compare(ways, dynamo.engines, copies)]
        devices = {url: await read_device(url) for url in dynamo.engines}
    print(f"\n{GPU}, {GPU_MODEL}; from last token to first, ms; and if all of the prompt is cached")
    for row in rows:
        print("{at once} at once  {way:<18}  {ms:7.1f}  {cached:7.1f}".format(**row))
    if file := os.environ.get("FLASHMOA_FRONT_END"):
        check_keeps_up({url: device for url, device in devices.items() if device}, "SLOWDOWN")
        settings = {"gpu": GPU, "model": GPU_MODEL, "slowdown": SLOWDOWN, "rounds": ROUNDS}
        text = json.dumps({**settings, "rows": rows}, indent=1)
        await anyio.Path(file).write_text(f"{text}\n")
