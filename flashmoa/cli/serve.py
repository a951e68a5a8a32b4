"""``flashmoa serve``: start an SGLang server with the plugin, and leave no process behind.

SGLang runs as ``python -m flashmoa_sglang.serve`` in a process group of its own and writes to the
same terminal. So does Dynamo's sidecar. This process waits until SGLang answers, prints its URL,
and ends both in the right order.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import httpx

from flashmoa.cli.checks import compiler, excludes_plugin, installed, pip_install, runs_engines
from flashmoa.cli.ports import bind, port_problem, root_url

# The reasons why arguments of SGLang do not go with --dynamo.
_NOT_WITH_DYNAMO = {
    "grpc_port": "which sets it from --port",
    "kv_events_config": "which sets it from --port",
    "sidecar": "which runs Dynamo's sidecar itself",
    "api_key": "whose gRPC server asks nobody for it; keep the ports private",
    "admin_api_key": "whose gRPC server asks nobody for it; keep the ports private",
}
# Requests may still come through a sidecar for this time after it has said that it takes no more.
_LEAVE_SECONDS = 5.0
# How often a worker's schedulers are asked whether they go on.
_ASK_SECONDS = 2.0
# SGLang's own limit for schedulers that do not answer, as in a long forward, and its default.
_HANG_LIMIT, _HANG_SECONDS = "SGLANG_HEALTH_CHECK_TIMEOUT", "20"
_HELP = """\
usage: flashmoa serve --model-path PATH [--dynamo] [--drain-seconds SECONDS] [any SGLang argument]

Starts SGLang with FlashMoA's plugin, on the CPU if there is no GPU. All arguments but these are
SGLang's: python -m sglang.launch_server --help

  --dynamo                 make the engine a worker of NVIDIA Dynamo, on its port and the next
                           three; python -m dynamo.frontend starts the front end
  --drain-seconds SECONDS  how long requests may still run after SIGTERM or Ctrl-C; then they are
                           ended (30)
"""


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped. Return the exit status."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(_HELP, end="")
        return 0 if arguments else 2
    try:
        server = _make_server(arguments)
    except (OSError, ValueError) as problem:
        _print_message(str(problem))
        return 2
    return server.run()


def _make_server(arguments: Sequence[str]) -> Server:
    """Return a server with these arguments. Raises: OSError or ValueError if none can start."""
    _check_installation()
    options, of_sglang = _parse_own_options(arguments)
    _check_arguments(options)
    if excludes_plugin(allowed := os.environ.get("SGLANG_PLUGINS", "")):
        _print_message(
            f"SGLANG_PLUGINS={allowed} keeps the plugin out, so nothing is linked on this "
            "engine; unset it, or add flashmoa to it"
        )
    if compiler() is None:
        text = "there is no C compiler, and SGLang compiles kernels: apt-get install gcc"
        _print_message(text)
    host: str = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host) or options.host
    scheme = "http" if options.ssl_certfile is None else "https"
    sidecar: list[str] = []
    if options.dynamo:
        _become_worker(options, of_sglang)
        # SGLang's gRPC server listens only at this host.
        endpoint = root_url(host, options.port + 2)
        sidecar = [sys.executable, "-m", "dynamo.sglang.sidecar", "--grpc-endpoint", endpoint]
    command = [sys.executable, "-m", "flashmoa_sglang.serve", *of_sglang]
    url = root_url(host, options.port, scheme)
    return Server(command, url, options.drain_seconds, sidecar)


def _become_worker(options: argparse.Namespace, of_sglang: list[str]) -> None:
    """Make the engine a worker of Dynamo. Raises: OSError or ValueError if that is impossible.

    The ports of Dynamo's request plane, of SGLang's gRPC server and of its KV events follow the
    port of its HTTP server. ``flashmoa.engine.front_end`` relies on that to find the engine.
    """
    if find_spec("dynamo") is None:
        raise ValueError("--dynamo needs Dynamo: pip install --no-deps -r requirements/dynamo.txt")
    for name, why in _NOT_WITH_DYNAMO.items():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --dynamo, {why}")
    request_plane, grpc, events = (options.port + number for number in (1, 2, 3))
    kv_events = {"publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{events}"}
    of_sglang += [
        "--grpc-port", str(grpc), "--kv-events-config", json.dumps(kv_events),
        "--incremental-streaming-output",
        "--page-size", str(options.page_size),
    ]  # fmt: skip
    settings = {
        "DYN_TCP_RPC_PORT": str(request_plane),
        # On one machine, these need no servers of Dynamo's own.
        "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
    }  # fmt: skip
    if options.host not in ("0.0.0.0", "::"):
        settings["DYN_TCP_RPC_HOST"] = options.host
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # At this limit, the sidecar would end running answers as if they were complete.
    for name in ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"):
        os.environ[name] = str(int(min(options.drain_seconds, 1e8)) + 60)
    for port in (request_plane, grpc, events):
        if problem := port_problem(port):
            raise ValueError(f"{problem}; --dynamo takes the three after it, too")
        bind(options.host, port).close()


def _print_message(text: str) -> None:
    print(f"flashmoa serve: {text}", file=sys.stderr, flush=True)


def _parse_own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own argument, and the SGLang arguments that are checked here.

    The arguments in ``--config``'s file count, too. Return the options, and the arguments that
    SGLang parses itself.
    """
    own = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    own.add_argument("--drain-seconds", type=float, default=30.0)
    own.add_argument("--dynamo", action="store_true")
    options, of_sglang = own.parse_known_args(arguments)
    checked = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    checked.add_argument("--model-path", "--model")
    checked.add_argument("--host", default="127.0.0.1")
    checked.add_argument("--port", type=int, default=30000)
    checked.add_argument("--ssl-certfile")
    checked.add_argument("--config")
    # The default of Dynamo's front end, too.
    checked.add_argument("--page-size", type=int, default=16)
    for name in _NOT_WITH_DYNAMO:
        checked.add_argument(f"--{name.replace('_', '-')}")
    in_file = _read_config_file(checked.parse_known_args(of_sglang)[0].config)
    return checked.parse_known_args([*in_file, *of_sglang], options)[0], of_sglang


