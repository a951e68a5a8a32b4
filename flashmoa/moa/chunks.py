"""A text in chunks, for those who read it while it is being written."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.linking.streamed_text import Text
from flashmoa.moa.patience import patiently
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.steps import CHARACTERS, Schedule, Steps
from flashmoa.workflow import Answer, Workflow

logger = logging.getLogger(__name__)


class Chunks:
    """An answer in chunks; each is a text of its own, complete when its round is.

    Args:
        title: stands before each.
        stall_seconds: how long to wait for its next piece, once it has begun, if not for ever.

    Attributes:
        problem: why it ended before it was complete, if it did.
    """

    def __init__(
        self,
        flow: Workflow,
        answer: Text,
        title: str,
        sizes: Schedule,
        stall_seconds: float | None = None,
    ) -> None:
        self.answer = answer
        self.problem = ""
        self._stall_seconds = stall_seconds
        self._flow = flow
        self._title = title
        self._sizes = sizes
        self._chunks: list[Text] = []
        # Rounds it has something for, once that is known.
        self._count: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended without anything."""
        return self._count == 0

    def chunk(self, number: int) -> Text:
        """That of a round, from 0; empty behind its end."""
        while len(self._chunks) <= number:
            text = self._flow.text(f"{self.answer.name} chunk {len(self._chunks) + 1}")
            if self._count is not None:
                text.close()
            self._chunks.append(text)
        return self._chunks[number]

    def ends_before(self, number: int) -> bool:
        """Whether it has nothing for that round, nor for later ones."""
        return self._count is not None and self._count <= number

    async def cut(self) -> None:
        """Fill the chunks as the answer is written, however its pieces come."""
        number, left, sizes = -1, 0, iter(self._sizes)
        try:
            async for piece in patiently(self.answer, self._stall_seconds):
                while piece:
                    if left == 0:
                        number, left = number + 1, next(sizes) * CHARACTERS
                        self.chunk(number).write(self._title)
                    part, piece = piece[:left], piece[left:]
                    left -= len(part)
                    self.chunk(number).write(part)
                    if left == 0:
                        self.chunk(number).close()
        except UpstreamCancelled:
            pass  # Nobody wants it any more.
        except Exception as error:
            self.problem = str(error) or type(error).__name__
            logger.warning("%s ends early: %s", self.answer.name, self.problem)
            if isinstance(self.answer, Answer):
                self.answer.cancel()  # Nobody reads on.
        self._count = number + 1
        if self.failed and not self.problem:
            self.problem = "it answered nothing"
        for text in self._chunks:
            text.close()


def cut_all(
    flow: Workflow,
    answers: Sequence[Text],
    prompt: AggregationPrompt,
    steps: Steps,
    stall_seconds: float | None = None,
) -> list[Chunks]:
    """Have answers cut, as those who read them with that prompt need them."""
    cut: list[Chunks] = []
    for number, answer in enumerate(answers, 1):
        title = "" if steps.order == "contiguous" else prompt.title(number)
        cut.append(Chunks(flow, answer, title, steps.schedule, stall_seconds))
        flow.start_soon(cut[-1].cut)
    return cut
