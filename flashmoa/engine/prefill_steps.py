"""Decide when a prefill of a growing prompt pays on a server without the plugin (``StepCosts``)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
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
    missing: int


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
    - the number of tokens that a step of the last minute missed of what the step before it left in
      the cache: a cache keeps whole blocks, and fewer tokens may fill none;
    - the number of tokens still to come, as far as text is being written (:func:`tokens_to_come`).
      So each step takes at least half of what is left, and a text of L tokens has at most log2(L)
      steps, of which the last leaves no more than about the minimum to the request.

    If a step finds less than half of what the step before it left in the cache, the cache does not
    keep prompts (it is off, too small, or that of another replica); no step pays for a minute.

    The overhead is the median, over the steps of the last minute, of a step's time less its tokens'
    time at the fastest rate of all these steps. It is zero after a single step. Only steps that ran
    while this client had no other step on the server count.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = deque[_Step](maxlen=_REMEMBERED_STEPS)
        self._is_reported = True
        self._lost_at = float("-inf")

    def add(self, prompt: int, cached: int | None, seconds: float | None, before: int) -> bool:
        """Note a step. Return whether it found what the step before it left in the cache.

        Args:
            prompt: number of tokens of the prompt so far.
            cached: number of these that were cached; ``None`` if the server does not say.
            seconds: the time from sending the request to its answer; ``None`` if steps of other
                prompts took part of it.
            before: number of tokens of the step before it; 0 if it is the first one of a prompt.
        """
        self._is_reported = cached is not None
        if cached is None:
            return True
        is_found = cached >= before / 2
        if not is_found:
            self._lost_at = self._clock()
        elif prompt > cached and seconds is not None:
            missing = max(0, before - cached)
            self._steps.append(_Step(self._clock(), prompt - cached, seconds, missing))
        return is_found

    @property
    def least_tokens(self) -> float:
        """The number of new tokens from which on a step pays if none are still to come."""
        if not self._is_reported:
            return LEAST_UNMEASURED_TOKENS
        since = self._clock() - _REMEMBERED_SECONDS
        recent = [step for step in self._steps if step.at >= since]
        missing = max((step.missing for step in recent), default=0)
        return max(LEAST_TOKENS, missing, _overhead_tokens(recent))

    def pays(self, new: float, to_come: float) -> bool:
        """Return whether a step pays now.

        Args:
            new: number of tokens that no step has sent.
            to_come: number of tokens expected still to come before the prompt is complete.
        """
        if self._clock() - self._lost_at < _REMEMBERED_SECONDS:
            return False
        return new >= max(self.least_tokens, to_come)


def _overhead_tokens(steps: Sequence[_Step]) -> float:
    """Return how many tokens the server computes in the time of a step's overhead."""
    fastest = min((step.seconds / step.computed for step in steps), default=0.0)
    if fastest <= 0:
        return 0.0
    return median_high(step.seconds / fastest - step.computed for step in steps)


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
