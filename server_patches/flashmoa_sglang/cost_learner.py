"""``CostLearner``: learns what forwards cost from the times of those that an engine runs.

A forward's seconds are those of its size, from a table, because kernels compute blocks of tokens,
and those of its context, which grow in proportion to it. Both are fitted together: where forwards
of one size had different contexts, the difference is the context's, and elsewhere sizes are taken
to cost about as much as a straight line through all of them says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, isfinite, log2
from statistics import median
from typing import Any

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
# The part of a size's time in which it usually differs from the line, against what a time's own
# error is, squared; and the error from which a time counts less.
_LINE_WEIGHT, _LARGE_ERROR = 0.01, 0.03
# The same for what sizes and contexts cost, which is nothing if they do not vary enough to tell.
_NO_COST_WEIGHT = 1e-4
# By what factor a prefill takes longer at least than one of half the tokens, if none so large ran.
_GROWS = 1.25
# How many times may be far from the line through all, and by what factor, and still count.
_SURE, _FAR = 5, 2.0
# How much costs must change to be told: as parts of a forward, and of what a prefill adds to it.
_CHANGED, _CHANGED_ADDED = 0.03, 0.15
_CONTEXTS = (0, 16384)
# Tokens of a context that make no difference.
_SHORT_CONTEXT = 128
_Kind = tuple[str, int, int]


class CostLearner:
    """Learns costs from timed forwards.

    Args: slowdown: how many times slower the engine is than its costs are to say.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self._new: deque[TimedForward] = deque(maxlen=_MOST_NEW)
        self._kept: dict[_Kind, deque[TimedForward]] = {}
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
        typical = {
            kind: self._typical(times) for kind, times in self._kept.items() if len(times) >= FEWEST
        }
        if len({size for way, size, _ in typical if way == "prefill"}) < 2:
            return None
        ran = {
            way: [(f, len(self._kept[kind])) for kind, f in typical.items() if kind[0] == way]
            for way in ("prefill", "decode", "mixed")
        }
        points, self._per_pair = _fit(
            [(f.tokens, f.pairs, f.seconds, n) for f, n in ran["prefill"]]
        )
        if not points:
            return None
        # Small prefills all take as long, which says nothing of larger ones.
        (_, at_most), (beyond, at_beyond) = points[-2:]
        points[-1] = beyond, max(at_beyond, _GROWS * at_most)
        steps, self._per_kv_token = _fit(
            [(f.decodes, f.kv, f.seconds, n) for f, n in ran["decode"]]
        )
        # A prefill engine of a PD pair decodes nothing.
        alone = Costs(
            tuple(points),
            steps[0][1] if steps else points[0][1],
            tuple((n, 0, seconds) for n, seconds in steps),
            self._per_kv_token,
            self._per_pair,
        )
        added = _added(alone, [forward for forward, _ in ran["mixed"]])
        rows = dict.fromkeys(((n, 0) for n, _ in steps), 0.0) | added
        return Costs(
            alone.points,
            alone.decode_step,
            tuple((n, tokens, alone.decode(n) + more) for (n, tokens), more in rows.items()),
            self._per_kv_token,
            self._per_pair,
        )

    def _follow_drift(self, new: Sequence[TimedForward]) -> None:
        """Change all kept times as much as those of new forwards have changed, of all kinds."""
        ratios: list[float] = []
        for forward in new:
            times = self._kept.get(_kind(forward), ())
            if len(times) >= FEWEST and _are_alike(forward, before := self._typical(times)):
                ratios.append(forward.seconds / before.seconds)
        change = median(ratios) if len(ratios) >= _DRIFTED else 1.0
        if max(change, 1 / change) > _DRIFT:
            for kind, times in self._kept.items():
                changed = (one._replace(seconds=change * one.seconds) for one in times)
                self._kept[kind] = deque(changed, maxlen=_KEPT)

    def _typical(self, times: Iterable[TimedForward]) -> TimedForward:
        """Return the forward of a kind with the time below the median, apart from contexts.

        What disturbs a forward makes it longer, and two of three may be disturbed.
        """
        ordered = sorted(times, key=lambda one: one.seconds - self._of_context(one))
        return ordered[len(ordered) // 2 - 1]

    def _of_context(self, forward: TimedForward) -> float:
        return self._per_kv_token * forward.kv + self._per_pair * forward.pairs


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
    rows: dict[tuple[int, int], float] = {}
    least: dict[int, float] = {}
    for row, total, added in sorted(
        (row, int(median(total for total, _ in ways)), median(added for _, added in ways))
        for (row, _), ways in found.items()
    ):
        # More tokens take no less time, whatever the noise says.
        least[row] = max(least.get(row, 0.0), added)
        rows[row, 0] = 0.0
        rows[row, max(1, total - row)] = least[row]
    return rows


def _fit(times: Sequence[tuple[int, int, float, int]]) -> tuple[list[tuple[int, float]], float]:
    """Fit seconds by sizes and contexts to forwards, as (size, context, seconds, how many ran).

    Return the seconds by size, without context, and the seconds for each unit of context. Forwards
    of which few ran are left out if they are far from the straight line through all.
    """
    import numpy

    if not times:
        return [], 0.0
    rows = numpy.array(times, dtype=float)
    line = numpy.stack([numpy.ones(len(rows)), rows[:, 0], rows[:, 1]], axis=1)
    scale = numpy.maximum(line.max(axis=0), 1e-9)
    expected = line / scale @ _solve(line / scale / rows[:, 2:3], len(rows))
    ratio = rows[:, 2] / numpy.maximum(expected, 1e-9)
    known = (rows[:, 3] >= _SURE) | ((ratio < _FAR) & (ratio > 1 / _FAR))
    if not known.any():
        return [], 0.0
    rows, line = rows[known], line[known]
    sizes, seconds = rows[:, 0], rows[:, 2]
    groups, group = numpy.unique(numpy.round(4 * numpy.log2(sizes)), return_inverse=True)
    own = numpy.eye(len(groups))
    level = numpy.array([median(seconds[group == number]) for number in range(len(groups))])
    nothing = numpy.hstack([numpy.eye(3)[1:], numpy.zeros((2, len(groups)))]) / level.max()
    design = numpy.vstack(
        [
            numpy.hstack([line / scale, own[group]]) / seconds[:, None],
            numpy.hstack([numpy.zeros((len(groups), 3)), own / level[:, None]]) * _LINE_WEIGHT**0.5,
            nothing * _NO_COST_WEIGHT**0.5,
        ]
    )
    solution = _solve(design, len(seconds))
    start, per_size, per_context = (float(each) for each in solution[:3] / scale)
    points: list[tuple[int, float]] = []
    for number, rest in enumerate(solution[3:]):
        size = int(median(sizes[group == number]))
        points.append((size, max(0.0, start + per_size * size + float(rest))))
    # Beyond the sizes that ran, the line goes on, and not what the last two of them differ by.
    (least, at_least), (most, at_most) = points[0], points[-1]
    if least > 1:
        points.insert(0, (1, max(0.0, at_least - per_size * (least - 1))))
    return [*points, (2 * most, at_most + per_size * most)], per_context


def _solve(design: Any, forwards: int) -> Any:
    """Return the factors of ``design``'s columns with which its rows are 1, and the last ones 0.

    An outlier moves them no further than an error of :data:`_LARGE_ERROR`.

    Args: forwards: how many of its rows are to be 1.
    """
    import numpy

    wanted = (numpy.arange(len(design)) < forwards).astype(float)
    weights, used = numpy.ones_like(wanted), numpy.ones(design.shape[1], dtype=bool)
    solution = numpy.zeros(design.shape[1])
    for _ in range(6):
        solution[:] = 0.0
        weighted = design[:, used] * weights[:, None]
        solution[used] = numpy.linalg.lstsq(weighted, wanted * weights, rcond=None)[0]
        # No time shrinks with the size or the context.
        used[1:3] &= solution[1:3] >= 0
        solution[1:3] = solution[1:3].clip(0)
        errors = numpy.abs(design @ solution - wanted)[:forwards]
        weights[:forwards] = (_LARGE_ERROR / numpy.maximum(errors, _LARGE_ERROR)) ** 0.5
    return solution
