"""``flashmoa serve``: start an SGLang server with the plugin, and leave no process behind.

SGLang runs as ``python -m flashmoa_sglang.serve`` in a process group of its own and writes to the
same terminal, and so does Dynamo's sidecar. This process waits until SGLang answers, prints its
URL, and lets them end in the right order.
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

from flashmoa.cli.checks import compiler, excludes_plugin, in_clone, installed, runs_engines
from flashmoa.cli.ports import api_url, bind, port_problem

_DEFAULT_PORT = 30000
_POLL_SECONDS = 0.2
# Dynamo's front end has blocks of this size, too, unless it is told otherwise.
_DYNAMO_PAGE = 16
# Why arguments of SGLang do not go with --dynamo.
_NOT_WITH_DYNAMO = {
    "grpc_port": "which sets it from --port",
    "kv_events_config": "which sets it from --port",
    "sidecar": "which runs Dynamo's sidecar itself",
    "api_key": "whose gRPC server asks nobody for it; keep the ports private",
    "admin_api_key": "whose gRPC server asks nobody for it; keep the ports private",
}
# How long requests may still come through a sidecar that says that it takes no more.
_LEAVE_SECONDS = 5.0
# How often the schedulers of a worker of Dynamo are asked whether they go on, and for how long they
# may not answer, as in a long forward. SGLang's own limit is the same, and its default. The engine
# says after 5 s that one of them does not answer.
_LOOK_SECONDS, _INFO_SECONDS = 2.0, 6.0
_HANG_LIMIT, _HANG_SECONDS = "SGLANG_HEALTH_CHECK_TIMEOUT", "20"
# How long a sidecar has to leave its front end.
_GONE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
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
    problem = _installation_problem()
    if problem is not None:
        _print_message(problem)
        return 2
    options, of_sglang = _parse_own_options(arguments)
    problem = _argument_problem(options)
    if problem is not None:
        _print_message(problem)
        return 2
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
    url = api_url(host, options.port, scheme).removesuffix("/v1")
    if options.dynamo and (problem := _become_worker(options, of_sglang)):
        _print_message(problem)
        return 2
    sidecar = [sys.executable, "-m", "dynamo.sglang.sidecar", "--grpc-endpoint"]
    # SGLang's gRPC server listens at this host only.
    sidecar += [api_url(host, options.port + 2).removesuffix("/v1")]
    command = [sys.executable, "-m", "flashmoa_sglang.serve", *of_sglang]
    return Server(command, url, options.drain_seconds, sidecar if options.dynamo else ()).run()


def _become_worker(options: argparse.Namespace, of_sglang: list[str]) -> str | None:
    """Make the engine a worker of Dynamo; return why that is not possible, if so.

    Its other ports follow that of its HTTP server, by which ``flashmoa.engine.front_end`` finds the
    engine: those of Dynamo's request plane, of SGLang's gRPC server and of its KV events.
    """
    if find_spec("dynamo") is None:
        return "--dynamo needs Dynamo: pip install --no-deps -r requirements/dynamo.txt"
    for name, why in _NOT_WITH_DYNAMO.items():
        if getattr(options, name) is not None:
            return f"--{name.replace('_', '-')} does not go with --dynamo, {why}"
    request_plane, grpc, events = (options.port + number for number in (1, 2, 3))
    kv_events = {"publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{events}"}
    of_sglang += [
        "--grpc-port", str(grpc), "--kv-events-config", json.dumps(kv_events),
        "--incremental-streaming-output",
        "--page-size", str(options.page_size),
    ]  # fmt: skip
    settings = {
        "DYN_TCP_RPC_PORT": str(request_plane),
        # What Dynamo needs no servers of its own for, on one machine.
        "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
    }  # fmt: skip
    if options.host not in ("0.0.0.0", "::"):
        settings["DYN_TCP_RPC_HOST"] = options.host
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # When its time is over, the sidecar ends the answers that run as if they were complete.
    for name in ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"):
        os.environ[name] = str(int(min(options.drain_seconds, 1e8)) + 60)
    for port in (request_plane, grpc, events):
        if problem := port_problem(port):
            return f"{problem}; --dynamo takes the three after it, too"
        try:
            bind(options.host, port).close()
        except OSError as error:
            return str(error)
    return None


def _print_message(text: str) -> None:
    print(f"flashmoa serve: {text}", file=sys.stderr, flush=True)


def _parse_own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own argument, and the SGLang arguments that are checked here.

    Those of ``--config``'s file count, too. Return them with the arguments that are SGLang's, which
    it parses itself.
    """
    own = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    own.add_argument("--drain-seconds", type=float, default=30.0)
    own.add_argument("--dynamo", action="store_true")
    options, of_sglang = own.parse_known_args(arguments)
    checked = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    checked.add_argument("--model-path", "--model")
    checked.add_argument("--host", default="127.0.0.1")
    checked.add_argument("--port", type=int, default=_DEFAULT_PORT)
    checked.add_argument("--ssl-certfile")
    checked.add_argument("--config")
    checked.add_argument("--page-size", type=int, default=_DYNAMO_PAGE)
    for name in _NOT_WITH_DYNAMO:
        checked.add_argument(f"--{name.replace('_', '-')}")
    in_file = _read_config_file(checked.parse_known_args(of_sglang)[0].config)
    return checked.parse_known_args([*in_file, *of_sglang], options)[0], of_sglang


