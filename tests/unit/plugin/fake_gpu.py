"""A fake GPU: streams that do nothing until they are told to run, in any order CUDA allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any


class FakeStream:
    """A stream: a queue of work and of conditions that must hold before what follows them runs."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], bool]] = deque()
        self.done = 0
        self.enqueued = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self._add(run)

    def wait_event(self, event: FakeEvent) -> None:
        # As in CUDA, only what was recorded before this call counts.
        self._add(event.reached())

    def _add(self, step: Callable[[], bool]) -> None:
        self._queue.append(step)
        self.enqueued += 1

    def step(self) -> bool:
        """Do the next thing; return whether there was one that could be done."""
        if not self._queue or not self._queue[0]():
            return False
        self._queue.popleft()
        self.done += 1
        return True


class FakeEvent:
    def __init__(self) -> None:
        self._stream: FakeStream | None = None
        self._position = 0

    def record(self, stream: FakeStream) -> None:
        self._stream, self._position = stream, stream.enqueued

    def reached(self) -> Callable[[], bool]:
        stream, position = self._stream, self._position
        return lambda: stream is None or stream.done >= position


class FakeGpu:
    """Has the methods of ``CudaDevice``.

    Attributes:
        main: the stream on which layers compute.
        streams: all streams, ``main`` first.
    """

    def __init__(self) -> None:
        self.main = self._current = FakeStream()
        self.streams = [self.main]

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def on(self, stream: FakeStream) -> Generator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def new_event(self, *, timed: bool = False) -> Any:
        del timed
        return FakeEvent()

    def run(self, choices: Sequence[int] = ()) -> None:
        """Do all that was enqueued.

        Args: choices: for each step, which stream is tried first; the last one for all that follow.

        Raises: AssertionError if the streams wait for each other.
        """
        turn = 0
        while any(stream.done < stream.enqueued for stream in self.streams):
            first = choices[min(turn, len(choices) - 1)] if choices else 0
            turn += 1
            count = len(self.streams)
            order = [self.streams[(first + offset) % count] for offset in range(count)]
            assert any(stream.step() for stream in order), "the streams wait for each other"
