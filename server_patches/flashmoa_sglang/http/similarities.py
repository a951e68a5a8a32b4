"""The route of embedding engines that compares texts by their token states."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field, StrictStr

from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.api import add_routes
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import EngineDraining, EngineFailed, MalformedRequest

# The most memory for texts' matrices in each scheduler.
_MATRICES_BYTES = 1 << 29


class Texts(bodies.Target, extra="forbid"):
    """Texts to compare. A namespace changes nothing, because these texts use no cached KV."""

    texts: list[StrictStr] = Field(min_length=1)


class SimilarityApi:
    """Answers ``POST /flashmoa/similarities``.

    Args: reader: checks the texts' lengths.
    """

    def __init__(self, engine: Engine, reader: bodies.PromptReader) -> None:
        self._engine = engine
        self._reader = reader
        # Two matrices of float32 for each text. Even the widest model can compare two texts, and no
        # scheduler is busy for long.
        self._most_texts = min(64, max(2, _MATRICES_BYTES // (8 * engine.hidden_size**2)))
        self._one_at_a_time = asyncio.Lock()

    def add_to(self, app: FastAPI) -> None:
        add_routes(app, [("POST", "/flashmoa/similarities", self.compare)])

    async def compare(self, request: Request) -> dict[str, Any]:
        """Answer the matrix of the texts' Frobenius cosine similarities."""
        body = await bodies.parse(request, Texts)
        self._check(body.texts)
        terms = body.terms(self._engine.model["name"])
        async with self._one_at_a_time:
            if self._engine.draining:
                raise EngineDraining("The server is shutting down; use another engine.")
            found = await self._engine.compare(body.texts, terms, request)
        if not found.rows:
            raise EngineFailed(
                "This engine could not read the states of all tokens; use an embedding model whose "
                "pooler is SGLang's own, on one pipeline stage (--pp-size 1). See the engine's log."
            )
        return {"similarities": found.rows, "prompt_tokens": sum(found.tokens)}

    def _check(self, texts: list[str]) -> None:
        if self._engine.data_parallel_ranks > 1:
            raise MalformedRequest(
                "This engine spreads texts over its ranks, but compares only texts on one rank; "
                "start an engine without --dp-size for them."
            )
        if len(texts) > self._most_texts:
            raise MalformedRequest(
                f"texts has {len(texts):,} entries; with this model, the server compares at most "
                f"{self._most_texts:,}. Leave some out."
            )
        for index, text in enumerate(texts):
            if not text:
                raise MalformedRequest(f"texts.{index} is empty; leave it out.")
            self._reader.check_characters(text)
