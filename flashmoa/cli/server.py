"""The supervised server process of ``flashmoa serve``.

Runs ``python -m flashmoa_sglang.serve`` in a process group of its own, shows how far its start is
and where it listens, passes signals on, and leaves no process behind however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, BinaryIO, NamedTuple

import httpx

from flashmoa.cli.causes import cause

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
# What SGLang writes when a stage of its start begins, and the stage.
_STAGES = (
    (b"server_args=", "starting SGLang's processes"),
    (b"Load weight begin", "loading the model"),
    (b"Load weight end", "making the KV pool"),
)
# Bytes kept of the end of SGLang's output.
_KEPT = 64 * 1024


class Problem(NamedTuple):
    """Why a server ended by itself, and the exit status for it."""

    status: int
    text: str


class Server:
    """The server process and everything it starts.

    Args:
        arguments: SGLang's.
        host, port: where these make it listen.
    """

    def __init__(self, arguments: Sequence[str], host: str, port: int) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._command = [sys.executable, "-m", "flashmoa_sglang.serve", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._progress = StartProgress()
        self._stopping_since: float | None = None

    def run(self) -> Problem | None:
        """Serve until a signal says to stop, or until the server ends by itself.

        Returns: the problem in the latter case.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        environment = {**os.environ, "FLASHMOA_DIE_WITH_PARENT": "1", "PYTHONUNBUFFERED": "1"}
        self._progress.enter("importing SGLang, which takes a while")
        process = self._process = subprocess.Popen(
            self._command,
            start_new_session=True,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        streams = [(process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)]
        output = PassedOnOutput(self._progress, streams)
        try:
            self._wait_until_ready(process)
            while process.poll() is None and not self._overdue():
                time.sleep(_POLL_SECONDS)
        finally:
            self._progress.leave()
            self._kill_group(process)
        last = output.end()
        if self._stopping_since is not None or not process.returncode:
            return None
        return _problem(process.returncode, last)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._overdue():
            try:
                answer = httpx.get(f"{self._url}/model_info", timeout=2)
                if answer.status_code in (200, 401):
                    self._progress.leave()
                    ready = f"flashmoa: ready on {self._url} (OpenAI API: {self._url}/v1)\n"
                    self._progress.pass_on(ready.encode(), sys.stdout.buffer)
                    return
            except httpx.TransportError:
                pass
            self._progress.tick()
            time.sleep(_POLL_SECONDS)

    def _pass_on(self, _number: int, _frame: FrameType | None) -> None:
        """Ask SGLang to finish what runs and end; the second time, kill it."""
        if self._process is None:
            return
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            # SGLang drains on SIGTERM; on SIGINT it waits for its own children instead.
            self._process.send_signal(signal.SIGTERM)
        else:
            self._process.kill()

    def _overdue(self) -> bool:
        since = self._stopping_since
        return since is not None and time.monotonic() - since > _STOP_SECONDS

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _problem(returncode: int, last: str) -> Problem:
    # SGLang kills itself where one of its processes has failed.
    status = returncode if returncode > 0 else 1
    known = cause(last)
    if known is not None:
        return Problem(status, known)
    ended = f"with status {returncode}" if returncode > 0 else f"by signal {-returncode}"
    text = f"SGLang ended {ended}; the lines above say why. Try `flashmoa doctor`."
    return Problem(status, text)


class StartProgress:
    """Shows the stage of a start on standard error, on a terminal with a running clock."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stage: str | None = None
        self._clock_shown = False
        self._clock_runs = sys.stderr.isatty()
        self._line_begins = True
        self._lock = threading.Lock()

    def enter(self, stage: str) -> None:
        """Show that a stage begins."""
        with self._lock:
            self._hide_clock()
            self._stage = stage
            print(f"flashmoa: {stage} ({self._seconds()} s)", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Stop: the start is over."""
        with self._lock:
            self._hide_clock()
            self._stage = None

    def tick(self) -> None:
        """Show how long the start has taken so far."""
        with self._lock:
            if self._stage is None or not self._clock_runs or not self._line_begins:
                return
            self._hide_clock()
            print(f"flashmoa: {self._stage}, {self._seconds()} s", end="", file=sys.stderr)
            sys.stderr.flush()
            self._clock_shown = True

    def pass_on(self, output: bytes, to: BinaryIO) -> None:
        """Write a process's output without mixing it with the clock."""
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


class PassedOnOutput:
    """Passes on what a process writes, as it comes, and keeps its end.

    Args:
        streams: the process's pipes, and where each goes.
    """

    def __init__(self, progress: StartProgress, streams: list[tuple[IO[bytes], BinaryIO]]) -> None:
        self._progress = progress
        self._end = b""
        self._ahead = list(_STAGES)
        self._readers = [
            threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams
        ]
        for reader in self._readers:
            reader.start()

    def end(self, patience: float = 2.0) -> str:
        """Return the end of the output, after up to ``patience`` seconds per pipe for the rest."""
        for reader in self._readers:
            reader.join(patience)
        return self._end.decode(errors="replace")

    def _read(self, stream: IO[bytes], to: BinaryIO) -> None:
        while output := os.read(stream.fileno(), _KEPT):
            self._end = (self._end + output)[-_KEPT:]
            try:
                self._progress.pass_on(output, to)
            except OSError:
                continue  # The terminal is gone; the process must not wait for it.
            self._announce()

    def _announce(self) -> None:
        begun = [place for place, (sign, _) in enumerate(self._ahead) if sign in self._end]
        if begun:
            _, stage = self._ahead[begun[-1]]
            self._ahead = self._ahead[begun[-1] + 1 :]
            self._progress.enter(stage)
