"""Compute the figures of each way from its answers; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median, stdev

from flashmoa_bench.family import SIZES
from flashmoa_bench.moa.prompt_tokens import PromptTokens
from flashmoa_bench.moa.ways import MixtureOutcome, MixtureWay

ALL = "all"


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """A question's answer in one way.

    Attributes:
        id, group: id and group of the question.
        score: score from 0 to 1; 0 if there was no answer.
        outcome: ``None`` if there was no answer.
    """

    id: str
    group: str
    score: float
    outcome: MixtureOutcome | None


@dataclass(frozen=True, slots=True)
class WayFigures:
    """The figures of one way; mappings by group have that of all questions under ``all``.

    Attributes:
        seconds: median seconds to the end of the answer, over the timed questions, by group.
        relative: median of a question's seconds over those of the same question in the way that
            ``base`` names, by group.
        first_token: median seconds to the first token of the answer.
        relative_first: as ``relative``, for the first token and ``base_first``.
        tokens_per_second: median of the tokens that the last agent wrote, with dropped words, over
            the question's seconds.
        dropped_words: mean number of words that a staircase dropped.
        prompts: prompt tokens by agent, means over the timed questions.
        accuracy: mean score by group; empty if nothing was scored.
        error: one standard error of the mean score of all questions.
        used: share of the proposers whose answers were waited for, by size and group; of the scored
            questions, if there are any.
        deciding_on_path: share of a question's time by which decisions about leaving early delayed
            the answer (see MixtureResult); mean over the timed questions. It is next to nothing if
            other proposers, whose answers were waited for, still wrote during the decisions.
        decision: mean seconds of one decision, with all waiting; without decisions that the last
            answer overtook.
        failed: number of questions without an answer.
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
    timed: Mapping[MixtureWay, Sequence[ScoredAnswer]],
    scored: Mapping[MixtureWay, Sequence[ScoredAnswer]] | None,
    base: MixtureWay,
    base_first: MixtureWay,
) -> list[WayFigures]:
    """Return the figures of each way.

    Args:
        timed: questions answered one at a time.
        scored: questions answered for their score; ``None`` if there are none.
        base, base_first: the ways that latencies and times to the first token are compared with.
    """
    rows = [_summarise_way(way, timed, base, base_first) for way in timed]
    return rows if scored is None else [_add_scores(row, scored[row.way]) for row in rows]


def _add_scores(row: WayFigures, answers: Sequence[ScoredAnswer]) -> WayFigures:
    """Add the figures of the questions that were answered for their score."""
    return replace(
        row,
        accuracy=accuracy(answers),
        error=_standard_error([answer.score for answer in answers]),
        used=_used_shares(answers),
        failed=row.failed + _count_failures(answers),
    )


def _summarise_way(
    way: MixtureWay,
    timed: Mapping[MixtureWay, Sequence[ScoredAnswer]],
    base: MixtureWay,
    base_first: MixtureWay,
) -> WayFigures:
    answers = timed[way]
    by_group = {answer.group: list[MixtureOutcome]() for answer in answers}
    for answer in answers:
        if answer.outcome is not None:
            by_group[answer.group].append(answer.outcome)
    outcomes = list(chain.from_iterable(by_group.values()))
    firsts = _ratios(answers, timed.get(base_first, ()), lambda outcome: outcome.first_token)
    deciding = [each.deciding / each.seconds for each in outcomes if each.deciding is not None]
    decisions = [seconds for each in outcomes for seconds in each.decisions]
    return WayFigures(
        way,
        seconds=_medians({name: [o.seconds for o in group] for name, group in by_group.items()}),
        relative=_medians(_ratios(answers, timed.get(base, ()), lambda outcome: outcome.seconds)),
        first_token=_median([each.first_token for each in outcomes]),
        relative_first=_medians(firsts).get(ALL),
        tokens_per_second=_median([each.tokens / each.seconds for each in outcomes]),
        dropped_words=_mean([each.dropped_words for each in outcomes]),
        prompts=_mean_prompts(outcomes),
        used=_used_shares(answers),
        deciding_on_path=_mean(deciding) if deciding else None,
        decision=_mean(decisions) if decisions else None,
        failed=_count_failures(answers),
    )


