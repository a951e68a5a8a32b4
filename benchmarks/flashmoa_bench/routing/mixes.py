"""Describe the mixes of requests over which routers are compared (`MIXES`); pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashmoa_bench.prefill.mix import TABLE_2, Dataset, MixPrompt, prompts

# The longest prompt that Qwen3-30B-A3B takes as it was trained, with some room.
LONGEST = 32_000


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


def limit_lengths(datasets: Sequence[Dataset], longest: int) -> tuple[Dataset, ...]:
    """Return the datasets with prompts of at most ``longest`` tokens."""
    return tuple(
        replace(
            dataset,
            tokens=min(dataset.tokens, longest * dataset.requests),
            shortest=min(dataset.shortest, longest - 1),
            longest=min(dataset.longest, longest),
        )
        for dataset in datasets
    )


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            "table-2",
            "MoE-Prefill's Table 2, of which 0.15: a seventh of the requests' tokens are short "
            "questions, half are about 55 long documents",
            limit_lengths(TABLE_2, LONGEST),
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
