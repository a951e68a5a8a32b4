"""What an agent on a staircase reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashmoa.linking.streamed_text import Text
from flashmoa.moa.answers import MixtureFailed
from flashmoa.moa.chunks import Chunks
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.steps import Steps, prompt_of

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class View:
    """What agents wrote, in chunks, as the prompts of who reads them have it."""

    prompt: AggregationPrompt
    question: Messages
    sources: Sequence[Chunks]

    def messages(self, steps: Steps, number: int, said: Sequence[Text]) -> Messages:
        """The prompt of a round, from 0."""
        rounds = [
            [f"{source.chunk(earlier)}" for source in self.sources] for earlier in range(number + 1)
        ]
        texts = [f"{text}" for text in said]
        return prompt_of(steps.order, self.prompt, self.question, rounds, texts)

    def ends_with(self, number: int) -> bool:
        """Whether nothing will come after that round."""
        return all(source.ends_before(number + 1) for source in self.sources)

    def check(self) -> None:
        """Raises: MixtureFailed where there was nothing to read at all."""
        if all(source.failed for source in self.sources):
            problems = "; ".join(f"{one.answer.name}: {one.problem}" for one in self.sources)
            raise MixtureFailed(f"no agent answered; {problems}")
