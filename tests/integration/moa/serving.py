"""Serve mixtures, staircases, debates and councils of tiny models with the OpenAI API."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from flashmoa.engine.local import LocalEngine
from flashmoa.moa.config import read_file
from flashmoa.moa.serve.application import ServeOptions, application
from tests.integration.router.serving import serve

FILE = """
[models.agent]
engine = "{url}"
temperature = 0
max_tokens = {tokens}

[models.long]                         # It never ends its answer itself.
engine = "{url}"
temperature = 0
max_tokens = {tokens}
ignore_eos = true

[systems.three]
layout = "question-first"
instruction = "Weigh these:"
layers = [{{models = [{{use = "agent", repeat = 2}}]}}, {{models = ["long"]}}]

[systems.stairs]
kind = "staircase"
layers = [{{models = ["agent", "long"]}}, {{models = ["long"]}}]

[systems.judged]
kind = "debate"
layers = [{{models = ["agent", "long"]}}, {{models = ["long"]}}]
debate = {{rounds = 2}}

[systems.council]
kind = "council"
layers = [{{models = ["agent", "long"]}}, {{models = ["long"]}}]
judge = "agent"
show_answers = true

[systems.failing]                     # Its last aggregator cannot answer.
layers = [
    {{models = ["agent", "long"]}},
    {{models = [{{engine = "http://127.0.0.1:9", model = "gone"}}]}},
]

[systems.gone]
layers = [
    {{models = [{{engine = "http://127.0.0.1:9"}}]}},
    {{models = [{{engine = "http://127.0.0.1:9"}}]}},
]
"""
QUESTION: list[Any] = [{"role": "user", "content": "What is there to see in Patan?"}]


@asynccontextmanager
async def served(
    engine: LocalEngine, folder: Path, options: ServeOptions | None = None, tokens: int = 8
) -> AsyncGenerator[str]:
    """Serve the models of the file; yield the URL."""
    path = folder / "moa.toml"
    path.write_text(FILE.format(url=engine.url, tokens=tokens))
    async with serve(application(read_file(path), options)) as url:
        yield url


@asynccontextmanager
async def connected(url: str, key: str = "-") -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


def extra(answer: Any) -> dict[str, Any]:
    """Return the field ``flashmoa`` of an answer. It describes the agents."""
    fields: dict[str, Any] = answer.model_extra
    return fields["flashmoa"]
