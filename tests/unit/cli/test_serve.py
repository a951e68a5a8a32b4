"""Starts and ends of ``flashmoa serve``, with another program in SGLang's place."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from pytest import CaptureFixture, MonkeyPatch

from flashmoa.cli import moa, router, serve
from flashmoa.cli.ports import bind
from flashmoa.engine.local import free_port
from flashmoa.router.engines import RouterOptions

# Another program instead of SGLang, the engine's URL, how long it may drain, and its sidecar.
SERVER = """
import sys
from flashmoa.cli import serve
serve._LEAVE_SECONDS, serve._ASK_SECONDS = 1, 0.1
instead, url, drain_seconds, *sidecar = sys.argv[1:]
sidecar = [sys.executable, "-c", *sidecar] if sidecar else []
server = serve.Server([sys.executable, "-c", instead], url, float(drain_seconds), sidecar)
print("ended:", server.run(), flush=True)
"""


def start(
    instead: str, drain_seconds: str = "30", url: str = "http://127.0.0.1:9", *sidecar: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER, instead, url, drain_seconds, *sidecar]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def ends(process: int) -> bool:
    """Wait until a process has ended."""
    descriptor = os.pidfd_open(process)
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("instead", "status", "ended"),
    [
        ("import sys; sys.exit('RuntimeError: no memory')", 1, "with status 1"),
        ("import os; os._exit(3)", 3, "with status 3"),
        ("import os; os.kill(os.getpid(), 9)", 1, "by signal 9"),
    ],
)
def test_a_failed_start_ends_with_one_sentence(instead: str, status: int, ended: str) -> None:
    out, errors = start(instead).communicate(timeout=60)
    assert out == f"ended: {status}\n"
    *output, last = errors.splitlines()
    assert last.startswith(f"flashmoa serve: SGLang ended {ended}; the lines above say why.")
    assert ("RuntimeError: no memory" in output) == ("exit('" in instead)


def test_interrupt_during_start_leaves_no_process() -> None:
    process = start("import os, time; print('id', os.getpid(), flush=True); time.sleep(100)")
    _, child = read_line(process)
    process.send_signal(signal.SIGINT)
    out, progress = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended: 0\n")
    # Python itself may tell of the signal; this command does not.
    assert "flashmoa.cli" not in progress
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(("drain_seconds", "finishes"), [("0", False), ("60", True)])
def test_a_stopped_server_may_drain(drain_seconds: str, finishes: bool) -> None:
    drains = (
        "import signal, sys, time;"
        "signal.signal(15, lambda *_: (time.sleep(1), print('finished', flush=True), sys.exit()));"
        "print('started', flush=True); time.sleep(100)"
    )
    process = start(drains, drain_seconds)
    assert read_line(process) == ["started"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out == ("finished\n" if finishes else "") + "ended: 0\n"


# A route answers its statuses in turn, and the last one from then on. One scheduler of two hangs
# while a file is there.
HTTP_ENGINE = """
import http.server, json, os, ssl

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        statuses = STATUSES.get(self.path, [404])
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        if PRINTS:
            print(self.path, status, flush=True)
        self.send_response(status)
        self.end_headers()
        if self.path == "/flashmoa/info":
            kv = [{}] if os.path.exists(HANGS) else [{}, {}]
            self.wfile.write(json.dumps({"kv": kv, "data_parallel_ranks": 2}).encode())
        server.is_ready = status == 200

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", PORT), Engine)
if CERTIFICATE:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*CERTIFICATE)
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.is_ready = False
while not (ENDS and server.is_ready):
    server.handle_request()
"""
READY = {"/health/ready": [200]}


DRAINS = """
import os, signal, sys, time

def end(*_):
    time.sleep(0.3 if NAME == "sidecar" else 0)
    print(NAME, "was asked", flush=True)
    if NAME == "engine":
        sys.exit()

