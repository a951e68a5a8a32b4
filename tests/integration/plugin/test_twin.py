"""Random agents on an engine with the plugin, whose answers a stock twin gives, too.

``FLASHMOA_TWIN_AGENTS`` is how many agents each setting has.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngines
from flashmoa.errors import EngineError
from tests.integration.support import (
    RIDING,
    STRICT,
    Body,
    Words,
    start_special_engine,
    wait_until_idle,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
AGENTS = int(os.environ.get("FLASHMOA_TWIN_AGENTS", "120"))
AT_ONCE = 12
NO_OVERLAP = "--disable-overlap-schedule"
PRIORITIES = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1")
# Page size, chunk, pool in tokens, and further arguments.
SETTINGS = [
    (1, 128, 3000, ()),
    (16, 64, 4096, (NO_OVERLAP,)),
    (1, 512, 12000, PRIORITIES),
    (16, 256, 3072, ("--flashmoa-schedule", "sjf", *PRIORITIES)),
]


class Agent:
    """Grows the prompt of a request in a prompt stream, with mistakes, and sends the request.

    Args:
        arguments: the engine's further arguments.
        known: ids of the other agents' streams, which it may claim by mistake.
    """

    def __init__(
        self, seed: int, words: Words, arguments: tuple[str, ...], known: list[str]
    ) -> None:
        self._random = random = Random(seed)
        self._arguments = arguments
        shared = words(random.choice([40, 150, 400]), random.randrange(3))
        self._own = " " + words(random.randrange(2, 200), 1000 + seed)
        self._prompt = shared + self._own
        self._opened = random.randrange(1, len(self._prompt))
        self._known = known
        self.body: Body = {"text": self._prompt, "sampling_params": self._sampling()}
        if random.random() < 0.2:
            self.body |= {"return_logprob": True, "top_logprobs_num": 2}

    def _sampling(self) -> Body:
        random = self._random
        options: list[Body] = [
            {},
            {"ignore_eos": True},
            {"min_new_tokens": 1},
            {"stop": ["e", "zz"]},
            {"logit_bias": {"17": 4.0}},
            {"regex": "[a-z ]{4,40}"},
            {"top_k": 1, "temperature": 0.9},
        ]
        # Under the overlap schedule, stock SGLang counts a token for penalties one step late, or in
        # time if another batch ran meanwhile, so that answers depend on other requests.
        if NO_OVERLAP in self._arguments:
            options.append({"frequency_penalty": 0.7})
        chosen = {"temperature": 0, "max_new_tokens": random.choice([1, 3, 12, 40])}
        return chosen | random.choice(options)

    async def run(self, client: EngineClient, http: httpx.AsyncClient) -> Body | None:
        """Return the answer; ``None`` if the agent leaves before it is there."""
        stream_id = await self._grow(client) if self._random.random() < 0.8 else None
        if self._random.random() < 0.1 and self._known:
            stream_id = self._random.choice(self._known)
        body = self.body | ({"prompt_stream_id": stream_id} if stream_id else {})
        if "--enable-priority-scheduling" in self._arguments:
            body["priority"] = self._random.randrange(4)
        if self._random.random() < 0.1:
            with suppress(httpx.ReadTimeout):
                await http.post("/generate", json=body, timeout=self._random.uniform(0.01, 0.3))
            return None
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def _grow(self, client: EngineClient) -> str | None:
        random = self._random
        try:
            expected = random.choice([None, 5, 4000])
            text = self._prompt[: self._opened]
            stream = await client.open_stream(text=text, expected_output_tokens=expected)
        except EngineError:
            return None  # The engine has no room for it.
        self._known.append(stream.id)
        at, seq = self._opened, 0
        with suppress(EngineError):  # A stream may be lost at any time, or be another agent's now.
            while at < len(self._prompt) and random.random() < 0.95:
                await asyncio.sleep(random.choice([0, 0.002, 0.03]))
                more, start = random.randrange(1, 90), None
                if random.random() < 0.2:
                    await client.append(stream.id, seq, text=" mistaken" * random.randrange(1, 9))
                    seq, start = seq + 1, at
                text = self._prompt[at : at + more]
                await client.append(stream.id, seq, text=text, start=start)
                at, seq = at + more, seq + 1
            if random.random() < 0.1:
                await client.delete_stream(stream.id)
        return stream.id


def comparable(answer: Body) -> Any:
    """Return what must be equal: text, tokens, and log-probabilities up to rounding."""
    meta = answer["meta_info"]
    logprobs = [round(value, 2) for value, *_ in meta.get("output_token_logprobs") or ()]
    return answer["text"], answer.get("output_ids"), meta["finish_reason"], logprobs


async def gather(ask: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Return what each agent's request is answered, with a few requests at once."""
    answers: list[Any] = [None] * AGENTS
    slots = anyio.CapacityLimiter(AT_ONCE)

    async def run(number: int) -> None:
        async with slots:
            answers[number] = await ask(number)

    async with anyio.create_task_group() as group:
        for number in range(AGENTS):
            group.start_soon(run, number)
    return answers


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
async def test_random_agents_get_what_a_stock_engine_answers(
    engines: LocalEngines, model: Path, words: Words, setting: tuple[int, int, int, Any]
) -> None:
    page, chunk, pool, more = setting
    arguments = ["--page-size", str(page), "--chunked-prefill-size", str(chunk), *more]
    stock = [each for each in arguments if each not in ("--flashmoa-schedule", "sjf")]
    known: list[str] = []
    agents = [Agent(1000 * chunk + seed, words, more, known) for seed in range(AGENTS)]
    async with start_special_engine(
        engines, model, *arguments, pool=pool, environment={**RIDING, **STRICT}
    ) as engine:
        async with (
            EngineClient(engine.url, timeout=120) as client,
            httpx.AsyncClient(base_url=engine.url, timeout=120) as http,
        ):
            answers = await gather(lambda number: agents[number].run(client, http))
        async with EngineClient(engine.url, timeout=60) as client:
            for stream_id in known:
                with suppress(EngineError):
                    await client.delete_stream(stream_id)
            await wait_until_idle(client)
            assert (await client.info()).prompt_streams == 0
    twin = await engines.start(
        model,
        core=1,
        arguments=[*stock, "--max-total-tokens", str(pool)],
        environment={"SGLANG_PLUGINS": "none"},
    )
    try:
        async with httpx.AsyncClient(base_url=twin.url, timeout=120) as http:
            sent = await gather(lambda number: http.post("/generate", json=agents[number].body))
            expected = [answer.json() for answer in sent]
    finally:
        await twin.stop()
    given = {number: answer for number, answer in enumerate(answers) if answer is not None}
    assert len(given) > AGENTS / 2
    differing = {
        number: (comparable(answer), comparable(expected[number]), agents[number].body)
        for number, answer in given.items()
        if comparable(answer) != comparable(expected[number])
    }
    assert not differing
    uses = [answer["meta_info"].get("prompt_stream") for answer in given.values()]
    hits = [use for use in uses if use is not None and use["status"] == "hit"]
    assert len(hits) > len(given) / 4
