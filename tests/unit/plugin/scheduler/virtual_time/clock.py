"""``Clock``: runs processes in virtual time, always in the same order."""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count

# A process yields seconds to sleep, or an event to wait for.
Process = Generator["float | Event", None, None]


class Event:
    """Happens once. Processes wait for it."""

    def __init__(self) -> None:
        self.has_happened = False
        self.waiting: list[Callable[[], None]] = []

    def happen(self) -> None:
        self.has_happened = True
        for action in self.waiting:
            action()


class Clock:
    """A clock that shows ``now``, in seconds, and goes on when nothing is left to do now."""

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heappush(self._actions, (self.now + seconds, next(self._numbers), action))

    def start(self, process: Process) -> None:
        """Run a process until it waits, and go on whenever it has waited long enough."""
        for wish in process:
            if not isinstance(wish, Event):
                self.after(max(0.0, wish), lambda: self.start(process))
            elif not wish.has_happened:
                wish.waiting.append(lambda: self.start(process))
            else:
                continue
            return

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._actions:
            self.now, _, action = heappop(self._actions)
            action()
