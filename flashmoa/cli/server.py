"""Run and supervise the server process of ``flashmoa serve`` (``Server``).

The process runs ``python -m flashmoa_sglang.serve`` in a separate process group. ``Server`` shows
the stages of its start and the address where it listens, forwards signals, and leaves no process
behind, however it ends.
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

from flashmoa.cli.causes import find_cause

_POLL_SECONDS = 0.2
# The stages of SGLang's start, each after the text that SGLang writes when it begins.
_STAGES = (
    (b"server_args=", "starting SGLang's processes"),
    (b"Load weight begin", "loading the model"),
    (b"Load weight end", "making the KV pool"),
)
# Bytes at the end of SGLang's output that are kept to explain why it ended.
_KEPT_BYTES = 64 * 1024


class Problem(NamedTuple):
    """Says why a server ended by itself, with the exit status for that."""

    status: int
    text: str


class Server:
    """Runs the server process, and ends every process that it has started.

    Args:
        arguments: SGLang's arguments.
        scheme, host, port: the address that ``arguments`` make SGLang listen on; ``http`` or
            ``https``.
        drain_seconds: how long requests may still run once the server is asked to stop.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        scheme: str,
        host: str,
        port: int,
        drain_seconds: float = 30.0,
    ) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._command = [sys.executable, "-m", "flashmoa_sglang.serve", *arguments]
        self._drain_seconds = drain_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._progress = StartProgress()
        self._stopping_since: float | None = None

    def run(self) -> Problem | None:
        """Serve until SIGINT, SIGTERM or SIGHUP arrives, or until the server ends by itself.

        Returns: why the server failed, ``None`` if it was stopped or ended with status 0.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle_signal)
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
        output = OutputForwarder(self._progress, streams)
        try:
            self._wait_until_ready(process)
            while process.poll() is None and not self._is_stop_overdue():
                time.sleep(_POLL_SECONDS)
        finally:
            self._progress.finish()
            self._kill_group(process)
        end_of_output = output.wait_for_end()
        if self._stopping_since is not None or not process.returncode:
            return None
        return _make_problem(process.returncode, end_of_output)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._is_stop_overdue():
            try:
                # No proxy reaches this machine's own addresses, and certificates do not name them.
                answer = httpx.get(
                    f"{self._url}/model_info", timeout=2, trust_env=False, verify=False
                )
                if answer.status_code in (200, 401):
                    self._progress.finish()
                    ready = f"flashmoa: ready on {self._url} (OpenAI API: {self._url}/v1)\n"
                    self._progress.forward(ready.encode(), sys.stdout.buffer)
                    return
            except httpx.TransportError:
                pass
            self._progress.update_clock()
            time.sleep(_POLL_SECONDS)

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Ask SGLang to finish its running requests and end. At the second signal, kill it."""
        if self._process is None:
            return
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            # On SIGINT, SGLang would wait for its child processes instead of draining.
            self._process.send_signal(signal.SIGTERM)
        else:
            self._process.kill()

    def _is_stop_overdue(self) -> bool:
        since = self._stopping_since
        return since is not None and time.monotonic() - since > self._drain_seconds

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _make_problem(returncode: int, end_of_output: str) -> Problem:
    # SGLang kills itself if one of its processes has failed. Its return code is then negative.
    status = returncode if returncode > 0 else 1
    cause = find_cause(end_of_output)
    if cause is not None:
        return Problem(status, cause)
    ended = f"with status {returncode}" if returncode > 0 else f"by signal {-returncode}"
    text = f"SGLang ended {ended}; the lines above say why. Try `flashmoa doctor`."
    return Problem(status, text)


class StartProgress:
    """Shows the stage of a start on standard error; on a terminal, with a running clock."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stage: str | None = None
        self._is_clock_shown = False
        self._has_clock = sys.stderr.isatty()
        self._is_at_line_start = True
        self._lock = threading.Lock()

    def enter(self, stage: str) -> None:
        """Show that a stage begins."""
        with self._lock:
            self._hide_clock()
            self._stage = stage
            print(f"flashmoa: {stage} ({self._seconds()} s)", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Show no stage and no clock any more."""
        with self._lock:
            self._hide_clock()
            self._stage = None

    def update_clock(self) -> None:
        """Show how long the start has taken so far."""
        with self._lock:
            if self._stage is None or not self._has_clock or not self._is_at_line_start:
                return
            self._hide_clock()
            print(f"flashmoa: {self._stage}, {self._seconds()} s", end="", file=sys.stderr)
            sys.stderr.flush()
            self._is_clock_shown = True

    def forward(self, output: bytes, to: BinaryIO) -> None:
        """Write a process's output without mixing it with the clock."""
        with self._lock:
            self._hide_clock()
            to.write(output)
            to.flush()
            self._is_at_line_start = output.endswith((b"\n", b"\r"))

    def _hide_clock(self) -> None:
        if self._is_clock_shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._is_clock_shown = False

    def _seconds(self) -> int:
        return int(time.monotonic() - self._started)


class OutputForwarder:
    """Forwards a process's output while it is written, announces stages, and keeps the end.

    Args:
        streams: the process's pipes, each with the file that its output is written to.
    """

    def __init__(self, progress: StartProgress, streams: list[tuple[IO[bytes], BinaryIO]]) -> None:
        self._progress = progress
        self._end = b""
        self._next_stages = _STAGES
        self._readers = [
            threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams
        ]
        for reader in self._readers:
            reader.start()

    def wait_for_end(self, patience: float = 2.0) -> str:
        """Wait up to ``patience`` seconds for each pipe's rest. Return the end of the output."""
        for reader in self._readers:
            reader.join(patience)
        return self._end.decode(errors="replace")

    def _read(self, stream: IO[bytes], to: BinaryIO) -> None:
        while output := os.read(stream.fileno(), _KEPT_BYTES):
            self._end = (self._end + output)[-_KEPT_BYTES:]
            try:
                self._progress.forward(output, to)
            except OSError:
                continue  # The terminal was closed; the process must not wait for it.
            self._announce_stage()

    def _announce_stage(self) -> None:
        for index, (sign, stage) in reversed(list(enumerate(self._next_stages))):
            if sign in self._end:
                self._next_stages = self._next_stages[index + 1 :]
                self._progress.enter(stage)
                return
