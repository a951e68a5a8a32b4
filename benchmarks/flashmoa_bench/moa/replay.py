"""Let early exit judge recorded answers on engines whose own answers mean nothing.

Everything is done that early exit does: engines are asked for log-probabilities, answers go to an
embedder and are compared. Only the values are others: :class:`RecordedEngine` gives tokens the
recorded confidence, and :class:`ReplayedEmbedder` gives answers the recorded similarities, after
the time that the embedding model takes.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np

from flashmoa.engine import EngineClient
from flashmoa.engine.wire import Delta
from flashmoa.moa.early_exit import Embedding
from flashmoa.observe import CallFinished, Event
from flashmoa_bench.harness import clock
from flashmoa_bench.moa.script import QuestionScript

# The parameter of chat completions that tells the engine's client which agent asks. Engines do
# nothing with it.
AGENT = "user"


class RecordedEngine(EngineClient):
    """An engine whose answers' tokens have recorded log-probabilities, where they are asked for.

    Attributes:
        confidences: confidence of an agent's answer, by the agent's name.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.confidences: Mapping[str, float] = {}

    @asynccontextmanager
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_stream_id: str | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        """Stream a chat completion as :meth:`EngineClient.chat` does."""
        asked = super().chat(messages, prompt_stream_id=prompt_stream_id, **parameters)
        async with asked as deltas:
            yield self._replace(deltas, self.confidences.get(parameters.get(AGENT, "")))

    async def _replace(
        self, deltas: AsyncGenerator[Delta], confidence: float | None
    ) -> AsyncGenerator[Delta]:
        async for delta in deltas:
            if delta.logprobs and confidence is not None:
                logprobs = [math.log(confidence)] * len(delta.logprobs)
                delta = delta.model_copy(update={"logprobs": logprobs})
            yield delta


class ReplayedEmbedder:
    """Returns embeddings of one question's answers that are as similar as the recorded answers.

    It is a listener, too: the question's events say whose answer a text is.

    Args:
        clusters: names of the agents whose answers are compared, by cluster. Every agent is in one
            of them.
        seconds: seconds that the embedding model takes for an answer of so many tokens. It takes
            one answer at a time.
    """

    def __init__(
        self,
        script: QuestionScript,
        clusters: Collection[Sequence[str]],
        seconds: Callable[[int], float],
    ) -> None:
        self._script = script
        self._seconds = seconds
        self._rows: dict[str, Embedding] = {}
        self._agents: dict[str, str] = {}
        self._one_at_a_time = anyio.Lock()
        for agents in clusters:
            wanted = [[self._similarity(one, other) for other in agents] for one in agents]
            self._rows |= zip(agents, make_rows(wanted), strict=True)

    def _similarity(self, one: str, other: str) -> float:
        return 1.0 if one == other else self._script.similarity(one, other)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished):
            self._agents[event.text] = event.agent

    async def embed(self, text: str) -> Embedding:
        """Return one row for an answer, after the time that its embedding takes."""
        agent = self._agents[text]
        async with self._one_at_a_time:
            await clock.sleep(self._seconds(self._script.agents[agent].tokens))
        return self._rows[agent]


def make_rows(similarities: Sequence[Sequence[float]]) -> list[Embedding]:
    """Return embeddings of one row each with these Frobenius cosine similarities.

    The Frobenius cosine of two single rows is the square of their cosine. If no rows have exactly
    these similarities, the nearest ones that exist are taken.

    Args:
        similarities: a symmetric matrix with ones on its diagonal.
    """
    cosines = np.sqrt(np.asarray(similarities, dtype=np.float64))
    values, vectors = np.linalg.eigh(cosines)
    rows = vectors * np.sqrt(np.maximum(values, 0.0))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return [row[np.newaxis].astype(np.float32) for row in rows]