def _mean_prompts(outcomes: Sequence[MixtureOutcome]) -> dict[str, PromptTokens]:
    by_agent: dict[str, list[PromptTokens]] = {}
    for outcome in outcomes:
        for agent, tokens in outcome.prompts.items():
            by_agent.setdefault(agent, []).append(tokens)
    return {agent: PromptTokens.mean(tokens) for agent, tokens in by_agent.items()}


def _count_failures(answers: Sequence[ScoredAnswer]) -> int:
    return sum(answer.outcome is None for answer in answers)


def accuracy(answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    """Return the mean score of each group, and of all questions."""
    groups: dict[str, list[float]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer.score)
    means = {group: fmean(scores) for group, scores in groups.items()}
    return means | {ALL: _mean([answer.score for answer in answers])}


def verdict(rows: Sequence[WayFigures]) -> str | None:
    """Say in a sentence whether several models are more accurate than the best of them alone.

    ``None`` if that was not measured.
    """
    scored = [row for row in rows if row.accuracy]
    alone = [row for row in scored if row.way in SIZES]
    several = [row for row in scored if row.way not in SIZES]
    if not alone or not several:
        return None
    model, mixture = (max(rows, key=lambda row: row.accuracy[ALL]) for rows in (alone, several))
    is_better = mixture.accuracy[ALL] > model.accuracy[ALL]
    return (
        f"{mixture.way}, the most accurate that asks several models ({mixture.accuracy[ALL]:.1%}), "
        f"is {'more' if is_better else 'not more'} accurate than {model.way} alone "
        f"({model.accuracy[ALL]:.1%}); one standard error is {mixture.error:.1%}."
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better a way is than a model alone, on the same questions.

    Attributes:
        difference: mean of the differences of the scores, question by question.
        error: standard error of that mean.
    """

    way: MixtureWay
    difference: float
    error: float

    @property
    def is_certain(self) -> bool:
        """Return whether the way is better by more than two standard errors."""
        return self.difference > 2 * self.error


def gains(scored: Mapping[MixtureWay, Sequence[ScoredAnswer]], alone: MixtureWay) -> list[Gain]:
    """Return the gain of each way that asks several models over the model ``alone``.

    Empty unless that model was asked, too.
    """
    base = {answer.id: answer.score for answer in scored.get(alone, ())}
    found: list[Gain] = []
    for way, answers in scored.items():
        differences = [answer.score - base[answer.id] for answer in answers if answer.id in base]
        if way not in SIZES and differences:
            found.append(Gain(way, fmean(differences), _standard_error(differences)))
    return found


def _ratios(
    way: Sequence[ScoredAnswer],
    base: Sequence[ScoredAnswer],
    value: Callable[[MixtureOutcome], float],
) -> dict[str, list[float]]:
    """Return this way's value over that of ``base``, for each question that both answered."""
    base_outcomes = {answer.id: answer.outcome for answer in base}
    ratios: dict[str, list[float]] = {}
    for answer in way:
        base_outcome = base_outcomes.get(answer.id)
        if answer.outcome is not None and base_outcome is not None:
            ratio = value(answer.outcome) / value(base_outcome)
            ratios.setdefault(answer.group, []).append(ratio)
    return ratios


def _medians(groups: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians of each group and of all together; an empty group has none."""
    medians = {name: median(values) for name, values in groups.items() if values}
    return medians | ({ALL: median(chain.from_iterable(groups.values()))} if medians else {})


def _used_shares(answers: Sequence[ScoredAnswer]) -> dict[str, dict[str, float]]:
    """Return the shares of proposers whose answers were waited for, by size and group."""
    asked, used = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for answer in answers:
        if answer.outcome is None:
            continue
        for group in (answer.group, ALL):
            for size, count in answer.outcome.asked.items():
                asked[size, group] += count
                used[size, group] += answer.outcome.used.get(size, 0)
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
