"""Test experts in host memory or at a replica, on real engines: same answers, in less memory."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from flashmoa_sglang.tiny_model import build

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    EXPERTS,
    GREEDY,
    generate,
    start_special_engine,
    wait_until_measured,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Three matrices for each expert, in float32.
LAYER_BYTES = EXPERTS.experts * 3 * EXPERTS.hidden * (EXPERTS.intermediate // 2) * 4
LONG = 150
# An engine measures forwards up to its limit, for which tests would have to wait.
BRIEF = ["--chunked-prefill-size", "256"]


@dataclass
class Reference:
    """Prompts, and the answers of an engine that has the whole model on its device."""

    prompts: list[str]
    answers: list[Any]
    long: str


@pytest.fixture(scope="module")
async def resident(
    engines: LocalEngines, experts_model: Path, words: Callable[[int, int], str]
) -> Reference:
    prompts = [words(30, 1), words(200, 2), words(3, 3)]
    async with (
        start_special_engine(engines, experts_model, *BRIEF) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        (kv,) = (await client.info()).kv
        assert kv.experts is None
        told = await answers(engine, prompts)
        await client.flush_cache()
        return Reference(prompts, told, (await generate(client, prompts[0], LONG))[0])


async def answers(engine: LocalEngine, prompts: list[str]) -> list[Any]:
    """Return text and log-probabilities of each prompt's answer."""
    found: list[Any] = []
    async with EngineClient(engine.url, timeout=60) as client:
        # The last bits depend on batches, and on the places of KV in the pool.
        await wait_until_measured(engine)
        await client.flush_cache()
        for prompt in prompts:
            body = {"text": prompt, "sampling_params": GREEDY | {"max_new_tokens": 12}}
            body |= {"return_logprob": True, "logprob_start_len": 0}
            reply = await client._http.post("/generate", json=body)
            reply.raise_for_status()
            told = reply.json()
            meta = told["meta_info"]
            logprobs = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
            found.append((told["text"], [one[0] for one in logprobs]))
    return found