def _read_config_file(file: str | None) -> list[str]:
    """Return the arguments with a value in SGLang's ``--config`` file.

    SGLang ends with the reason if the file cannot be read.
    """
    if file is None:
        return []
    yaml = import_module("yaml")
    try:
        values: dict[str, object] = yaml.safe_load(Path(file).read_text()) or {}
        return [f"--{name}={value}" for name, value in values.items()]
    except (AttributeError, OSError, ValueError, yaml.YAMLError):
        return []


def _installation_problem() -> str | None:
    """Return why no engine can run on this machine, ``None`` if one can."""
    if not runs_engines():
        return (
            "SGLang runs on Linux only; start the engine there (or in WSL or Docker) and give "
            "clients its URL"
        )
    if find_spec("sglang") is None:
        return "SGLang is not installed here; README.md says how, for a GPU and for a CPU"
    if find_spec("flashmoa_sglang") is None:
        return f"the plugin is not installed here: {in_clone('./server_patches')}"
    releases = import_module("flashmoa_sglang.sglang.releases")
    return releases.too_old(installed("sglang") or "")


def _argument_problem(options: argparse.Namespace) -> str | None:
    """Return what is wrong with what SGLang reads only after half a minute, if anything."""
    path = options.model_path
    if path is None and options.config is None:
        return "no model is given; add --model-path PATH"
    if path is not None and path.startswith(("/", ".")) and not Path(path).exists():
        return f"--model-path {path} does not exist"
    if not options.drain_seconds >= 0:
        return f"--drain-seconds {options.drain_seconds:g} is not at least 0"
    if not (limit := os.environ.get(_HANG_LIMIT, _HANG_SECONDS)).isdecimal():
        return f"{_HANG_LIMIT}={limit} is no whole number of seconds; set one, or unset it"
    if problem := port_problem(options.port):
        return problem
    try:
        bind(options.host, options.port).close()
    except OSError as error:
        return str(error)
    return None


class Server:
    """Runs a server's process, and ends every process that it has started.

    Args:
        command: starts the server.
        url: where it listens.
        drain_seconds: how long requests may still run once the server is asked to stop.
        sidecar: starts what brings the server requests, if anything does, once the server is ready.
            It is asked to end first, and says so to those who send it requests, but has to pass on
            answers until the server has ended.
    """

    def __init__(
        self, command: Sequence[str], url: str, drain_seconds: float, sidecar: Sequence[str] = ()
    ) -> None:
        self._command = list(command)
        self._url = url
        self._drain_seconds = drain_seconds
        self._sidecar = list(sidecar)
        # In the order in which they are asked to end.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked: list[subprocess.Popen[bytes]] = []
        self._stopping_since = self._kill_at = math.inf
        # When the schedulers are asked again, and since when they do not answer.
        self._look_at = 0.0
        self._hang_seconds = int(os.environ.get(_HANG_LIMIT, _HANG_SECONDS)) if sidecar else 0
        self._silent_since = math.inf

    def run(self) -> int:
        """Serve until SIGINT, SIGTERM or SIGHUP arrives, or until the server ends by itself.

        Returns: the exit status, 0 if it was stopped. If it has failed, a message says how it
            ended, behind the end of its own output.
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
                time.sleep(_POLL_SECONDS)
        finally:
            code = server.poll()
            self._kill()
        if self._is_stopping or code == 0:
            return 0
        # SGLang kills itself if one of its processes has failed. Its return code is then negative.
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
        """Kill what runs: the sidecar first, which would answer errors for its server.

        Dynamo's front end goes on elsewhere with the answers of a sidecar that is gone.
        """
        for process in self._processes:
            _kill(process)

    def _watch_schedulers(self) -> None:
        """Have the sidecar leave while the schedulers hang, say with a GPU, and join again after.

        Dynamo sees only that the server's process is alive. What runs goes on at other workers.
        """
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
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
                sidecar.wait(_GONE_SECONDS)
            _kill(sidecar)

    def _schedules(self) -> bool:
        """Return whether all schedulers answer; an engine without the plugin does not tell."""
        answer = self._get("/flashmoa/info", _INFO_SECONDS)
        if answer is None or answer.is_error:
            return answer is not None
        info = answer.json()
        return len(info["kv"]) == info["data_parallel_ranks"]

    def _print_ready(self) -> None:
        text = f"flashmoa: ready on {self._url} (OpenAI API: {self._url}/v1)"
        # On a terminal it has to be found below a hundred lines of SGLang's log.
        print(f"\n\033[1m{text}\033[0m\n" if sys.stdout.isatty() else text, flush=True)

    def _takes_requests(self) -> bool:
        """Return whether the server has warmed up; a server without the plugin does not tell."""
        answer = self._get("/health/ready")
        if answer is not None and answer.status_code == 404:
            answer = self._get("/model_info")
        return answer is not None and answer.status_code in (200, 401)

    def _get(self, path: str, seconds: float = 2.0) -> httpx.Response | None:
        try:
            # No proxy reaches this machine's own addresses, and certificates do not name them.
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
    """Kill a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, in whatever way.

    SIGKILL, because on SIGTERM SGLang would wait for its requests, whose clients may be gone. The
    other processes of SGLang end with this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