signal.signal(signal.SIGTERM, end)
print(NAME, os.getpid(), flush=True)
"""


def engine_at(port: int, statuses: dict[str, list[int]] = READY, **more: object) -> str:
    """Return a program that answers like an engine, and ends once the engine is ready.

    Args: more: `PRINTS`, whether it prints requests; `CERTIFICATE`, its files; `ENDS`; `HANGS`.
    """
    defaults = {"PRINTS": False, "CERTIFICATE": None, "ENDS": True, "HANGS": ""}
    names = {"PORT": port, "STATUSES": statuses, **defaults, **more}
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + HTTP_ENGINE


@pytest.fixture
def engine_and_sidecar(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Start an engine, and what brings it requests; yield them with the ids of both processes.

    Its schedulers hang while there is a file `hangs`.
    """
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "1")
    port, statuses = free_port(), {**READY, "/flashmoa/info": [200]}
    engine = engine_at(port, statuses, ENDS=False, HANGS=str(tmp_path / "hangs"))
    sidecar = f"NAME = 'sidecar'\n{DRAINS}time.sleep(100)"
    url = f"http://127.0.0.1:{port}"
    with start(f"NAME = 'engine'\n{DRAINS}{engine}", "30", url, sidecar) as process:
        lines = [read_line(process) for _ in range(3)]
        assert [line[0] for line in lines] == ["engine", "flashmoa:", "sidecar"]
        yield process, int(lines[0][1]), int(lines[2][1])
        process.kill()


Started = tuple[subprocess.Popen[str], int, int]


def test_a_sidecar_leaves_first_and_ends_last(engine_and_sidecar: Started) -> None:
    process, _, sidecar = engine_and_sidecar
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out.splitlines() == ["sidecar was asked", "engine was asked", "ended: 0"]
    assert not Path(f"/proc/{sidecar}").exists()


def test_an_engine_without_its_sidecar_fails(engine_and_sidecar: Started) -> None:
    process, engine, sidecar = engine_and_sidecar
    os.kill(sidecar, signal.SIGKILL)
    out, errors = process.communicate(timeout=60)
    assert out == "ended: 1\n" and "Dynamo's sidecar ended by signal 9" in errors
    assert not Path(f"/proc/{engine}").exists()


def test_a_sidecar_is_gone_while_schedulers_hang(
    engine_and_sidecar: Started, tmp_path: Path
) -> None:
    process, _, first = engine_and_sidecar
    (tmp_path / "hangs").touch()
    assert ends(first)
    (tmp_path / "hangs").unlink()
    # It may have been killed before it could say that it was asked to leave.
    while (line := read_line(process))[1:] == ["was", "asked"]:
        pass
    assert line[0] == "sidecar" and line[1] != f"{first}"
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert out.splitlines() == ["sidecar was asked", "engine was asked", "ended: 0"]
    assert "its schedulers hang" in errors and "joins Dynamo again" in errors


def test_nothing_survives_a_killed_command(engine_and_sidecar: Started) -> None:
    process, *children = engine_and_sidecar
    process.kill()
    assert all(map(ends, children))


