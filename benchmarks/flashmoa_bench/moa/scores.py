"""What answers to many questions come to, way by way; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev

from flashmoa_bench.family import SIZES
from flashmoa_bench.moa.prompt_tokens import PromptTokens
from flashmoa_bench.moa.ways import MixtureOutcome, MixtureWay

ALL = "all"


@dataclass(frozen=True, slots=True)
class Answered:
    """A question answered in one way.

    Attributes:
        id, group: the question's.
        score: 0 to 1; 0 where there was no answer.
        outcome: ``None`` where there was no answer.
    """

    id: str
    group: str
    score: float
    outcome: MixtureOutcome | None


@dataclass(frozen=True, slots=True)
class WayFigures:
    """One way; what is by group has the mean of all questions under ``all``.

    Attributes:
        seconds, first_token: medians over the timed questions.
        relative, relative_first: medians of what a question took, over what the same question
            took in the way that ``base`` and ``base_first`` name.
        tokens_per_second: that the last agent wrote, from the question to the end, dropped words
            included; median. dropped_words: mean.
        prompts: by agent, means over the timed questions that it answered.
        accuracy: mean score, if there is one. error: of the mean over all questions, one standard
            error.
        used: of the proposers of a size, the share whose answer was waited for; over the scored
            questions, if there are any.
        deciding_on_path: mean over the timed questions of the share of their time by which
            decisions about leaving early delayed the answer, see MixtureResult; next to nothing
            where others wrote meanwhile whose answers were waited for.
        decision: mean seconds of one decision, what it waited for included, of those that were
            not overtaken by the last answer.
        failed: questions without an answer.
    """

    way: MixtureWay
    seconds: dict[str, float]
    relative: dict[str, float]
    first_token: float
    relative_first: float | None
    tokens_per_second: float
    dropped_words: float = 0.0
    prompts: dict[str, PromptTokens] = field(default_factory=dict[str, PromptTokens])
    accuracy: dict[str, float] = field(default_factory=dict[str, float])
    error: float = 0.0
    used: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    deciding_on_path: float | None = None
    decision: float | None = None
    failed: int = 0


def summarise(
    timed: Mapping[MixtureWay, Sequence[Answered]],
    scored: Mapping[MixtureWay, Sequence[Answered]] | None,
    base: MixtureWay,
    base_first: MixtureWay,
) -> list[WayFigures]:
    """Return the figures of each way.

    Args:
        timed: questions answered one at a time. scored: questions answered for their score, if
            any were.
        base, base_first: the ways that latencies and times to the first token are over.
    """
    rows = [_row(way, timed, base, base_first) for way in timed]
    return rows if scored is None else [_scored(row, scored[row.way]) for row in rows]


def _scored(row: WayFigures, answered: Sequence[Answered]) -> WayFigures:
    """Add what more questions tell than those that were timed."""
    return replace(
        row,
        accuracy=accuracy(answered),
        error=_standard_error([one.score for one in answered]),
        used=_used(answered),
        failed=row.failed + _failed(answered),
    )


def _row(
    way: MixtureWay,
    timed: Mapping[MixtureWay, Sequence[Answered]],
    base: MixtureWay,
    base_first: MixtureWay,
) -> WayFigures:
    outcomes = {one.group: list[MixtureOutcome]() for one in timed[way]}
    for one in timed[way]:
        if one.outcome is not None:
            outcomes[one.group].append(one.outcome)
    every = [outcome for group in outcomes.values() for outcome in group]
    firsts = _ratios(timed[way], timed.get(base_first, ()), lambda outcome: outcome.first_token)
    deciding = [one.deciding / one.seconds for one in every if one.deciding is not None]
    decisions = [each for one in every for each in one.decisions]
    return WayFigures(
        way,
        seconds=_by_group({g: [o.seconds for o in found] for g, found in outcomes.items()}),
        relative=_by_group(
            _ratios(timed[way], timed.get(base, ()), lambda outcome: outcome.seconds)
        ),
        first_token=_median([outcome.first_token for outcome in every]),
        relative_first=_by_group(firsts).get(ALL),
        tokens_per_second=_median([one.tokens / one.seconds for one in every]),
        dropped_words=_mean([one.dropped_words for one in every]),
        prompts=_prompts(every),
        used=_used(timed[way]),
        deciding_on_path=_mean(deciding) if deciding else None,
        decision=_mean(decisions) if decisions else None,
        failed=_failed(timed[way]),
    )


def _prompts(outcomes: Sequence[MixtureOutcome]) -> dict[str, PromptTokens]:
    found: dict[str, list[PromptTokens]] = {}
    for outcome in outcomes:
        for agent, prompts in outcome.prompts.items():
            found.setdefault(agent, []).append(prompts)
    return {agent: PromptTokens.mean(several) for agent, several in found.items()}


def _failed(answered: Sequence[Answered]) -> int:
    return sum(one.outcome is None for one in answered)


def accuracy(scored: Sequence[Answered]) -> dict[str, float]:
    """Return the mean score of each group, and of all questions."""
    groups: dict[str, list[float]] = {}
    for one in scored:
        groups.setdefault(one.group, []).append(one.score)
    found = {group: fmean(scores) for group, scores in groups.items()}
    return found | {ALL: _mean([one.score for one in scored])}


def verdict(rows: Sequence[WayFigures]) -> str | None:
    """Tell whether asking several models is more accurate than the best of them alone.

    ``None`` if that was not measured.
    """
    scored = [row for row in rows if row.accuracy]
    alone = [row for row in scored if row.way in SIZES]
    several = [row for row in scored if row.way not in SIZES]
    if not alone or not several:
        return None
    one, other = (max(each, key=lambda row: row.accuracy[ALL]) for each in (alone, several))
    is_better = other.accuracy[ALL] > one.accuracy[ALL]
    return (
        f"{other.way}, the most accurate that asks several models ({other.accuracy[ALL]:.1%}), is "
        f"{'more' if is_better else 'not more'} accurate than {one.way} alone "
        f"({one.accuracy[ALL]:.1%}); one standard error is {other.error:.1%}."
    )


def _ratios(
    way: Sequence[Answered], base: Sequence[Answered], of: Callable[[MixtureOutcome], float]
) -> dict[str, list[float]]:
    """Return, of questions that both answered, what this way took over what the other took."""
    others = {one.id: one.outcome for one in base}
    ratios: dict[str, list[float]] = {}
    for one in way:
        other = others.get(one.id)
        if one.outcome is not None and other is not None:
            ratios.setdefault(one.group, []).append(of(one.outcome) / of(other))
    return ratios


def _by_group(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians of each group, and of all together; none of an empty one."""
    every = [value for values in found.values() for value in values]
    medians = {group: median(values) for group, values in found.items() if values}
    return medians | ({ALL: median(every)} if every else {})


def _used(answered: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """Return the shares of proposers whose answers were waited for, by size and group."""
    asked, used = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in answered:
        if one.outcome is None:
            continue
        for group in (one.group, ALL):
            for size, count in one.outcome.asked.items():
                asked[size, group] += count
                used[size, group] += one.outcome.used.get(size, 0)
    shares: dict[str, dict[str, float]] = {}
    for (size, group), count in asked.items():
        shares.setdefault(size, {})[group] = used[size, group] / count
    return shares


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _standard_error(scores: Sequence[float]) -> float:
    return stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
