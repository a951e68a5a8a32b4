"""``CostLearner``: learns what forwards cost from the times of those that an engine runs.

A forward's seconds are those of its size, from a table, because kernels compute blocks of tokens,
and those of its context, which grow in proportion to it: what forwards of one size and of different
contexts differ by.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from math import ceil, isfinite, log2
from statistics import median
from typing import TypeVar

from flashmoa_sglang.costs import STEP_SIZES, Costs, TimedForward

# The numbers of requests that decode in steps with a prefill, from which others are told apart.
DECODES = (1, 8, 32)
# Times are kept by kinds of forwards that are about equal, of each the last few. They count from
# three on, since the first forwards of a kind may compile their kernels.
_KEPT, FEWEST = 9, 3
# The last so many forwards are learned from at once. More would hold up answers meanwhile, and
# while an engine waits until it is idle to measure more, there is no end of them.
_MOST_NEW = 2048
# If all forwards take so many times as long as before, or so many times less, then the machine's
# load has changed, and the times of those that have not run since are changed with the others'.
_DRIFT, _DRIFTED = 1.2, 16
# Steps of decodes and a prefill are told apart by blocks of so many tokens.
_BLOCK = 16
# What part of a forward's time is not its context's at least, whatever the noise says.
_LEAST_ALONE = 0.02
# By what factor a prefill takes longer at least than one of half the tokens, if none so large ran.
_GROWS = 1.25
# How much costs must change to be told: as parts of a forward, and of what a prefill adds to it.
_CHANGED, _CHANGED_ADDED = 0.03, 0.15
_CONTEXTS = (0, 16384)
# Tokens of a context that make no difference; contexts that differ by fewer than the second number
# do not tell what they cost, because noise makes more of a difference.
_SHORT_CONTEXT, _FURTHER = 128, 512
T = TypeVar("T")
_Kind = tuple[str, int, int]
# The size of a forward, its context, and its seconds.
_Time = tuple[int, int, float]
# The size of a forward, its seconds, and how much they say.
_Weighted = tuple[int, float, float]


class CostLearner:
    """Learns costs from timed forwards.

    Args: slowdown: how many times slower the engine is than its costs are to say.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self._new: deque[TimedForward] = deque(maxlen=_MOST_NEW)
        self._kept: dict[_Kind, deque[TimedForward]] = {}
        # What the first known forward of each kind would take under the load of today.
        self._usual: dict[_Kind, TimedForward] = {}
        # What the context costs, as found so far: see ``Costs``.
        self._per_kv_token = self._per_pair = 0.0

    def add(self, forwards: Iterable[TimedForward]) -> int:
        """Add forwards that ran; return how many there are that nothing was learned from yet."""
        for forward in forwards:
            seconds = forward.seconds / self._slowdown
            is_time = isfinite(seconds) and seconds > 0
            if is_time and (forward.decodes or forward.tokens):
                self._new.append(forward._replace(seconds=seconds))
        return len(self._new)

    def learn(self) -> Costs | None:
        """Return the costs; ``None`` if prefills of two sizes have not run often enough yet.

        It may run in a thread, while others add forwards.
        """
        new = [self._new.popleft() for _ in range(len(self._new))]
        self._follow_drift(new)
        for forward in new:
            self._kept.setdefault(_kind(forward), deque(maxlen=_KEPT)).append(forward)
        for kind, times in self._kept.items():
            if len(times) >= FEWEST and kind not in self._usual:
                self._usual[kind] = self._typical(times)
        points, self._per_pair = _fit(
            self._times("prefill", lambda f: (f.tokens, f.pairs, f.seconds))
        )
        if len(points) < 2:
            return None
        points = _beyond(points)
        # Small prefills all take as long, which says nothing of larger ones.
        beyond, seconds = points[-1]
        points[-1] = beyond, max(seconds, _GROWS * points[-2][1])
        steps, self._per_kv_token = _fit(
            self._times("decode", lambda f: (f.decodes, f.kv, f.seconds))
        )
        # A prefill engine of a PD pair decodes nothing.
        steps = _beyond(steps) if steps else []
        alone = Costs(
            tuple(points),
            steps[0][1] if steps else points[0][1],
            tuple((n, 0, seconds) for n, seconds in steps),
            self._per_kv_token,
            self._per_pair,
        )
        mixed = [(kind, times) for kind, times in self._kept.items() if kind[0] == "mixed"]
        added = _added(alone, [self._typical(times) for _, times in mixed if len(times) >= FEWEST])
        rows = dict.fromkeys(((n, 0) for n, _ in steps), 0.0) | added
        return Costs(
            alone.points,
            alone.decode_step,
            tuple((n, tokens, alone.decode(n) + more) for (n, tokens), more in rows.items()),
            self._per_kv_token,
            self._per_pair,
        )

    def _times(self, way: str, time: Callable[[TimedForward], _Time]) -> list[list[list[_Time]]]:
        """Return the times of forwards of this way, by their sizes, and by their contexts."""
        sizes: dict[int, list[list[_Time]]] = defaultdict(list)
        for (of, size, _), forwards in self._kept.items():
            if of == way:
                sizes[size].append([time(forward) for forward in forwards])
        return [contexts for _, contexts in sorted(sizes.items())]

    def _follow_drift(self, new: Sequence[TimedForward]) -> None:
        """Change all kept times as much as those of new forwards have changed, of all kinds.

        The load is told from one forward of each kind, always the same: compared with the last
        few, of which the quicker ones are typical, noise alone would make it grow without end.
        """
        ratios = [
            forward.seconds / usual.seconds
            for forward in new
            if (usual := self._usual.get(_kind(forward))) and _are_alike(forward, usual)
        ]
        change = median(ratios) if len(ratios) >= _DRIFTED else 1.0
        if max(change, 1 / change) > _DRIFT:
            for kind, times in self._kept.items():
                changed = (one._replace(seconds=change * one.seconds) for one in times)
                self._kept[kind] = deque(changed, maxlen=_KEPT)
            for kind, usual in self._usual.items():
                self._usual[kind] = usual._replace(seconds=change * usual.seconds)

    def _typical(self, times: Iterable[TimedForward]) -> TimedForward:
        """Return a forward of a kind whose time is usual, apart from its context."""
        return _below_median(
            times,
            lambda one: one.seconds - self._per_kv_token * one.kv - self._per_pair * one.pairs,
        )