def _read_config_file(file: str | None) -> list[str]:
    """Return the arguments with a value in SGLang's ``--config`` file.

    If the file cannot be read, SGLang ends with the reason.
    """
    if file is None:
        return []
    yaml = import_module("yaml")
    try:
        values: dict[str, object] = yaml.safe_load(Path(file).read_text()) or {}
        return [f"--{name}={value}" for name, value in values.items()]
    except (AttributeError, OSError, ValueError, yaml.YAMLError):
        return []


def _check_installation() -> None:
    """Raise ValueError with the reason if no engine can run on this machine."""
    if not runs_engines():
        raise ValueError(
            "SGLang runs on Linux only; start the engine there (or in WSL or Docker) and give "
            "clients its URL"
        )
    if find_spec("sglang") is None:
        raise ValueError("SGLang is not installed here; README.md says how, for a GPU and a CPU")
    if find_spec("flashmoa_sglang") is None:
        install = pip_install("flashmoa-sglang", "./server_patches")
        raise ValueError(f"the plugin is not installed here: {install}")
    releases = import_module("flashmoa_sglang.sglang.releases")
    if problem := releases.too_old(installed("sglang") or ""):
        raise ValueError(problem)


def _check_arguments(options: argparse.Namespace) -> None:
    """Find mistakes that SGLang would find only after half a minute.

    Raises: OSError or ValueError with the reason.
    """
    path = options.model_path
    if path is None and options.config is None:
        raise ValueError("no model is given; add --model-path PATH")
    if path is not None and path.startswith(("/", ".")) and not Path(path).exists():
        raise ValueError(f"--model-path {path} does not exist")
    if not options.drain_seconds >= 0:
        raise ValueError(f"--drain-seconds {options.drain_seconds:g} is not at least 0")
    if not (limit := os.environ.get(_HANG_LIMIT, _HANG_SECONDS)).isdecimal():
        raise ValueError(
            f"{_HANG_LIMIT}={limit} is no whole number of seconds; set one, or unset it"
        )
    if problem := port_problem(options.port):
        raise ValueError(problem)
    bind(options.host, options.port).close()


