"""Cut answers into chunks while they are written, for readers that write meanwhile.

In each round of a staircase (Staircase Streaming, arXiv 2510.05059), the prompts of the next layer
grow by the next chunk of every answer that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoa import Text, UpstreamCancelled, Workflow
from flashmoa.moa.prompts import AggregationPrompt, Messages, staircase_messages
from flashmoa.moa.results import MixtureFailed, common_refusal
from flashmoa.moa.settings import CHARACTERS_PER_TOKEN, Steps

logger = logging.getLogger(__name__)


class ChunkedText:
    """Cuts a text into chunks, one for each round of a staircase. Each chunk is a separate text.

    Args:
        title: text before each chunk.

    Attributes:
        problem: why the text ended before it was complete; empty if it did not.
    """

    def __init__(self, flow: Workflow, source: Text, title: str, steps: Steps) -> None:
        self.source = source
        self.problem = ""
        self.error: Exception | None = None
        self._flow = flow
        self._title = title
        self._steps = steps
        self._chunks: list[Text] = []
        # The number of chunks; None until the text has ended.
        self._count: int | None = None

    @property
    def failed(self) -> bool:
        """Return whether the text ended without any chunk."""
        return self._count == 0

    def chunk(self, number: int) -> Text:
        """Return the chunk of a round, from 0; it is empty after the text's end."""
        while len(self._chunks) <= number:
            text = self._flow.text(f"{self.source.name} chunk {len(self._chunks) + 1}")
            if self._count is not None:
                text.close()
            self._chunks.append(text)
        return self._chunks[number]

    def ends_before(self, number: int) -> bool:
        """Return whether the text has ended and has no chunk for that round or a later one."""
        return self._count is not None and self._count <= number

    async def cut(self) -> None:
        """Fill the chunks as the text is written, until it ends or fails."""
        number, left, sizes = -1, 0, self._steps.sizes()
        try:
            async for piece in self.source:
                while piece:
                    if left == 0:
                        number, left = number + 1, next(sizes) * CHARACTERS_PER_TOKEN
                        self.chunk(number).write(self._title)
                    part, piece = piece[:left], piece[left:]
                    left -= len(part)
                    self.chunk(number).write(part)
                    if left == 0:
                        self.chunk(number).close()
        except UpstreamCancelled:
            pass  # Readers get the chunks that were written.
        except Exception as error:
            self.error, self.problem = error, str(error) or type(error).__name__
            text = "%s ends early: %s. Its readers continue with what it has written."
            logger.warning(text, self.source.name, self.problem.removesuffix("."))
        self._count = number + 1
        if self.failed and not self.problem:
            self.problem = "it answered nothing"
        for text in self._chunks:
            text.close()


@dataclass(frozen=True, slots=True)
class GrowingPrompt:
    """The prompt of an agent on a staircase: each round adds the next chunk of every source."""

    prompt: AggregationPrompt
    question: Messages
    sources: Sequence[ChunkedText]
    steps: Steps

    def messages(self, number: int) -> Messages:
        """Return the messages of a round, from 0."""
        rounds = [
            [f"{source.chunk(round_)}" for source in self.sources] for round_ in range(number + 1)
        ]
        return staircase_messages(self.steps.order, self.prompt, self.question, rounds)

    def is_last_round(self, number: int) -> bool:
        """Return whether it is certain that no chunks follow those of a round, from 0."""
        return all(source.ends_before(number + 1) for source in self.sources)

    def raise_if_all_failed(self) -> None:
        """Raise MixtureFailed if no source has written anything."""
        if all(chunked.failed for chunked in self.sources):
            problems = (f"{chunked.source.name}: {chunked.problem}" for chunked in self.sources)
            failure = MixtureFailed(f"no agent answered; {'; '.join(problems)}")
            raise failure from common_refusal([chunked.error for chunked in self.sources])
