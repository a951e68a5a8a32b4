"""Cut texts into chunks while they are written (``ChunkedText``), for prompts that grow by them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from flashmoa import Text, UpstreamCancelled, Workflow
from flashmoa.moa.prompts import AggregationPrompt, Messages, Order, staircase_messages
from flashmoa.moa.results import MixtureFailed

logger = logging.getLogger(__name__)

# Chunks are cut by characters, not by tokens, so that they do not depend on how a server's events
# divide a text. This is the assumed length of a token.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """Yields the lengths of chunks, in tokens of four characters.

    The first chunk has ``first`` tokens, and each later one ``growth`` times those of the chunk
    before it, at most ``largest``. The paper's first chunk has 8; it does not give the later ones.

    Raises: ValueError if a number is out of its range.
    """

    first: int = 8
    growth: float = 2.0
    largest: int = 128

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError(f"first is {self.first}; a chunk needs at least 1 token")
        if self.growth < 1:
            raise ValueError(f"growth is {self.growth}; it must be at least 1")
        if self.largest < self.first:
            raise ValueError(
                f"largest is {self.largest}; it must be at least first, which is {self.first}"
            )

    def __iter__(self) -> Generator[int]:
        """Yield the length of each chunk, without end."""
        size = float(self.first)
        while True:
            yield int(size)
            size = min(float(self.largest), size * self.growth)


@dataclass(frozen=True, slots=True)
class Steps:
    """The settings of a staircase.

    Attributes:
        schedule: how long the chunks are.
        order: the order of chunks in the prompt. ``contiguous``: each text in one piece, so that
            a large part of the prompt moves in every round. ``rounds``: the chunks of one round
            after those of the round before, so that only the answer so far moves, which follows
            them. ``interleaved``: each round's chunks and the part of the answer that was written
            from them, as turns of the conversation. Each part begins with the last words of the
            one before it. Except for these words, nothing is computed twice.
        drop_repeats: drop the beginning of a part if it repeats the end of the answer so far.
    """

    schedule: Schedule = field(default_factory=Schedule)
    order: Order = "rounds"
    drop_repeats: bool = True


class ChunkedText:
    """Cuts a text into chunks, one for each round of a staircase. Each chunk is a separate text.

    Args:
        title: text before each chunk.

    Attributes:
        problem: why the text ended before it was complete; empty if it did not.
    """

    def __init__(self, flow: Workflow, source: Text, title: str, schedule: Schedule) -> None:
        self.source = source
        self.problem = ""
        self._flow = flow
        self._title = title
        self._schedule = schedule
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
        number, left, sizes = -1, 0, iter(self._schedule)
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
            self.problem = str(error) or type(error).__name__
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

    def messages(self, number: int, written: Sequence[Text]) -> Messages:
        """Return the messages of a round, from 0.

        Args:
            written: the parts of the answer that the agent wrote in the rounds before.
        """
        rounds = [
            [f"{source.chunk(round_)}" for source in self.sources] for round_ in range(number + 1)
        ]
        parts = [f"{text}" for text in written]
        return staircase_messages(self.steps.order, self.prompt, self.question, rounds, parts)

    def is_last_round(self, number: int) -> bool:
        """Return whether it is certain that no chunks follow those of a round, from 0."""
        return all(source.ends_before(number + 1) for source in self.sources)

    def raise_if_all_failed(self) -> None:
        """Raise MixtureFailed if no source has written anything."""
        if all(chunked.failed for chunked in self.sources):
            problems = (f"{chunked.source.name}: {chunked.problem}" for chunked in self.sources)
            raise MixtureFailed(f"no agent answered; {'; '.join(problems)}")
