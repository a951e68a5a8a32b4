"""The server process of ``flashmoa serve``, supervised.

Runs ``python -m flashmoa_sglang.serve`` in a process group of its own, says where it listens
once it does, passes signals on, and leaves no process behind however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import httpx

from flashmoa.cli.causes import cause
from flashmoa.cli.progress import Output, Progress

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2


class Problem(NamedTuple):
    """Why a server ended by itself."""

    status: int
    text: str


class Server:
    """The server process and everything it starts.

    Args:
        arguments: SGLang's. host, port: where it will listen by these.
    """

    def __init__(self, arguments: Sequence[str], host: str, port: int) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._command = [sys.executable, "-m", "flashmoa_sglang.serve", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._progress = Progress()
        self._stopping_since: float | None = None

    def run(self) -> Problem | None:
        """Serve until a signal says to stop, or until the server ends by itself."""
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
        output = Output(self._progress, streams)
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
        """Ask SGLang to finish what runs and end; asked twice, do not wait for it."""
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
    text = f"SGLang ended {ended}; the lines above say why. `flashmoa doctor` checks what is here."
    return Problem(status, text)