def test_a_signal_during_the_start_is_not_lost() -> None:
    stopped = SERVER.replace(
        "server = ",
        "import os, signal, subprocess\n"
        "class Popen(subprocess.Popen):\n"
        "    def __init__(self, *arguments, **options):\n"
        "        super().__init__(*arguments, **options)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen = Popen\n"
        "server = ",
    )
    command = [sys.executable, "-c", stopped, "import time; time.sleep(100)", "http://[::1]:9"]
    ended = subprocess.run([*command, "30"], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "ended: 0\n"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxies_and_certificates_do_not_matter(
    scheme: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    files = [str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")]
    make = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=elsewhere"]
    subprocess.run([*make, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    port = free_port()
    engine = engine_at(port, CERTIFICATE=files if scheme == "https" else None)
    url = f"{scheme}://127.0.0.1:{port}"
    out, _ = start(engine, url=url).communicate(timeout=60)
    assert f"flashmoa: ready on {url} " in out


@pytest.mark.parametrize(
    ("statuses", "asked"),
    [
        # SGLang answers /model_info before it has warmed up.
        (
            {"/health/ready": [503, 503, 200], "/model_info": [200]},
            ["/health/ready 503", "/health/ready 503", "/health/ready 200"],
        ),
        ({"/model_info": [200]}, ["/health/ready 404", "/model_info 200"]),
    ],
    ids=["with the plugin", "without the plugin"],
)
def test_a_server_is_ready_when_it_has_warmed_up(
    statuses: dict[str, list[int]], asked: list[str]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    out, _ = start(engine_at(port, statuses, PRINTS=True), url=url).communicate(timeout=60)
    ready = f"flashmoa: ready on {url} (OpenAI API: {url}/v1)"
    assert out.splitlines()[:-1] == [*asked, ready]


def test_the_ready_line_stands_out_on_a_terminal(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    serve.Server([], "http://h:1", 1)._print_ready()
    line = "flashmoa: ready on http://h:1 (OpenAI API: http://h:1/v1)"
    assert capsys.readouterr().out == f"\n\033[1m{line}\033[0m\n\n"


def test_the_address_is_read_from_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    given = ["--config", str(file), "--host", "::1"]
    file.write_text("model-path: m\nhost: 0.0.0.0\nport: 31000\nssl-certfile: c.pem\n")
    options, of_sglang = serve._parse_own_options([*given, "--drain-seconds", "5"])
    assert (options.model_path, options.host, options.port) == ("m", "::1", 31000)
    assert options.ssl_certfile == "c.pem"
    # SGLang does not get the command's own argument.
    assert options.drain_seconds == 5 and of_sglang == given


MODEL = ["--model-path", "a/b"]
DYNAMO = [*MODEL, "--dynamo"]


@pytest.fixture
def dynamo(monkeypatch: MonkeyPatch) -> None:
    """Have Dynamo installed, and every argument accepted."""
    for name in ("_check_installation", "_check_arguments", "find_spec"):
        monkeypatch.setattr(serve, name, MagicMock())
    monkeypatch.setattr(os, "environ", {**os.environ})


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("0.0.0.0", "http://127.0.0.1:30002"),
        ("::", "http://[::1]:30002"),
        ("10.0.0.5", "http://10.0.0.5:30002"),
    ],
)
@pytest.mark.usefixtures("dynamo")
def test_a_sidecar_asks_where_its_engine_listens(
    host: str, endpoint: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "bind", MagicMock())
    monkeypatch.setattr(serve, "Server", started := MagicMock())
    serve.main([*MODEL, "--dynamo", "--host", host])
    command, _, _, sidecar = started.call_args.args
    assert sidecar[-2:] == ["--grpc-endpoint", endpoint]
    assert command[command.index("--grpc-port") + 1] == endpoint.rpartition(":")[2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*MODEL, "--drain-seconds", "-1"], "--drain-seconds -1 is not at least 0"),
        (["--model-path", "/no/such/model"], "--model-path /no/such/model does not exist"),
        (["--tp", "2"], "no model is given; add --model-path PATH"),
        ([*MODEL, "--port", "99999"], "--port 99999 is not between 1 and 65535"),
        ([*MODEL, "--host", "no.invalid"], "cannot listen on no.invalid:30000"),
        (MODEL, "SGLANG_HEALTH_CHECK_TIMEOUT=20s is no whole number"),
        # A worker of Dynamo has its ports, and no key.
        ([*DYNAMO, "--port", "65535"], "--dynamo takes the three after it"),
        ([*DYNAMO, "--grpc-port", "30009"], "--grpc-port does not go with --dynamo, which sets it"),
        ([*DYNAMO, "--kv-events-config", "{}"], "--kv-events-config does not go with --dynamo"),
        ([*DYNAMO, "--api-key", "key"], "keep the ports private"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    arguments: list[str],
    problem: str,
    request: pytest.FixtureRequest,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    if "--dynamo" in arguments:
        request.getfixturevalue("dynamo")
    if "SGLANG" in problem:
        monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "20s")
    assert serve.main(arguments) == 2
    assert problem in capsys.readouterr().err


ENGINE = ["--engine", "http://127.0.0.1:9"]
PAIR = ["--prefill", "http://127.0.0.1:8", "--pd-router", "http://127.0.0.1:9"]
SERVE = ["serve", "moa.toml"]


@pytest.mark.parametrize(
    ("command", "arguments", "problem"),
    [
        (moa.main, [*SERVE, "--port", "0"], "--port 0 is not between 1 and 65535"),
        (moa.main, [*SERVE, "--max-questions", "0"], "0 is not above 0"),
        (moa.main, [*SERVE, "--max-questions", "-1"], "-1 is not above 0"),
        (router.main, [*ENGINE, "--port", "70000"], "--port 70000 is not between 1 and 65535"),
        (router.main, [*ENGINE, "--patience", "nan"], "nan is refused; give a number of at least"),
        (router.main, [*ENGINE, "--max-body-bytes", "0"], "0 is refused; give a number above 0"),
        (router.main, [*PAIR, "--agent-seconds", "0"], "0 is refused; give a number above 0"),
        (router.main, [*ENGINE, "--saturation", "x"], "--saturation: invalid float value: 'x'"),
        (router.main, [*PAIR, *PAIR], "each of these two once"),
        (router.main, [], "--prefill and --pd-router"),
        (router.main, ["--prefill", "a:1"], "--prefill and --pd-router"),
        (router.main, [*ENGINE, *PAIR], "--prefill and --pd-router"),
        (router.main, [*ENGINE, "--decode", "http://a:8"], "give --prefill and --pd-router"),
        (router.main, ["--help"], "--patience"),
    ],
)
def test_bad_options_are_refused(
    command: Callable[[list[str]], int],
    arguments: list[str],
    problem: str,
    capsys: CaptureFixture[str],
) -> None:
    is_help = arguments == ["--help"]
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == (0 if is_help else 2)
    assert problem in capsys.readouterr()[not is_help]


def test_an_interrupted_check_ends_with_130(monkeypatch: MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(moa, "_check", interrupt)
    monkeypatch.setattr("flashmoa.moa.config.read_file", lambda _: [])
    assert moa.main(["check", "moa.toml"]) == 130


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*ENGINE, "--port", "{taken}"], "port {taken} is in use; choose another one with --port"),
        (["--engine", "nonsense"], "nonsense"),
        ([*ENGINE, "--model-config", "{file}"], "--model-config {file} is not JSON: Expecting"),
    ],
)
def test_a_failed_router_announces_nothing(
    arguments: list[str], problem: str, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text("model_type: llama")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"taken": taken.getsockname()[1], "file": file}
        assert router.main([each.format(**values) for each in arguments]) == 1
    printed = capsys.readouterr()
    assert problem.format(**values) in printed.err and not printed.out


def test_a_router_announces_its_engines(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def close(_: object, sockets: list[socket.socket]) -> None:
        for bound in sockets:
            bound.close()

    monkeypatch.setattr(router, "_serve", close)
    port = free_port()
    assert router.main([*ENGINE, *ENGINE, "--host", "::1", "--port", str(port)]) == 0
    assert capsys.readouterr().out == f"flashmoa: 1 engine behind http://[::1]:{port}/v1\n"


def test_a_router_gets_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[RouterOptions] = []
    monkeypatch.setattr("flashmoa.router.application.application", given.append)
    monkeypatch.setattr(router, "_serve", lambda _app, sockets: sockets[0].close())
    assert router.main([*ENGINE, "--saturation", "2", "--port", str(free_port())]) == 0
    assert [one.saturation_margin for one in given] == [2.0]


@pytest.mark.parametrize(
    ("name", "found", "problem"),
    [
        ("installed", "0.4.6", "SGLang 0.4.6 is too old"),
        ("find_spec", None, "SGLang is not installed"),
        ("runs_engines", False, "Linux only"),
    ],
)
def test_unfit_systems_are_refused(
    name: str, found: object, problem: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, name, lambda *_: found)
    assert serve.main(MODEL) == 2
    assert problem in capsys.readouterr().err


def test_an_event_loop_sends_answers_at_once() -> None:
    """Nagle's algorithm would hold up the second part of an answer by 40 ms."""
    answered = asyncio.Queue[int]()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: socket.socket = writer.get_extra_info("socket")
        answered.put_nowait(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def serve() -> int:
        with bind("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(answer, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await answered.get()

    assert asyncio.run(serve())
