"""``flashmoa serve``: an SGLang server with the plugin, supervised.

Runs ``python -m flashmoa_sglang.serve`` in a process group of its own, says where it listens
once it does, passes signals on, and leaves no process behind however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType

import httpx

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
_DEFAULT_PORT = 30000
_HELP = """\
usage: flashmoa serve --model-path PATH [any SGLang argument]

Starts SGLang with FlashMoA's plugin; without a GPU, on the CPU. Every argument is SGLang's own:
python -m sglang.launch_server --help
"""


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped; returns the exit status."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(_HELP, end="")
        return 0 if arguments else 2
    known = _address(arguments)
    problem = _problem(known)
    if problem is not None:
        print(f"flashmoa serve: {problem}", file=sys.stderr)
        return 2
    return _Server(arguments, known).run()


def _address(arguments: Sequence[str]) -> argparse.Namespace:
    """What is needed here of SGLang's arguments; the rest is its own business."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=_DEFAULT_PORT)
    parser.add_argument("--config")
    return parser.parse_known_args(arguments)[0]


def _problem(known: argparse.Namespace) -> str | None:
    """Why it cannot start, where that can be told before SGLang is imported."""
    if find_spec("sglang") is None:
        return "SGLang is not installed here. README.md says how, for a GPU and for a CPU."
    if find_spec("flashmoa_sglang") is None:
        return "the plugin is not installed here: pip install ./server_patches"
    if known.model_path is None and known.config is None:
        return "say which model: --model-path PATH"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((known.host, known.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {known.port} is taken; choose another one with --port"
            return f"cannot listen on {known.host}:{known.port}: {error.strerror}"
    return None


class _Server:
    """The server process and everything it starts."""

    def __init__(self, arguments: Sequence[str], known: argparse.Namespace) -> None:
        host = "127.0.0.1" if known.host in ("0.0.0.0", "::") else known.host
        self._url = f"http://{host}:{known.port}"
        self._command = [sys.executable, "-m", "flashmoa_sglang.serve", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping_since: float | None = None

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        environment = {**os.environ, "FLASHMOA_DIE_WITH_PARENT": "1"}
        process = self._process = subprocess.Popen(
            self._command, start_new_session=True, env=environment
        )
        try:
            self._wait_until_ready(process)
            while process.poll() is None and not self._overdue():
                time.sleep(_POLL_SECONDS)
        finally:
            self._kill_group(process)
        if self._stopping_since is not None:
            return 0
        return process.returncode or 0

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._overdue():
            try:
                answer = httpx.get(f"{self._url}/model_info", timeout=2)
                if answer.status_code in (200, 401):
                    print(
                        f"flashmoa: ready on {self._url} (OpenAI API: {self._url}/v1)", flush=True
                    )
                    return
            except httpx.TransportError:
                pass
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
