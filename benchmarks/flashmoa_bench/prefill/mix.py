"""Generate a synthetic mix of prefill-only requests like that of MoE-Prefill's Table 2; pure.

For each dataset, the paper gives the number of requests and tokens and the range of lengths, and
says whether prompts share much, little or something in between. How they share is assumed here: all
requests of a dataset begin with an instruction, and several requests are about one document.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

# The longest prompt that Qwen3-30B-A3B takes as it was trained, with some room.
LONGEST = 32_000


@dataclass(frozen=True, slots=True)
class Dataset:
    """One row of Table 2, and our assumptions about it.

    Attributes:
        requests, tokens: their numbers, in total.
        shortest, longest: range of a request's tokens.
        share: how much prefixes are shared, in the paper's words.
        instruction: number of tokens that all requests begin with; assumed.
        siblings: number of requests about one document; assumed.
        own: number of tokens after the document that only one sibling has; assumed.
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
        """Draw a length within the range, so that the mean is that of the dataset."""
        mean = self.tokens / self.requests
        power = (self.longest - self.shortest) / (mean - self.shortest) - 1
        return round(self.shortest + (self.longest - self.shortest) * dice.random() ** power)

    def scaled(self, factor: float) -> Dataset:
        """Return the dataset with all lengths times ``factor``, and at most :data:`LONGEST`."""

        def tokens(count: int) -> int:
            return round(count * factor)

        return replace(
            self,
            tokens=min(tokens(self.tokens), LONGEST * self.requests),
            shortest=min(max(1, tokens(self.shortest)), LONGEST - 1),
            longest=min(tokens(self.longest), LONGEST),
            instruction=tokens(self.instruction),
            own=tokens(self.own),
        )


TABLE_2 = (
    Dataset("MoralStories", 24_000, 3_300_000, 100, 200, "high", 64, siblings=2, own=24),
    Dataset("MMLU", 24_000, 5_800_000, 50, 500, "low"),
    Dataset("BoolQ", 12_000, 2_700_000, 200, 600, "low"),
    Dataset("IMDB", 12_000, 5_500_000, 300, 2_000, "low"),
    Dataset("QuALITY", 1_200, 10_500_000, 4_000, 12_000, "high", siblings=18, own=160),
    Dataset("ArXiv", 600, 10_100_000, 6_000, 128_000, "medium", 64, siblings=2, own=64),
)


@dataclass(frozen=True, slots=True)
class MixPrompt:
    """A request of the mix, with its prompt as tokens: random numbers of 32 bits each."""

    name: str
    dataset: str
    tokens: array[int]


def prompts(
    scale: float, spread: float, seed: int, table: tuple[Dataset, ...] = TABLE_2
) -> list[MixPrompt]:
    """Return the whole mix, with the datasets interleaved.

    Args:
        scale: share of Table 2's requests that the mix has.
        spread: part of the whole mix, 0 to 1, within which the siblings of a document come.
    """
    dice = random.Random(seed)
    placed: list[tuple[float, str, MixPrompt]] = []
    for dataset in table:
        for document in _documents(dataset, scale, dice):
            begin = dice.random() * (1 - spread)
            placed += [(begin + dice.random() * spread, one.name, one) for one in document]
    placed.sort(key=lambda entry: entry[:2])
    return [prompt for _place, _name, prompt in placed]


def _documents(dataset: Dataset, scale: float, dice: random.Random) -> Iterator[list[MixPrompt]]:
    """Yield the requests about each document."""
    instruction = _random_tokens(dataset.instruction, dice)
    count = max(1, round(dataset.requests * scale))
    for begin in range(0, count, dataset.siblings):
        document = instruction + _random_tokens(
            max(0, dataset.length(dice) - dataset.instruction - dataset.own), dice
        )
        siblings = range(begin, min(begin + dataset.siblings, count))
        yield [
            MixPrompt(
                f"{dataset.name}-{number}",
                dataset.name,
                document + _random_tokens(dataset.own, dice),
            )
            for number in siblings
        ]


def _random_tokens(count: int, dice: random.Random) -> array[int]:
    tokens: array[int] = array("I")
    tokens.frombytes(dice.randbytes(count * tokens.itemsize))
    return tokens


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of prefill-only requests, all of which are there from the start.

    Attributes:
        datasets: what the requests are about.
        scale: share of the datasets' requests that the mix has.
        spread: part of the mix, 0 to 1, within which the requests about one document come.
    """

    name: str
    about: str
    datasets: tuple[Dataset, ...]
    scale: float = 1.0
    spread: float = 0.05

    def prompts(self, seed: int, share: float = 1.0) -> list[MixPrompt]:
        """Return the requests as tokens, which are random numbers of 32 bits.

        Args:
            share: part of the mix's requests, for a shorter run.
        """
        return prompts(self.scale * share, self.spread, seed, self.datasets)


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            "table-2",
            "MoE-Prefill's Table 2, of which 0.15: a seventh of the requests' tokens are short "
            "questions, half are about 55 long documents",
            tuple(dataset.scaled(1) for dataset in TABLE_2),
            scale=0.15,
        ),
        Mix(
            "long-documents",
            "eight questions about each of 100 documents of 8,000 to 32,000 tokens",
            (Dataset("documents", 800, 10_400_000, 8_000, 32_000, "high", 64, 8, 120),),
            spread=0.2,
        ),
        Mix(
            "short-reviews",
            "12,000 reviews of 60 to 600 tokens, which share an instruction of 48 tokens",
            (Dataset("reviews", 12_000, 2_600_000, 60, 600, "low", 48),),
        ),
        Mix(
            "hot-prefix",
            "4,000 questions of 20 to 400 tokens behind one prefix of 6,000 tokens, among 1,000 "
            "requests of 100 to 2,000 tokens that share nothing",
            (
                Dataset("hot", 4_000, 24_700_000, 6_020, 6_400, "all", 6_000),
                Dataset("others", 1_000, 600_000, 100, 2_000, "none", 0),
            ),
        ),
    )
}
