"""``--flashmoa-asyncep`` on real engines: the same answers, in less memory of the device."""

import os
import re
import signal
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from flashmoa_cpu.tiny_model import build
from flashmoa_sglang.sglang.releases import RELEASE

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines, wait_for_costs
from flashmoa.errors import EngineError
from tests.integration.support import (
    EXPERTS,
    GREEDY,
    Words,
    generate,
    logprobs,
    nightly,
    post_json,
    slow,
    start_special_engine,
)
from tests.waiting import until

# An expert has three matrices, in float32.
LAYER_BYTES = EXPERTS.experts * 3 * EXPERTS.hidden * (EXPERTS.intermediate // 2) * 4
LONG = 150
# The tests wait until an engine has measured its costs, which takes longer with larger forwards.
BRIEF = ["--chunked-prefill-size", "256"]
# The number of tokens in each prompt of a burst, and a number that four of them do not have.
BURST = 220
ENOUGH = 4 * BURST + 1
# The text and the log-probabilities of an answer.
Answer = tuple[str, list[float]]


@dataclass
class Reference:
    """Prompts, and the answers of an engine with the whole model on its device.

    ``long``: a long answer to the first prompt. ``burst``: five more prompts, as token ids, and
    their answers.
    """

    prompts: list[str]
    answers: list[Answer]
    long: str
    burst: list[tuple[list[int], Answer]]


@pytest.fixture(scope="module")
async def reference(engines: LocalEngines, experts_model: Path, words: Words) -> Reference:
    prompts = [words(30, 1), words(200, 2), words(3, 3)]
    async with (
        start_special_engine(engines, experts_model, *BRIEF) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        (kv,) = (await client.info()).kv
        assert kv.experts is None
        short_answers = await answers(engine, prompts)
        await client.flush_cache()
        long = (await generate(client, prompts[0], LONG))[0]
        burst = [Random(seed).choices(range(4096), k=BURST) for seed in range(5)]
        asked = [(ids, await answer(client, input_ids=ids)) for ids in burst]
        return Reference(prompts, short_answers, long, asked)


async def answers(engine: LocalEngine, prompts: list[str]) -> list[Answer]:
    async with EngineClient(engine.url, timeout=60) as client:
        # The last bits depend on batches and on where the KV is in its pool.
        assert (await wait_for_costs(engine.url)).costs
        await client.flush_cache()
        return [await answer(client, text=prompt) for prompt in prompts]


async def answer(client: EngineClient, **prompt: Any) -> Answer:
    body = {**prompt, "sampling_params": GREEDY | {"max_new_tokens": 12}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    result = await post_json(client._http, "/generate", body)
    return result["text"], logprobs(result)


@pytest.mark.parametrize("slots", [nightly(1), slow(2)])
async def test_answers_are_the_same_and_the_device_holds_the_slots(
    engines: LocalEngines, experts_model: Path, reference: Reference, slots: int
) -> None:
    flags = [*BRIEF, "--flashmoa-asyncep", "h2d", "--flashmoa-asyncep-slots", str(slots)]
    async with (
        start_special_engine(engines, experts_model, *flags) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        # Everything is computed in the same way, so that not even the last bit differs.
        assert await answers(engine, reference.prompts) == reference.answers
        await check_that_new_weights_are_refused(client, experts_model)
        info = await client.info()
    memory = info.kv[0].experts
    assert memory is not None and memory.layers == EXPERTS.layers and memory.slots == slots
    assert memory.in_slots == memory.on_host // (EXPERTS.layers - 1) * memory.slots
    assert memory.misses == 0
    assert info.saturation is not None and info.saturation.transfer > 0
    assert len(info.saturation.windows) > 1


async def check_that_new_weights_are_refused(client: EngineClient, model: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "disk": {"model_path": str(model)},
        "tensor": {"serialized_named_tensors": ["AA=="]},
        "distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        "ipc": {"zmq_handles": {}},
    }
    for source, body in bodies.items():
        reply = await client._http.post(f"/update_weights_from_{source}", json=body)
        assert reply.status_code == 400, reply.text
        assert "Restart the engine" in reply.json()["message"]
    for path in ("/begin_weight_update", "/end_weight_update") if RELEASE.BEGIN_UPDATE else ():
        reply = await client._http.post(path, json={})
        assert reply.status_code == 400, reply.text
        assert "Restart the engine" in reply.json()["message"]


@pytest.fixture(scope="module")
async def patient(engines: LocalEngines, experts_model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine that waits for more than four prompts, even if a slow machine sends the fifth."""
    flags = ["--flashmoa-saturation", str(ENOUGH), "--flashmoa-saturation-wait", "3"]
    async with start_special_engine(
        engines, experts_model, "--flashmoa-asyncep", "h2d", *flags
    ) as engine:
        yield engine


@pytest.mark.nightly
async def test_a_burst_is_one_forward_and_a_lone_request_runs_after_a_wait(
    patient: LocalEngine, reference: Reference
) -> None:
    async def check(ids: list[int], expected: Answer) -> None:
        text, found = await answer(client, input_ids=ids)
        assert text == expected[0]
        # Sums may be computed in another order, such as in a larger batch.
        assert found == pytest.approx(expected[1], abs=1e-4)

    async with EngineClient(patient.url, timeout=60) as client:
        assert (await client.info()).prefills_wait_for == ENOUGH
        assert (await wait_for_costs(patient.url)).costs
        async with anyio.create_task_group() as group:
            for ids, expected in reference.burst:
                group.start_soon(check, ids, expected)
        assert (5, 5 * BURST) in forwards(patient)
        await client.flush_cache()
        await check(*reference.burst[0])


@pytest.mark.nightly
async def test_tokens_that_several_requests_share_count_once(patient: LocalEngine) -> None:
    shared = Random(99).choices(range(4096), k=BURST)
    siblings = [[*shared, *Random(number).choices(range(4096), k=9)] for number in range(6)]
    before = len(forwards(patient))
    async with (
        EngineClient(patient.url, timeout=60) as client,
        anyio.create_task_group() as group,
    ):
        for prompt in siblings:
            group.start_soon(partial(client.prefill_only, input_ids=prompt))
    # None ran before the sixth had come, although four prompts have enough tokens if shared ones
    # count every time. If requests can share only between forwards, one runs before the others.
    assert 4 * (BURST + 9) > ENOUGH
    together, one_ahead = [(6, BURST + 6 * 9)], [(1, BURST + 9), (5, 5 * 9)]
    assert forwards(patient)[before:] in (together, one_ahead)


def forwards(engine: LocalEngine) -> list[tuple[int, int]]:
    """Return the numbers of requests and of new tokens of each prefill so far, from the log."""
    lines = re.findall(
        r"Prefill batch.*#new-seq: (\d+), #new-token: (\d+),", engine.log.read_text()
    )
    return [(int(requests), int(tokens)) for requests, tokens in lines]


class Replicas:
    """Servers that divide a model's experts; ``running`` has them by rank."""

    def __init__(
        self,
        engines: LocalEngines,
        model: Path | str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._engines = engines
        self._model = model
        self._environment = environment
        self.group = uuid.uuid4().hex
        self.mode = ["d2d"]
        self.running: dict[int, LocalEngine] = {}

    async def start(self, place: str, model: Path | None = None) -> LocalEngine:
        """Begin to start the replica ``RANK/SIZE``."""
        rank = int(place[0])
        flags = ["--flashmoa-asyncep", *self.mode, "--flashmoa-asyncep-group", self.group]
        flags += ["--flashmoa-asyncep-replica", place, "--max-total-tokens", "12000"]
        model = model or self._model
        self.running[rank] = await self._engines.start(
            model,
            core=rank,
            arguments=[*flags, *BRIEF],
            environment=self._environment,
            wait=False,
        )
        return self.running[rank]

    async def check_failure(self, rank: int, message: str) -> None:
        with pytest.raises(EngineError, match="ended at start"):
            await self.running[rank].wait_until_ready()
        assert message in self.running.pop(rank).log.read_text()

    async def stop(self) -> None:
        for engine in self.running.values():
            await engine.stop()

    def listening_ranks(self) -> list[str]:
        """Return the ranks that offer their share."""
        # The fourth column has the flags. This value marks a socket that listens.
        listening = [line for line in self.sockets() if line[3] == "00010000"]
        return [line[-1].rpartition("/")[2] for line in listening]

    def sockets(self) -> list[list[str]]:
        """Return the group's sockets, each as the columns that the kernel shows."""
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return [line for line in lines if self.group in line[-1]]

    async def wait_for_share(self, rank: int) -> None:
        """Wait until a replica has loaded its share, and waits for the others."""
        await until(lambda: str(rank) in self.listening_ranks())


@pytest.fixture
async def replicas(engines: LocalEngines, experts_model: Path) -> AsyncGenerator[Replicas]:
    replicas = Replicas(engines, experts_model)
    yield replicas
    await replicas.stop()
    assert replicas.sockets() == []


async def check_memory(engine: LocalEngine, on_device: float) -> None:
    """Check where one of two replicas has its experts."""
    others = (EXPERTS.layers - 1) * LAYER_BYTES
    async with EngineClient(engine.url, timeout=60) as client:
        memory = (await client.info()).kv[0].experts
    assert memory is not None and memory.misses == 0
    assert (memory.resident, memory.in_slots) == (LAYER_BYTES, 2 * LAYER_BYTES)
    assert memory.share == memory.at_peers == others // 2 * on_device
    assert memory.on_host == others * (1 - on_device)


async def long_answer(
    engine: LocalEngine, prompt: str, begun: Callable[[], Awaitable[None]]
) -> str:
    """Return a long answer. Await ``begun`` after the first part of the answer."""
    parts: list[str] = []
    async with EngineClient(engine.url, timeout=60) as client:
        await client.flush_cache()
        sampling = {**GREEDY, "max_new_tokens": LONG}
        async with client.generate(text=prompt, sampling=sampling) as deltas:
            async for delta in deltas:
                if not parts:
                    await begun()
                parts.append(delta.text)
    return "".join(parts)


@pytest.mark.nightly
@pytest.mark.parametrize("on_device", [1, 0.25])
async def test_a_replica_answers_as_a_whole_model_whatever_happens_to_the_other(
    replicas: Replicas,
    reference: Reference,
    experts_text: Path,
    tmp_path: Path,
    on_device: float,
) -> None:
    if on_device < 1:
        replicas.mode = ["hybrid", "--flashmoa-asyncep-on-device", str(on_device)]
    second = await replicas.start("1/2")
    await replicas.wait_for_share(1)
    first = await replicas.start("0/2")
    for engine in (first, second):
        await engine.wait_until_ready()

    async def check_answers(engine: LocalEngine) -> None:
        assert await answers(engine, reference.prompts) == reference.answers

    # Both answer at once.
    async with anyio.create_task_group() as group:
        group.start_soon(check_answers, first)
        group.start_soon(check_answers, second)
    for engine in (first, second):
        await check_memory(engine, on_device)

    # A replica that is stopped does not delay the other.
    os.killpg(second.pid, signal.SIGSTOP)
    try:
        await check_answers(first)
    finally:
        os.killpg(second.pid, signal.SIGCONT)
    await check_answers(second)

    # A replica can be killed while the other one decodes.
    assert await long_answer(first, reference.prompts[0], second.stop) == reference.long
    await check_answers(first)
    assert replicas.listening_ranks() == ["0"]

    # Only a replica of the same model can take the place of the one that was killed.
    build(tmp_path / "other", [experts_text], EXPERTS, seed=1)
    await replicas.start("1/2", tmp_path / "other")
    await replicas.check_failure(1, "have not loaded the same experts")
    await replicas.start("0/2")
    await replicas.check_failure(0, "runs already")
    replicas.running[0] = first
    third = await replicas.start("1/2")
    await third.wait_until_ready()
    await check_answers(third)
    await check_answers(first)
