"""Plan what a step prefills: :func:`plan` turns a :class:`StepView` into a :class:`Step`.

One rule, as in Sarathi-Serve: a step that decodes has a budget of tokens. Decodes come first, then
prompts of clients, then tokens of prompt streams. A decode step reads all weights for a few tokens.
So a block of further tokens costs less in a decode step than in a forward of its own. Ratios of the
measured costs decide how large blocks are, see :class:`Budget`.

Tensor-parallel ranks plan each step independently and must decide alike. So no decision depends on
a clock, but only on the view and the costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES, UNMEASURED

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs

# A token of a mixed step, or of streams' own forward, may cost at most this factor of a token in a
# large forward. With a mixture of experts, a few more tokens read many more weights, so that mixing
# a small block costs several times as much.
_MAX_TOKEN_COST = 1.1
# Streams ride if a token then costs at most this factor of a token in a large forward. A ride that
# saves less, as beside one decode on a CPU, delays decodes for nothing: while the next agent writes
# on another engine, this one is idle and computes the tokens without delaying anyone.
_MAX_RIDE_COST = 0.85
# Kernels compute blocks of up to this many tokens.
_BLOCK_TOKENS = 128
# Nobody knows when an answer ends. Streams compute their backlog within this many steps.
_HORIZON_STEPS = 128
# Where SGLang mixes nothing, streams have a forward of their own after this many steps.
_OWN_FORWARD_STEPS = 9
_FORWARD_SIZES = tuple(1 << n for n in range(6, 14))


@dataclass(frozen=True, slots=True)
class StepView:
    """The state of a scheduler that decides a step, read once; sizes in tokens.

    Attributes:
        waits: whether prefills wait for a forward that is long enough to hide transfers of experts.
        has_streams: whether streams are open, or the request of a stream can start.
        decodes: number of requests that decode in the running batch.
        elsewhere: number of requests that decode on other ranks or in other pipeline stages, which
            a forward of this batch would delay.
        ranks: number of ranks whose streams delay the decodes.
        prompts: uncomputed tokens of the clients' requests that can start; ``None`` if none can.
        queued: whether a request of a client waits.
        measures: whether a request that can start measures a mixed step.
        mixes: whether SGLang can mix the step's prefill with the decodes.
        waiting: uncomputed tokens of all streams.
        leading: uncomputed tokens of the streams that come before the next request.
        ended: whether a leading stream has ended.
        before: place of the next request in the queue, see ``admission.place_of_next``.
        steps: number of decode steps since the last forward of streams alone.
        limit: the operator's limit for the seconds between two tokens of a running request.
        kv: tokens of the running requests; 0 without a limit.
        context: computed tokens before an uncomputed token, on average; 0 without a limit.
        page: size of a KV page.
        chunk: the most tokens of a forward (``--chunked-prefill-size``), if limited.
    """

    waits: bool = False
    has_streams: bool = True
    decodes: int = 0
    elsewhere: int = 0
    ranks: int = 1
    prompts: int | None = None
    queued: bool = False
    measures: bool = False
    mixes: bool = True
    waiting: int = 0
    leading: int = 0
    ended: bool = False
    before: float | None = None
    steps: int = 0
    limit: float = inf
    kv: int = 0
    context: int = 0
    page: int = 1
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step prefills.

    Attributes:
        builds: whether a batch is built at all.
        streams: the most tokens of prompt streams in the batch.
        only_streams: whether waiting requests of clients stay in the queue.
        mixed: the most tokens of streams and prompts that SGLang mixes with the decodes; 0: the
            decodes wait for this forward.
        before: if given, streams that grow and are smaller jobs than this come first.
    """

    builds: bool = True
    streams: int = 0
    only_streams: bool = False
    mixed: int = 0
    before: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """The sizes of steps, in tokens.

    Attributes:
        mixed: allowed sizes of a step that decodes and prefills, decodes included, in ascending
            order. Empty: nothing is mixed.
        cheap: the allowed size with the lowest cost per prefilled token.
        alone: size of a forward of streams while nothing decodes.
        rides: whether streams ride, because the cheapest size saves enough.
    """

    mixed: tuple[int, ...]
    cheap: int
    alone: int
    rides: bool

    @classmethod
    def of(cls, costs: Costs, itl_budget: float, decodes: int) -> Budget:
        """Return the budget of a step with ``decodes`` decodes; see :func:`plan`."""
        # Beyond eight decodes, multiples of eight keep the number of computed budgets small.
        return _budget(costs, itl_budget, decodes if decodes <= 8 else -(-decodes // 8) * 8)


@lru_cache(maxsize=256)
def _budget(costs: Costs, itl_budget: float, decodes: int) -> Budget:
    below = decodes - decodes % _BLOCK_TOKENS
    if costs is UNMEASURED:
        return _guessed_budget(itl_budget, decodes, below)
    sizes = {*STEP_SIZES, *(below + size for size in STEP_SIZES)}
    added = {size: costs.added(decodes, size - decodes) for size in sorted(sizes) if size > decodes}
    token = costs.per_token_at_best
    most, best = (itl_budget - 1) * costs.decode(decodes), _MAX_TOKEN_COST * token
    allowed = tuple(
        size
        for size, seconds in added.items()
        if itl_budget > 1 and seconds <= min(most, best * (size - decodes))
    )
    cheap = min(allowed, key=lambda size: added[size] / (size - decodes), default=0)
    rides = cheap > 0 and added[cheap] <= _MAX_RIDE_COST * token * (cheap - decodes)
    alone = next((n for n in _FORWARD_SIZES if costs.prefill(n) <= best * n), _FORWARD_SIZES[-1])
    return Budget(allowed, cheap, alone, rides)


def _guessed_budget(itl_budget: float, decodes: int, below: int) -> Budget:
    """Return sizes that suit most GPUs: a step of 256 tokens takes about twice as long."""
    sizes = [size for size in STEP_SIZES if size <= min(1, itl_budget - 1) * 256]
    allowed = tuple(below + size for size in sizes if below + size > decodes)
    cheap = next((size for size in allowed if size >= below + _BLOCK_TOKENS), 0)
    return Budget(allowed, cheap or max(allowed, default=0), STEP_SIZES[-1], bool(allowed))


def plan(view: StepView, costs: Costs, itl_budget: float) -> Step:
    """Decide what a step prefills. The first case that applies decides.

    1. Prefills wait for a forward that hides transfers of experts: nothing.
    2. The engine measures its costs: one block of the measurement.
    3. No stream is open: as stock SGLang.
    4. Nothing decodes: prompts as stock SGLang; without prompts, streams in a forward of their own.
    5. Prompts can start: SGLang mixes them with the decodes if it can, in blocks that compute them
       hardly slower. Streams get the rest of their own budget.
    6. SGLang can mix streams with the decodes, that saves enough, and streams have enough tokens:
       the cheapest size, or a larger one that computes the backlog within :data:`_HORIZON_STEPS`
       steps.
    7. SGLang cannot mix them, or that saves too little: streams in a forward of their own, after
       enough decode steps.
    8. Streams have too few tokens yet: decodes alone.

    A step prefills at most what this says. Locks of KV and limits of a batch may leave it less.

    Args: itl_budget: the longest step, as a multiple of the step without prefill. At most 1:
        streams wait until nothing decodes.
    """
    if view.waits:
        return Step(builds=False)
    if view.measures:
        return Step(mixed=STEP_SIZES[-1])
    if not view.has_streams:
        return Step()
    budget = Budget.of(costs, itl_budget, view.decodes)
    if not (view.decodes or view.elsewhere):
        if view.prompts is not None or not _is_enough(view.waiting, view, budget):
            return Step(builds=view.prompts is not None or view.queued)
        return Step(streams=max(view.page, budget.alone), only_streams=True)
    mixes = view.decodes > 0 and view.mixes
    sizes = _stream_sizes(view, budget, costs) if mixes else []
    if view.prompts is not None:
        most = _prompt_size(view, costs) if mixes and itl_budget > 1 else 0
        room = max(sizes, default=0) if most and budget.rides else 0
        streams = max(0, min(most, room) - view.prompts)
        return Step(streams=streams, mixed=most, before=view.before)
    if sizes and budget.rides and _is_enough(view.leading, view, budget):
        pace = view.leading / _HORIZON_STEPS
        size = next((size for size in sizes if size >= pace), sizes[-1])
        return Step(streams=size, only_streams=True, mixed=size, before=view.before)
    if itl_budget > 1 and not (sizes and budget.rides):
        return _own_forward(view, budget, costs)
    return Step(builds=view.queued)


def _fitting(view: StepView, costs: Costs, sizes: Iterable[int]) -> list[int]:
    """Return the sizes, in tokens beside the decodes, that chunk, page and limit allow."""
    left = view.limit - costs.decode(view.decodes, view.kv)
    cut = (min(size, view.chunk or size) for size in sizes)
    return [
        size
        for size in cut
        if size >= max(view.page, FEWEST_RIDING)
        and costs.added(view.decodes, size, view.context) <= left
    ]


def _stream_sizes(view: StepView, budget: Budget, costs: Costs) -> list[int]:
    """Return the allowed sizes for streams, in tokens beside the decodes, from the cheapest on."""
    sizes = _fitting(view, costs, [size - view.decodes for size in budget.mixed])
    return [size for size in sizes if size >= budget.cheap - view.decodes] or sizes[-1:]


def _prompt_size(view: StepView, costs: Costs) -> int:
    """Return how many tokens of prompts a step with decodes may have; 0: none are mixed.

    It is the smallest block that keeps up with a large forward, so that no queue grows. It may be
    longer than a step of streams, because decodes would otherwise wait for the whole prompt.
    """
    # Decodes fill a part of the last block.
    below = -(view.decodes % _BLOCK_TOKENS)
    sizes = _fitting(view, costs, [below + size for size in STEP_SIZES])
    # The step may take this factor of the block's time in a large forward. Smaller blocks would let
    # short prompts wait behind long ones.
    slowest = 1.25
    if view.limit < inf:
        slowest = 2.0
        sizes.reverse()
    token = costs.per_token_at_best
    if view.chunk:
        token = max(token, costs.prefill(view.chunk) / view.chunk)
    for size in sizes:
        step = costs.decode(view.decodes) + costs.added(view.decodes, size)
        if step <= slowest * size * token:
            return size
    return 0


def _is_enough(tokens: int, view: StepView, budget: Budget) -> bool:
    """Return whether tokens of streams are worth a step."""
    return view.ended or tokens >= max(STEP_SIZES[0], (budget.cheap - view.decodes) // 2)


def _own_forward(view: StepView, budget: Budget, costs: Costs) -> Step:
    """Plan a forward of streams alone, after enough decode steps. The decodes wait for it.

    Ranks that step together take turns, however few of them have streams. Prompts whose upstream
    agent has not begun to write come only if no stream grows.
    """
    before, waiting, most = view.before, view.leading, 1024
    costs_too_much = view.decodes and view.mixes
    if costs_too_much:
        most = budget.alone
    elif not _is_enough(waiting, view, budget):
        before, waiting = None, view.waiting
    step = costs.decode(view.decodes or view.elsewhere, view.kv)
    size = min(waiting, most, view.chunk or most)
    if view.limit < inf:
        size = min(size, costs.tokens_within(view.limit - step))
    if costs_too_much:
        # Decodes have 16 times as much time as streams, because an engine that is soon idle
        # computes streams for less.
        pause = 16 * costs.prefill(most)
    else:
        # Decodes have at least as much time as streams.
        pause = view.ranks * max(_OWN_FORWARD_STEPS * step, costs.prefill(size))
    if size < view.page or view.steps * step < pause or not _is_enough(waiting, view, budget):
        return Step(builds=view.queued)
    return Step(streams=size, only_streams=True, before=before)


class Rank(IntEnum):
    """Order of streams in a step. The request of a ``DUE`` stream comes next; ``FILLS`` is last."""

    DUE = 0
    GROWS = 1
    FILLS = 2


@dataclass(slots=True)
class Growth:
    """How far a prompt stream could be prefilled; sizes in tokens, in whole pages.

    It is not frozen, because a step may make hundreds, and frozen objects take several times as
    long to make.

    Attributes:
        prefilled: number of tokens that have KV.
        new: number of tokens without KV.
        ended: whether no more tokens come.
    """

    prefilled: int
    new: int
    ended: bool = False
    rank: Rank = Rank.DUE


def choose_increments(
    streams: Sequence[Growth], tokens: int, fewest: int, page: int
) -> list[tuple[int, int]]:
    """Choose the streams that a step prefills, by rank and then in opening order.

    A stream is completed before the next one begins: a few complete streams are worth more than
    many incomplete ones. Increments are whole pages.

    Args:
        streams: all streams, in opening order.
        tokens: the most tokens of all increments together.
        fewest: fewest tokens of an increment that does not complete its stream.
        page: number of tokens in a KV page.

    Return the position of each chosen stream, and its number of tokens that have KV afterwards.
    """
    chosen: list[tuple[int, int]] = []
    worth = (n for n, stream in enumerate(streams) if stream.ended or stream.new >= fewest)
    for position in sorted(worth, key=lambda n: streams[n].rank):
        if tokens < page:
            break
        stream = streams[position]
        count = min(stream.new, tokens)
        count -= count % page
        completes = stream.ended and count == stream.new
        if count and (completes or count >= fewest):
            chosen.append((position, stream.prefilled + count))
            tokens -= count
    return chosen


def fewest_tokens(streams: int, tokens: int, page: int) -> int:
    """Return the fewest tokens of an increment that does not complete its stream.

    SGLang's scheduler takes a millisecond or two for an increment. So if there are many streams,
    they get few large increments. A stream of 50 tokens a second grows by a quarter of a token in
    an H200's step of 5 ms, so all streams together get at most one increment in two steps.

    Args:
        streams: number of open streams.
        tokens: the most tokens of all increments of the step.
    """
    return max(FEWEST_RIDING, min(streams // 2, tokens - tokens % page))
