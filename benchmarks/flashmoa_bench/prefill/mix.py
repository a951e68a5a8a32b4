"""A synthetic mix of prefill-only requests with the shapes of MoE-Prefill's Table 2; pure.

The paper gives each dataset's requests, tokens, range of lengths, and says whether much, little or
something in between is shared. How it is shared is assumed here: an instruction that all requests
of a dataset begin with, and documents that several of them are about.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from flashmoa.router.blocks import Blocks, token_blocks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dataset:
    """One row of Table 2, and what is assumed of it.

    Attributes:
        requests, tokens: in total.
        shortest, longest: of a request, in tokens.
        share: of prefixes, as the paper has it.
        instruction: tokens that all requests begin with; assumed.
        siblings: requests about one document; assumed.
        own: tokens behind the document that are a sibling's own; assumed.
    """

    name: str
    requests: int
    tokens: int
    shortest: int
    longest: int
    share: str
    instruction: int = 32
    siblings: int = 1
    own: int = 0

    def length(self, dice: random.Random) -> int:
        """Draw a length within the range, with the dataset's mean."""
        mean = self.tokens / self.requests
        power = (self.longest - self.shortest) / (mean - self.shortest) - 1
        return round(self.shortest + (self.longest - self.shortest) * dice.random() ** power)


TABLE_2 = (
    Dataset("MoralStories", 24_000, 3_300_000, 100, 200, "high", 64, siblings=2, own=24),
    Dataset("MMLU", 24_000, 5_800_000, 50, 500, "low"),
    Dataset("BoolQ", 12_000, 2_700_000, 200, 600, "low"),
    Dataset("IMDB", 12_000, 5_500_000, 300, 2_000, "low"),
    Dataset("QuALITY", 1_200, 10_500_000, 4_000, 12_000, "high", siblings=18, own=160),
    Dataset("ArXiv", 600, 10_100_000, 6_000, 128_000, "medium", 64, siblings=2, own=64),
)


@dataclass(frozen=True, slots=True)
class MixRequest:
    """A request of the mix: its name, dataset and prompt."""

    name: str
    dataset: str
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class MixPrompt:
    """A request's tokens, random numbers of 32 bits each."""

    name: str
    dataset: str
    tokens: array[int]


def mix(
    scale: float, spread: float, seed: int, table: tuple[Dataset, ...] = TABLE_2
) -> list[MixRequest]:
    """Return the whole mix, interleaved.

    Args:
        scale: of Table 2's numbers of requests.
        spread: within what part of the whole mix the siblings of a document come, 0 to 1.
    """
    return _mixed(scale, spread, seed, table, _as_blocks)


def prompts(
    scale: float, spread: float, seed: int, table: tuple[Dataset, ...] = TABLE_2
) -> list[MixPrompt]:
    """Return the same mix as its tokens."""
    return _mixed(scale, spread, seed, table, lambda prompt: prompt)


def _as_blocks(prompt: MixPrompt) -> MixRequest:
    return MixRequest(prompt.name, prompt.dataset, token_blocks(prompt.tokens))


def _mixed(
    scale: float,
    spread: float,
    seed: int,
    table: tuple[Dataset, ...],
    make: Callable[[MixPrompt], T],
) -> list[T]:
    """Return each request as ``make`` makes it, at once: tokens of the whole mix are not kept."""
    dice = random.Random(seed)
    placed: list[tuple[float, str, T]] = []
    for dataset in table:
        for document in _documents(dataset, scale, dice):
            begin = dice.random() * (1 - spread)
            placed += [(begin + dice.random() * spread, one.name, make(one)) for one in document]
    placed.sort(key=lambda one: one[:2])
    return [one for *_, one in placed]


def _documents(dataset: Dataset, scale: float, dice: random.Random) -> Iterator[list[MixPrompt]]:
    """Yield each document's requests."""
    instruction = _tokens(dataset.instruction, dice)
    count = max(1, round(dataset.requests * scale))
    for begin in range(0, count, dataset.siblings):
        document = instruction + _tokens(
            max(0, dataset.length(dice) - dataset.instruction - dataset.own), dice
        )
        siblings = range(begin, min(begin + dataset.siblings, count))
        yield [
            MixPrompt(
                f"{dataset.name}-{number}", dataset.name, document + _tokens(dataset.own, dice)
            )
            for number in siblings
        ]


def _tokens(count: int, dice: random.Random) -> array[int]:
    made: array[int] = array("I")
    made.frombytes(dice.randbytes(count * made.itemsize))
    return made