def _are_alike(one: TimedForward, other: TimedForward) -> bool:
    """Return whether two forwards of a kind have about as long contexts."""
    return all(
        abs(first - second) <= 0.1 * first + _SHORT_CONTEXT * number
        for first, second, number in (
            (one.kv, other.kv, one.decodes),
            (one.pairs, other.pairs, one.tokens),
        )
    )


def differ(one: Costs, other: Costs) -> bool:
    """Return whether two costs differ so much that decisions might differ."""
    for size, context in product((1 << n for n in range(13)), _CONTEXTS):
        old, new = one.prefill(size, context), other.prefill(size, context)
        if abs(new - old) > _CHANGED * old:
            return True
    for decodes, size, context in product(DECODES, STEP_SIZES, _CONTEXTS):
        kv, tokens = decodes * context, max(0, size - decodes)
        step = one.decode(decodes, kv)
        old, new = (costs.added(decodes, tokens, context) for costs in (one, other))
        if abs(new - old) > max(_CHANGED_ADDED * old, _CHANGED * step):
            return True
        if abs(other.decode(decodes, kv) - step) > _CHANGED * step:
            return True
    return False


def _kind(forward: TimedForward) -> _Kind:
    """Return the kind of a forward: how large it is, and how long its context."""
    decodes, kv, tokens, pairs, _ = forward
    if not tokens:
        return "decode", round(4 * log2(decodes)), _context(kv / decodes)
    if not decodes:
        return "prefill", round(4 * log2(tokens)), _context(pairs / tokens)
    block = ceil((decodes + tokens) / _BLOCK)
    size = block if block <= STEP_SIZES[-1] / _BLOCK else round(4 * log2(block)) << 10
    return "mixed", _row(decodes) << 20 | size, _context(pairs / tokens)


def _row(decodes: int) -> int:
    """Return the number of ``DECODES`` for which steps with so many decodes count."""
    return DECODES[max(0, bisect_right(DECODES, decodes) - 1)]


