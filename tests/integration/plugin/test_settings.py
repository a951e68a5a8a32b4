"""Test under the settings of real engines what links promise: exact answers, and all KV back."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa import Workflow
from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.errors import EngineError
from tests.integration.baseline import Baseline
from tests.integration.models import build_adapter, build_sliding_window_model
from tests.integration.support import (
    BOTH_ON_ONE_CORE,
    GREEDY,
    RIDING,
    Words,
    chat_text,
    fetch_kv_state,
    generate,
    start_special_engine,
)

# The longer prompts are computed in chunks.
COMMON = ("--chunked-prefill-size", "1024")
PAIRS = 8


class Case:
    """Pairs of requests. The second request's prompt has the first request's answer.

    Args: adapters: the LoRA adapters that the pairs use in turn; ``None`` is the plain model.
    """

    def __init__(self, words: Words, adapters: tuple[str | None, ...] = (None,)) -> None:
        self._words = words
        self._adapters = adapters

    def first(self, pair: int) -> dict[str, Any]:
        """Return the fields of a pair's first request; the first answers end one by one."""
        prompt = self._words(30, 9000 + pair)
        return self._request(pair, [("user", prompt)], 24 + 8 * pair)

    def second(self, pair: int, answer: object) -> dict[str, Any]:
        """Return the fields of a pair's second request; half of them begin alike."""
        role = self._words(200, 9100 if pair % 2 else 9101 + pair)
        question = f"{self._words(150 * pair, 9200 + pair)} {answer} {self._words(9, 9300)}"
        return self._request(pair, [("system", role), ("user", question)], 16)

    def alike(self) -> list[str]:
        """Return prompts that begin alike."""
        begin = self._words(80, 9500)
        return [f"{begin} {self._words(9, 9510 + number)}" for number in range(4)]

    def _request(self, pair: int, messages: list[tuple[str, str]], tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "messages": [{"role": role, "content": text} for role, text in messages],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        adapter = self._adapters[pair % len(self._adapters)]
        return fields if adapter is None else {**fields, "lora_path": adapter}


async def ask_unlinked(client: EngineClient, case: Case) -> list[str]:
    """Return the answers of the pairs, which run at once, and of the requests that are alike."""
    firsts, seconds = [""] * PAIRS, [""] * PAIRS

    async def ask(pair: int) -> None:
        firsts[pair] = await chat_text(client, **case.first(pair))
        seconds[pair] = await chat_text(client, **case.second(pair, firsts[pair]))

    async with anyio.create_task_group() as group:
        for pair in range(PAIRS):
            group.start_soon(ask, pair)
    alike = [(await generate(client, text, 12))[0] for text in case.alike()]
    return [*firsts, *seconds, *alike]


async def ask_linked(
    client: EngineClient, http: httpx.AsyncClient, case: Case, words: Words
) -> tuple[list[str], list[PromptUsage]]:
    """Return the same answers of linked requests, and how the second prompts were computed.

    The prompts that begin alike come in one call here, so that a batch can share their KV. A prompt
    stream is given up while others are read, and a further request's text is never completed.
    """
    async with Workflow(client) as flow:
        firsts = [flow.ask(**case.first(pair)) for pair in range(PAIRS)]
        seconds = [flow.ask(**case.second(pair, first)) for pair, first in enumerate(firsts)]
        flow.expect(case.second(3, flow.text("unwritten"))["messages"])
        given_up = await client.open_stream(text=words(900, 9400))
        await firsts[0]
        body = {"text": case.alike(), "sampling_params": {**GREEDY, "max_new_tokens": 12}}
        alike = (await http.post("/generate", json=body)).raise_for_status().json()
        await client.delete_stream(given_up.id)
        answers = [await answer for answer in (*firsts, *seconds)]
    answers += [answer["text"] for answer in alike]
    return answers, [answer.usage for answer in seconds if answer.usage is not None]


async def check(engine: LocalEngine, case: Case, words: Words) -> int:
    """Check linked answers, and that the engine then is as before.

    Return how many tokens of streams were computed together with decode steps.
    """
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        baseline = Baseline(engine, http)
        await baseline.take()
        async with EngineClient(engine.url, timeout=60) as client:
            linked, usages = await ask_linked(client, http, case, words)
            rode_along = (await fetch_kv_state(client)).rode_along
        # A flush would also give back KV that a stream still locks.
        await baseline.wait_until_restored()
        async with EngineClient(engine.url, timeout=60) as client:
            await client.flush_cache()
            assert linked == await ask_unlinked(client, case)
        await baseline.wait_until_restored()
    assert len(set(linked)) == len(linked)
    uses = [usage.prompt_stream for usage in usages]
    # On a busy machine a request may come before its stream is open.
    hits = [use.status for use in uses if use is not None]
    assert set(hits) == {"hit"} and len(hits) >= PAIRS // 2
    assert sum(usage.streamed_tokens or 0 for usage in usages) > 0
    return rode_along


# Every two values of two settings meet once.
MATRIX = [
    pytest.param(
        overlap,
        page,
        ranks,
        id=f"overlap {'on' if overlap else 'off'}, pages of {page}, {ranks} rank(s)",
        marks=pytest.mark.slow if (overlap, page, ranks) == (True, 16, 1) else pytest.mark.nightly,
    )
    for overlap, page, ranks in ((True, 16, 1), (True, 1, 2), (False, 16, 2), (False, 1, 1))
]


@pytest.mark.parametrize(("overlap", "page", "ranks"), MATRIX)
async def test_linked_equals_unlinked_and_all_kv_comes_back(
    engines: LocalEngines, model: Path, words: Words, overlap: bool, page: int, ranks: int
) -> None:
    arguments = [*COMMON, "--page-size", str(page), "--tp-size", str(ranks)]
    arguments += [] if overlap else ["--disable-overlap-schedule"]
    environment = {**RIDING, **(BOTH_ON_ONE_CORE if ranks > 1 else {})}
    async with start_special_engine(engines, model, *arguments, environment=environment) as engine:
        rode_along = await check(engine, Case(words), words)
    # Without this, increments would only have run in forwards of their own.
    assert rode_along > 0


@pytest.mark.nightly
async def test_requests_of_several_adapters_are_linked_exactly(
    engines: LocalEngines, model: Path, words: Words, tmp_path: Path
) -> None:
    paths = [f"{name}={build_adapter(tmp_path / name, model, ord(name))}" for name in "ab"]
    arguments = [*COMMON, "--lora-paths", *paths, "--lora-backend", "torch_native"]
    async with start_special_engine(engines, model, *arguments, environment=RIDING) as engine:
        await check(engine, Case(words, ("a", None, "b")), words)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page", "hybrid"),
    [(1, False), (16, True)],
    ids=["one pool", "hybrid pools"],
)
async def test_a_model_with_sliding_windows_is_linked_exactly(
    engines: LocalEngines, model: Path, words: Words, tmp_path: Path, page: int, hybrid: bool
) -> None:
    """On a CPU there is one pool, also for a model that has another one for its windows' KV."""
    windows = build_sliding_window_model(tmp_path / "windows", model, hybrid=hybrid)
    arguments = [*COMMON, "--page-size", str(page)]
    async with start_special_engine(engines, windows, *arguments, environment=RIDING) as engine:
        await check(engine, Case(words), words)
        async with EngineClient(engine.url, timeout=60) as client:
            assert (await fetch_kv_state(client)).shares


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speculative-algorithm", "NGRAM"),
        ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "MODEL"),
        ("--enable-hierarchical-cache",),
    ],
    ids=["NGRAM", "STANDALONE", "HiCache"],
)
async def test_what_needs_a_gpu_is_refused_at_start(
    engines: LocalEngines, model: Path, arguments: tuple[str, ...]
) -> None:
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    with pytest.raises(EngineError, match=f"{arguments[0]} needs a GPU: .* Leave it out"):
        await engines.start(model, core=1, arguments=given)
