"""Show that on stock SGLang, answers with penalties depend on the requests beside them.

``docs/limits.md`` has the figures; ``-s`` prints them.
"""

from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine.local import LocalEngine
from tests.integration.support import Words

pytestmark = pytest.mark.nightly
PROMPTS = 8
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.7, "repetition_penalty": 1.2}


async def generate(http: httpx.AsyncClient, text: str, tokens: int, **penalty: float) -> list[int]:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **penalty}
    answer = await http.post("/generate", json={"text": text, "sampling_params": params})
    ids: list[int] = answer.raise_for_status().json()["output_ids"]
    return ids


async def count_changed(http: httpx.AsyncClient, words: Words, **penalty: float) -> int:
    """Return how many answers are others in company than alone; alone they do not change."""
    changed = 0
    for prompt in range(PROMPTS):
        text, found = words(40, prompt), list[list[int]]()
        for _ in range(2):
            found.append(await generate(http, text, 60, **penalty))

        async def in_company(text: str = text, found: Any = found) -> None:
            found.append(await generate(http, text, 60, **penalty))

        async with anyio.create_task_group() as group:
            group.start_soon(in_company)
            for number in range(6):
                await generate(http, words(60, 100 * prompt + number), 4)
        assert found[0] == found[1]
        changed += found[2] != found[0]
    return changed


async def test_penalties_depend_on_company(plain_engine: LocalEngine, words: Words) -> None:
    async with httpx.AsyncClient(base_url=plain_engine.url, timeout=120) as http:
        assert await count_changed(http, words) == 0
        found = {
            name: await count_changed(http, words, **{name: PENALTIES[name]}) for name in PENALTIES
        }
    print(f"\nanswers of {PROMPTS} that company changes: {found}")
    assert all(found.values())
