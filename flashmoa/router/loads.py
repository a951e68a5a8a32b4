"""How much work an engine has been given and not done yet; pure."""

from __future__ import annotations

from flashmoa.router.flops import Measure


class Load:
    """One engine's ``W``: what its requests still cost, after the credit for cached prefixes.

    Engines report progress in tokens and not by request, so it is booked on the oldest request
    first. Raising and lowering use one measure of whole numbers: ``W`` never drifts, is never
    negative, and is 0 when nothing is left (MoE-Prefill §7.3, §B.2).
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.total = 0
        # Of each request with work left, in order of arrival: the tokens from ... to ...
        self._left: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, request: str, start: int, end: int) -> None:
        """A request whose tokens ``start`` to ``end`` are to be computed."""
        if request in self._left:
            raise ValueError(f"request {request!r} is counted already")
        if start < end:
            self._left[request] = (start, end)
            self.total += self.measure.work(start, end)

    def executed(self, tokens: int) -> None:
        """The engine has computed so many prompt tokens more."""
        while tokens > 0 and self._left:
            request, (start, end) = next(iter(self._left.items()))
            done = min(tokens, end - start)
            tokens -= done
            self.total -= self.measure.work(start, start + done)
            if start + done == end:
                del self._left[request]
            else:
                self._left[request] = (start + done, end)

    def end(self, request: str) -> None:
        """It is computed, or will not be; harmless to repeat."""
        if (left := self._left.pop(request, None)) is not None:
            self.total -= self.measure.work(*left)

    def clear(self) -> None:
        self._left.clear()
        self.total = 0