def _context(tokens: float) -> int:
    return int(log2(1 + tokens / 512))


def _added(alone: Costs, mixed: Iterable[TimedForward]) -> dict[tuple[int, int], float]:
    """Return by how many seconds prefills lengthen a decode step, by ``DECODES`` and tokens.

    Args: alone: the costs of the two on their own.
    """
    found: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for forward in mixed:
        decodes, kv, tokens, pairs, seconds = forward
        added = seconds - alone.decode(decodes, kv) - alone.per_pair * pairs
        size = _kind(forward)[1]
        found[_row(decodes), size].append((decodes + tokens, added))
    lines: dict[int, list[_Weighted]] = defaultdict(list)
    for row, total, added in sorted(
        (row, int(median(total for total, _ in ways)), median(added for _, added in ways))
        for (row, _), ways in found.items()
    ):
        lines[row].append((total, max(0.0, added), 1.0))
    rows: dict[tuple[int, int], float] = {}
    for row, line in lines.items():
        rows[row, 0] = 0.0
        rows |= {(row, max(1, total - row)): added for total, added in _rising(line)}
    return rows


def _fit(sizes: Iterable[Sequence[Sequence[_Time]]]) -> tuple[list[tuple[int, float]], float]:
    """Return the seconds of each size without context, and those of each unit of context.

    Args: sizes: times by sizes, and of a size by about equal contexts.
    """
    known = [kinds for kinds in sizes if sum(map(len, kinds)) >= FEWEST]
    typical = (
        [_below_median(times, lambda time: time[2]) for times in kinds if len(times) >= FEWEST]
        for kinds in known
    )
    per_context = _slope(
        (_FURTHER * times[0][0], [(context, seconds) for _, context, seconds in times])
        for times in typical
        if times
    )
    alone = (
        [
            (size, max(seconds - per_context * context, _LEAST_ALONE * seconds), seconds)
            for times in kinds
            for size, context, seconds in times
        ]
        for kinds in known
    )
    chosen = (_below_median(times, lambda time: time[1]) for times in alone)
    # The more of a time is its context's, the less it says of the rest.
    points = _rising([(size, seconds, seconds / whole) for size, seconds, whole in chosen])
    return points, per_context


def _rising(points: Iterable[_Weighted]) -> list[tuple[int, float]]:
    """Return (size, seconds) of points of (size, seconds, weight), of which none is below the last.

    Larger forwards take no less time, whatever the noise says. Where they seem to, either may be
    wrong: all of these get their median, so that one of them changes none of the others.
    """
    sizes: list[int] = []
    groups: list[list[tuple[float, float]]] = []
    for size, seconds, weight in points:
        sizes.append(size)
        groups.append([(seconds, weight)])
        while len(groups) > 1 and _median(groups[-2]) > _median(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    medians = (_median(group) for group in groups for _ in group)
    return list(zip(sizes, medians, strict=True))


def _slope(lines: Iterable[tuple[int, Sequence[tuple[int, float]]]]) -> float:
    """Return by how much seconds grow with x along lines of (x, seconds); at least 0.

    It is the median of what all pairs of a line say, weighted by how far they are apart. With each
    line comes how far that is at least: nearer ones differ by their noise.
    """
    slope = _median(
        ((seconds - before) / (x - other), abs(x - other))
        for least, line in lines
        for (x, seconds), (other, before) in combinations(line, 2)
        if abs(x - other) >= least
    )
    return max(0.0, slope)


def _median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the median of numbers, each with its weight; the lower of two, and 0 of none."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    for number, weight in ordered:
        half -= weight
        if half <= 0:
            return number
    return 0.0


def _below_median(times: Iterable[T], seconds: Callable[[T], float]) -> T:
    """Return the one below the median: what disturbs a forward makes it longer.

    Two of three may be disturbed.
    """
    ordered = sorted(times, key=seconds)
    return ordered[len(ordered) // 2 - 1]


def _beyond(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points with others, of a smaller and a larger size than any that ran."""
    (least, at_least), (most, at_most) = points[0], points[-1]
    per_size = _slope([(1, points)])
    first = [(1, max(0.0, at_least - per_size * (least - 1)))] if least > 1 else []
    return [*first, *points, (2 * most, at_most + per_size * most)]
