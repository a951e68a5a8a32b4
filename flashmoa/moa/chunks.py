"""Texts cut into chunks while they are being written, and the prompts that grow by them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from flashmoa import Answer, Text, UpstreamCancelled, Workflow
from flashmoa.moa.agents import read_with_timeout
from flashmoa.moa.prompts import AggregationPrompt, Messages, Order, staircase_messages
from flashmoa.moa.results import MixtureFailed

logger = logging.getLogger(__name__)

# Chunks are cut by characters, not by tokens, so that they do not depend on how a server's events
# divide a text. A token is taken for so many characters.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lengths of chunks, in tokens of four characters.

    The first chunk has ``first`` tokens, each later one ``growth`` times as many as the one
    before, at most ``largest``. The paper's first chunk has 8; it does not give the later ones.

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
            raise ValueError(f"largest is {self.largest}; it must be at least {self.first}, first")

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
        order: how chunks stand in the prompt. ``contiguous``: each text in one piece, so that
            much of the prompt moves in every round. ``rounds``: the chunks of one round after
            those of the round before, so that only the answer so far moves, which stands behind
            them. ``interleaved``: each round's chunks and what was written from them, in turns of
            the conversation, each of which begins with the last words of the one before; except
            for these words nothing is computed twice.
        drop_repeats: leave out what the beginning of a chunk repeats of the answer's end.
    """

    schedule: Schedule = field(default_factory=Schedule)
    order: Order = "rounds"
    drop_repeats: bool = True


class ChunkedText:
    """A text that is cut into chunks; each chunk is a text of its own, complete with its round.

    Args:
        title: stands before each chunk.
        stall_seconds: how long to wait for the next piece once the text has begun; ``None``: for
            ever.

    Attributes:
        problem: why the text ended before it was complete, if it did.
    """

    def __init__(
        self,
        flow: Workflow,
        source: Text,
        title: str,
        schedule: Schedule,
        stall_seconds: float | None = None,
    ) -> None:
        self.source = source
        self.problem = ""
        self._stall_seconds = stall_seconds
        self._flow = flow
        self._title = title
        self._schedule = schedule
        self._chunks: list[Text] = []
        # How many chunks the text has, once that is known.
        self._count: int | None = None

    @property
    def failed(self) -> bool:
        """Return whether the text ended without anything in it."""
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
        """Fill the chunks as the text is written, until it ends, fails or stalls."""
        number, left, sizes = -1, 0, iter(self._schedule)
        try:
            async for piece in read_with_timeout(self.source, self._stall_seconds):
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
            pass  # The chunks so far are what readers get.
        except Exception as error:
            self.problem = str(error) or type(error).__name__
            logger.warning("%s ends early: %s", self.source.name, self.problem)
            if isinstance(self.source, Answer):
                self.source.cancel()  # An answer that stalled is not read on.
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
            written: the agent's own chunks of the rounds before.
        """
        rounds = [
            [f"{source.chunk(earlier)}" for source in self.sources] for earlier in range(number + 1)
        ]
        texts = [f"{text}" for text in written]
        return staircase_messages(self.steps.order, self.prompt, self.question, rounds, texts)

    def is_complete_with(self, number: int) -> bool:
        """Return whether it is known that no chunks will come after that round, from 0."""
        return all(source.ends_before(number + 1) for source in self.sources)

    def raise_if_all_failed(self) -> None:
        """Raise MixtureFailed if no source has written anything."""
        if all(source.failed for source in self.sources):
            problems = "; ".join(f"{one.source.name}: {one.problem}" for one in self.sources)
            raise MixtureFailed(f"no agent answered; {problems}")