@pytest.mark.parametrize("slots", [1, 2])
async def test_answers_are_the_same_and_the_device_holds_the_slots(
    engines: LocalEngines, experts_model: Path, resident: Reference, slots: int
) -> None:
    flags = [*BRIEF, "--flashmoa-asyncep", "h2d", "--flashmoa-asyncep-slots", str(slots)]
    async with (
        start_special_engine(engines, experts_model, *flags) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        # The computation is the same, to the last bit.
        assert await answers(engine, resident.prompts) == resident.answers
        await refuses_new_weights(client, experts_model)
        info = await client.info()
    memory = info.kv[0].experts
    assert memory is not None and memory.layers == EXPERTS.layers and memory.slots == slots
    assert memory.in_slots == memory.on_host // (EXPERTS.layers - 1) * memory.slots
    assert memory.misses == 0
    assert info.saturation is not None and info.saturation.transfer > 0
    assert len(info.saturation.windows) > 1


async def refuses_new_weights(client: EngineClient, model: Path) -> None:
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


@pytest.fixture
def granite(experts_model: Path, tmp_path: Path) -> Path:
    """A model without weights whose layers SGLang makes without ``make_layers``."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "num_experts_per_tok", "max_position_embeddings")
    config = json.loads((experts_model / "config.json").read_text())
    told = {name: config[name] for name in names} | {"dtype": "float32"}
    told |= {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"}
    told |= {"num_local_experts": EXPERTS.experts, "intermediate_size": EXPERTS.intermediate}
    for one in ("embedding", "residual", "attention"):
        told[f"{one}_multiplier"] = 1.0
    path = tmp_path / "granite"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(told))
    return path


async def test_a_model_whose_experts_would_all_stay_on_the_device_is_refused_at_start(
    engines: LocalEngines, model: Path, granite: Path
) -> None:
    without = ["--load-format", "dummy", "--skip-tokenizer-init"]
    expected: list[tuple[Path, list[str], str]] = [
        (granite, without, "SGLang hands experts of GraniteMoeMoE to no offloader"),
        (model, [], "it has 0 layers of experts"),
    ]
    for path, flags, because in expected:
        flags = ["--flashmoa-asyncep", "h2d", "--max-total-tokens", "12000", *flags]
        engine = await engines.start(path, core=0, arguments=flags, wait=False)
        try:
            with pytest.raises(EngineError, match="ended at start"):
                await engine.wait_until_ready()
            assert because in engine.log.read_text()
        finally:
            await engine.stop()


class Replicas:
    """Two servers that divide a model's experts; ``running`` has them by rank."""

    def __init__(self, engines: LocalEngines, model: Path) -> None:
        self._engines = engines
        self._model = model
        self.group = uuid.uuid4().hex
        self.running: dict[int, LocalEngine] = {}

    async def start(self, place: str, model: Path | None = None, *more: str) -> LocalEngine:
        """Begin to start the replica ``RANK/SIZE``."""
        rank = int(place[0])
        flags = ["--flashmoa-asyncep", "d2d", "--flashmoa-asyncep-group", self.group]
        flags += ["--flashmoa-asyncep-replica", place, "--max-total-tokens", "12000"]
        model = model or self._model
        self.running[rank] = await self._engines.start(
            model, core=rank, arguments=[*flags, *BRIEF, *more], wait=False
        )
        return self.running[rank]

    async def fails(self, rank: int, because: str) -> None:
        with pytest.raises(EngineError, match="ended at start"):
            await self.running[rank].wait_until_ready()
        assert because in self.running.pop(rank).log.read_text()

    async def stop(self) -> None:
        for engine in self.running.values():
            await engine.stop()

    def listening(self) -> list[str]:
        """Return the ranks that offer their share to others."""
        # The fourth column has the flags; this value is that of a listening socket.
        listening = [line for line in self.sockets() if line[3] == "00010000"]
        return [line[-1].rpartition("/")[2] for line in listening]

    def sockets(self) -> list[list[str]]:
        """Return the kernel's columns for each socket of this group."""
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return [line for line in lines if self.group in line[-1]]

    async def waits(self, rank: int) -> None:
        """Wait until a replica has loaded its share and waits for the others."""
        with anyio.fail_after(60):
            while str(rank) not in self.listening():  # noqa: ASYNC110
                await anyio.sleep(0.02)


@pytest.fixture
async def replicas(engines: LocalEngines, experts_model: Path) -> AsyncGenerator[Replicas]:
    made = Replicas(engines, experts_model)
    yield made
    await made.stop()
    assert made.sockets() == []


async def test_replicas_answer_like_one_engine_even_if_the_other_stops_or_dies(
    replicas: Replicas, resident: Reference, experts_text: Path
) -> None:
    second = await replicas.start("1/2")
    await replicas.waits(1)
    first = await replicas.start("0/2")
    for engine in (first, second):
        await engine.wait_until_ready()

    async def asks(engine: LocalEngine) -> None:
        assert await answers(engine, resident.prompts) == resident.answers

    # Both replicas answer at the same time.
    async with anyio.create_task_group() as group:
        group.start_soon(asks, first)
        group.start_soon(asks, second)
    others = (EXPERTS.layers - 1) * LAYER_BYTES
    for engine in (first, second):
        async with EngineClient(engine.url, timeout=60) as client:
            memory = (await client.info()).kv[0].experts
        assert memory is not None and memory.misses == 0 and memory.on_host == 0
        assert (memory.resident, memory.in_slots) == (LAYER_BYTES, 2 * LAYER_BYTES)
        assert (memory.share, memory.at_peers) == (others // 2, others // 2)

    # A stopped replica does not delay the other one.
    os.killpg(second.pid, signal.SIGSTOP)
    try:
        await asks(first)
    finally:
        os.killpg(second.pid, signal.SIGCONT)
    await asks(second)

    # A replica can be killed while the other one works.
    async with EngineClient(first.url, timeout=60) as client:
        await client.flush_cache()
        sampling = {**GREEDY, "max_new_tokens": LONG}
        parts: list[str] = []
        async with client.generate(text=resident.prompts[0], sampling=sampling) as deltas:
            async for delta in deltas:
                if not parts:
                    await second.stop()
                parts.append(delta.text)
    assert "".join(parts) == resident.long
    await asks(first)
    assert replicas.listening() == ["0"]

    # Only a replica with the same model can take its place.
    build(experts_text.parent / "other", [experts_text], EXPERTS, seed=1)
    await replicas.start("1/2", experts_text.parent / "other")
    await replicas.fails(1, "have not loaded the same experts")
    await replicas.start("0/2")
    await replicas.fails(0, "runs already")
    replicas.running[0] = first
    again = await replicas.start("1/2")
    await again.wait_until_ready()
    await asks(again)
    await asks(first)


async def test_replicas_of_different_groups_end_with_the_reason(replicas: Replicas) -> None:
    await replicas.start("0/2")
    await replicas.start("1/3")
    for rank in (0, 1):
        await replicas.fails(rank, "--flashmoa-asyncep-replica must give one number")


async def test_a_replica_without_its_peer_ends_with_the_reason(replicas: Replicas) -> None:
    await replicas.start("0/2", None, "--flashmoa-asyncep-wait", "0.1")
    await replicas.fails(0, "waited too long for replica 1")
