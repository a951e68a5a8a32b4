"""Generate synthetic mixes of prefill-only requests, such as MoE-Prefill's Table 2.

For each dataset, the paper gives the numbers of requests and tokens, the range of lengths, and how
much prompts share: much, little or something in between. We assume how they share: all requests of
a dataset begin with an instruction, and several requests are about one document.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

# The longest prompt in tokens. Qwen3-30B-A3B was trained for little more.
LONGEST = 32_000


@dataclass(frozen=True, slots=True)
class Dataset:
    """One row of Table 2, and our assumptions about it.

    Attributes:
        requests, tokens: their total numbers.
        shortest, longest: range of a request's tokens.
        instruction: number of tokens that all requests begin with; assumed.
        siblings: number of requests about one document; assumed.
        own: number of tokens of each request after its document; assumed.
    """

    name: str
    requests: int
    tokens: int
    shortest: int
    longest: int
    instruction: int = 32
    siblings: int = 1
    own: int = 0

    def length(self, dice: random.Random) -> int:
        """Draw a length within the range; the mean is the dataset's mean."""
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


# The comments give the paper's words for how much prompts share.
TABLE_2 = (
    Dataset("MoralStories", 24_000, 3_300_000, 100, 200, 64, siblings=2, own=24),  # high
    Dataset("MMLU", 24_000, 5_800_000, 50, 500),  # low
    Dataset("BoolQ", 12_000, 2_700_000, 200, 600),  # low
    Dataset("IMDB", 12_000, 5_500_000, 300, 2_000),  # low
    Dataset("QuALITY", 1_200, 10_500_000, 4_000, 12_000, siblings=18, own=160),  # high
    Dataset("ArXiv", 600, 10_100_000, 6_000, 128_000, 64, siblings=2, own=64),  # medium
)


@dataclass(frozen=True, slots=True)
class MixPrompt:
    """A request of a mix, with random numbers of 32 bits as tokens."""

    name: str
    dataset: str
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of prefill-only requests, which are all there from the start.

    Attributes:
        scale: share of the datasets' requests in the mix.
        spread: part of the mix, 0 to 1, that holds all requests about one document.
    """

    datasets: tuple[Dataset, ...]
    scale: float = 1.0
    spread: float = 0.05

    def prompts(self, seed: int, share: float = 1.0) -> list[MixPrompt]:
        """Return the requests, with the datasets interleaved.

        Args:
            share: share of the mix's requests, for a shorter run.
        """
        dice = random.Random(seed)
        placed: list[tuple[float, str, MixPrompt]] = []
        for dataset in self.datasets:
            for document in _documents(dataset, self.scale * share, dice):
                begin = dice.random() * (1 - self.spread)
                placed += [(begin + dice.random() * self.spread, one.name, one) for one in document]
        placed.sort(key=lambda entry: entry[:2])
        return [prompt for _place, _name, prompt in placed]


def _documents(dataset: Dataset, scale: float, dice: random.Random) -> Iterator[list[MixPrompt]]:
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


MIXES = {
    # A seventh of the requests' tokens are short questions, and half are about 55 long documents.
    "table-2": Mix(tuple(dataset.scaled(1) for dataset in TABLE_2), scale=0.15),
    # Eight questions about each of 100 documents.
    "long-documents": Mix(
        (Dataset("documents", 800, 10_400_000, 8_000, 32_000, 64, 8, 120),), spread=0.2
    ),
    # Six questions about each of 400 documents. Most are short, and half of the tokens are in the
    # longest fifth.
    "mixed-documents": Mix(
        (Dataset("documents", 2_400, 12_000_000, 200, 32_000, 64, 6, 60),), spread=0.2
    ),
    # Reviews that share an instruction.
    "short-reviews": Mix((Dataset("reviews", 12_000, 2_600_000, 60, 600, 48),)),
    # Questions behind one prefix of 6,000 tokens, among requests that share nothing.
    "hot-prefix": Mix(
        (
            Dataset("hot", 4_000, 24_700_000, 6_020, 6_400, 6_000),
            Dataset("others", 1_000, 600_000, 100, 2_000, 0),
        )
    ),
}