class Server:
    """Runs a server's process, and ends every process that it has started.

    Args:
        drain_seconds: time for running requests once the server is asked to stop.
        sidecar: starts a process that brings the server requests, once the server is ready. The
            sidecar is asked to end first and tells its clients so, but has to pass on answers until
            the server has ended.
    """

    def __init__(
        self, command: Sequence[str], url: str, drain_seconds: float, sidecar: Sequence[str] = ()
    ) -> None:
        self._command = list(command)
        self._url = url
        self._drain_seconds = drain_seconds
        self._sidecar = list(sidecar)
        # All processes; the first is asked to end first.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked: list[subprocess.Popen[bytes]] = []
        self._stopping_since = self._kill_at = math.inf
        # The time to ask the schedulers again, and the time since when they do not answer.
        self._ask_again_at = 0.0
        self._silent_since = math.inf
        self._hang_seconds = int(os.environ.get(_HANG_LIMIT, _HANG_SECONDS)) if sidecar else 0

    def run(self) -> int:
        """Serve until SIGINT, SIGTERM or SIGHUP arrives, or until the server ends by itself.

        Returns: the exit status, 0 if it was stopped. A failed server's output is followed by a
            message that says how it ended.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle_signal)
        text = "starting SGLang, which takes 20 s to two minutes; a line says when it is ready"
        print(f"flashmoa: {text}", file=sys.stderr, flush=True)
        server = self._start(self._command)
        is_ready = False
        try:
            while server.poll() is None and time.monotonic() < self._kill_at:
                if self._is_stopping:
                    self._ask_to_end()
                elif any(process.poll() is not None for process in self._processes):
                    break
                elif is_ready and self._sidecar:
                    self._watch_schedulers()
                elif not is_ready and self._takes_requests():
                    is_ready = True
                    self._print_ready()
                    if self._sidecar:
                        self._start(self._sidecar)
                time.sleep(0.2)
        finally:
            code = server.poll()
            self._kill()
        if self._is_stopping or code == 0:
            return 0
        # SGLang kills itself if one of its processes fails. Its return code is then negative.
        name = "SGLang" if code is not None else "Dynamo's sidecar"
        code = self._processes[0].returncode if code is None else code
        how = f"with status {code}" if code >= 0 else f"by signal {-code}"
        _print_message(f"{name} ended {how}; the lines above say why. Try `flashmoa doctor`.")
        return max(code, 1)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=_die_with_parent,
        )
        self._processes.insert(0, process)
        return process

    @property
    def _is_stopping(self) -> bool:
        return self._stopping_since < math.inf

    def _ask_to_end(self) -> None:
        since = time.monotonic() - self._stopping_since
        for number, process in enumerate(self._processes):
            if process not in self._asked and since >= number * _LEAVE_SECONDS:
                self._asked.append(process)
                # On SIGINT, SGLang would wait for its child processes instead of draining.
                process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        """Kill all processes, the sidecar first: without its server it would answer errors.

        If a sidecar is gone, Dynamo's front end continues its answers on another worker.
        """
        for process in self._processes:
            _kill(process)

    def _watch_schedulers(self) -> None:
        """Let the sidecar leave Dynamo while the schedulers hang, for instance with a GPU.

        Dynamo itself sees only that the server's process is alive. Running answers continue on
        other workers.
        """
        if (now := time.monotonic()) < self._ask_again_at:
            return
        self._ask_again_at = now + _ASK_SECONDS
        is_joined = len(self._processes) > 1
        if self._schedules():
            self._silent_since = math.inf
            if not is_joined:
                _print_message("its schedulers go on, so the engine joins Dynamo again")
                self._start(self._sidecar)
            return
        self._silent_since = min(self._silent_since, now)
        if is_joined and time.monotonic() - self._silent_since >= self._hang_seconds:
            _print_message(f"its schedulers hang for {self._hang_seconds} s, so it leaves Dynamo")
            sidecar = self._processes.pop(0)
            sidecar.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sidecar.wait(timeout=1.0)
            _kill(sidecar)

    def _schedules(self) -> bool:
        """Return whether all schedulers answer; an engine without the plugin does not tell."""
        # The engine reports a silent scheduler after 5 s.
        answer = self._get("/flashmoa/info", seconds=6.0)
        if answer is None or answer.is_error:
            return answer is not None
        info = answer.json()
        return len(info["kv"]) == info["data_parallel_ranks"]

    def _print_ready(self) -> None:
        text = f"flashmoa: ready on {self._url} (OpenAI API: {self._url}/v1)"
        # On a terminal it must stand out below a hundred lines of SGLang's log.
        print(f"\n\033[1m{text}\033[0m\n" if sys.stdout.isatty() else text, flush=True)

    def _takes_requests(self) -> bool:
        """Return whether the server has warmed up; a server without the plugin does not tell."""
        answer = self._get("/health/ready")
        if answer is not None and answer.status_code == 404:
            answer = self._get("/model_info")
        return answer is not None and answer.status_code in (200, 401)

    def _get(self, path: str, seconds: float = 2.0) -> httpx.Response | None:
        try:
            # Proxies do not reach this machine's own addresses, and certificates do not name them.
            url = f"{self._url}{path}"
            return httpx.get(url, timeout=seconds, trust_env=False, verify=False)
        except httpx.TransportError:
            return None

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Let running requests finish. At the second signal, end at once."""
        now = time.monotonic()
        self._kill_at = now if self._is_stopping else now + self._drain_seconds
        self._stopping_since = min(now, self._stopping_since)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends.

    SIGKILL, because on SIGTERM SGLang would wait for its requests, whose clients may be gone. The
    other processes of SGLang end with this one.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
