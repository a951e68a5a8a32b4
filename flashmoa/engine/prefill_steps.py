"""Decide when a prefill of a growing prompt pays on a server without the plugin (``StepCosts``)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_high

# A GPU computes that many tokens hardly slower than one: fewer are not worth a request.
LEAST_TOKENS = 64
# The least if the server does not say what it found in its cache, so that costs are unknown.
LEAST_UNMEASURED_TOKENS = 256
# Older measurements say little about a server whose load changes.
_REMEMBERED_SECONDS = 60.0
_REMEMBERED_STEPS = 32
# Of a text that goes on for longer than expected, or whose length nobody expects, this part of what
# has been written is expected to come.
_PART_TO_COME = 1 / 3


@dataclass(frozen=True, slots=True)
class _Step:
    at: float
    computed: int
    seconds: float


class StepCosts:
    """Measures what prefill steps cost on one server, and decides whether another one pays.

    A *step* is a request that prefills a prompt as far as it is certain, and generates one token or
    none. It computes the tokens that no earlier step has sent, which the prompt's own request then
    finds in the server's prefix cache. What it costs beside these tokens is its overhead: the
    request, and a forward apart from the decodes of other requests.

    The rule: a step is sent when the number of new tokens is at least

    - ``LEAST_TOKENS``, or ``LEAST_UNMEASURED_TOKENS`` if the server does not report cached tokens;
    - the number of tokens that the server computes in the time of a step's overhead. So a step
      takes at least as much time off the prompt's own request as its overhead takes of the server;
    - the number of tokens still to come, as far as text is being written (:func:`tokens_to_come`).
      So each step takes at least half of what is left, and a text of L tokens has at most log2(L)
      steps, of which the last leaves no more than about the minimum to the request.

    If a step finds less than half of what the step before it left in the cache, the cache does not
    keep prompts (it is off, too small, or that of another replica); no step pays for a minute.

    The overhead is the median, over the steps of the last minute, of a step's time less its tokens'
    time at the fastest rate of all these steps. It is zero after a single step.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = deque[_Step](maxlen=_REMEMBERED_STEPS)
        self._is_reported = True
        self._lost_at = float("-inf")

    def add(self, computed: int | None, seconds: float) -> None:
        """Note a step.

        Args:
            computed: number of tokens that the server computed; ``None`` if it does not say.
            seconds: the time from sending the request to its answer.
        """
        self._is_reported = computed is not None
        if computed:
            self._steps.append(_Step(self._clock(), computed, seconds))

    def add_loss(self) -> None:
        """Note that a step did not find what the step before it left in the cache."""
        self._lost_at = self._clock()

    @property
    def least_tokens(self) -> float:
        """The number of new tokens from which on a step pays if none are still to come."""
        if not self._is_reported:
            return LEAST_UNMEASURED_TOKENS
        return max(LEAST_TOKENS, self._overhead_tokens())

    def pays(self, new: float, to_come: float) -> bool:
        """Return whether a step pays now.

        Args:
            new: number of tokens that no step has sent.
            to_come: number of tokens expected still to come before the prompt is complete.
        """
        if self._clock() - self._lost_at < _REMEMBERED_SECONDS:
            return False
        return new >= max(self.least_tokens, to_come)

    def _overhead_tokens(self) -> float:
        since = self._clock() - _REMEMBERED_SECONDS
        recent = [step for step in self._steps if step.at >= since]
        if not recent:
            return 0.0
        fastest = min(step.seconds / step.computed for step in recent)
        if fastest <= 0:
            return 0.0
        return median_high(step.seconds / fastest - step.computed for step in recent)


def tokens_to_come(written: float, expected: float | None) -> float:
    """Return how many tokens of a text that is being written are still to come.

    A text whose length is unknown, or that is longer than expected, is taken to go on for a third
    of its length so far: then steps are sent each time it has grown by half.

    Args:
        written: number of its tokens so far.
        expected: its expected length in tokens, if that is known.
    """
    if expected is not None and expected > written:
        return expected - written
    return written * _PART_TO_COME
