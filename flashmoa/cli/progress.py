"""What a user sees of an SGLang that starts: its own output, and how far it is."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import IO, BinaryIO

# What SGLang writes when a stage begins, and what that is.
_STAGES = (
    (b"server_args=", "starting SGLang's processes"),
    (b"Load weight begin", "loading the model"),
    (b"Load weight end", "making the KV pool"),
)
_KEPT = 64 * 1024


class Progress:
    """Lines that say what is being waited for; on a terminal with a clock that runs."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stage: str | None = None
        self._clock_shown = False
        self._clock_runs = sys.stderr.isatty()
        self._line_begins = True
        self._lock = threading.Lock()

    def enter(self, stage: str) -> None:
        with self._lock:
            self._hide_clock()
            self._stage = stage
            print(f"flashmoa: {stage} ({self._seconds()} s)", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Nothing is waited for any more."""
        with self._lock:
            self._hide_clock()
            self._stage = None

    def tick(self) -> None:
        """Show how long it has taken so far."""
        with self._lock:
            if self._stage is None or not self._clock_runs or not self._line_begins:
                return
            self._hide_clock()
            print(f"flashmoa: {self._stage}, {self._seconds()} s", end="", file=sys.stderr)
            sys.stderr.flush()
            self._clock_shown = True

    def pass_on(self, output: bytes, to: BinaryIO) -> None:
        """Somebody else's output."""
        with self._lock:
            self._hide_clock()
            to.write(output)
            to.flush()
            self._line_begins = output.endswith((b"\n", b"\r"))

    def _hide_clock(self) -> None:
        if self._clock_shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._clock_shown = False

    def _seconds(self) -> int:
        return int(time.monotonic() - self._started)


class Output:
    """Passes on what a process writes, as it comes, and keeps the end of it.

    Args:
        streams: its pipes, and where they go.
    """

    def __init__(self, progress: Progress, streams: list[tuple[IO[bytes], BinaryIO]]) -> None:
        self._progress = progress
        self._end = b""
        self._ahead = list(_STAGES)
        self._readers = [
            threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams
        ]
        for reader in self._readers:
            reader.start()

    def end(self, patience: float = 2.0) -> str:
        """The last of what was written, once all of it is there."""
        for reader in self._readers:
            reader.join(patience)
        return self._end.decode(errors="replace")

    def _read(self, stream: IO[bytes], to: BinaryIO) -> None:
        while output := os.read(stream.fileno(), _KEPT):
            self._end = (self._end + output)[-_KEPT:]
            try:
                self._progress.pass_on(output, to)
            except OSError:
                continue  # Nobody looks any more; the process must not wait for them.
            self._announce()

    def _announce(self) -> None:
        begun = [place for place, (sign, _) in enumerate(self._ahead) if sign in self._end]
        if begun:
            _, stage = self._ahead[begun[-1]]
            self._ahead = self._ahead[begun[-1] + 1 :]
            self._progress.enter(stage)
