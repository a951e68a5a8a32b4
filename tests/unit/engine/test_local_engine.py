"""Test when a local engine counts as running, with other processes in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import anyio
import pytest
from flashmoa_bench.harness.modelled_gpus import read_device

from flashmoa.engine.local import LocalEngine
from flashmoa.errors import EngineError, EngineUnreachable


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"internal_states": [{"modelled_gpu": {"name": "h200"}}]}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port_of_server() -> Iterator[int]:
    """Return the port of a server that answers like an engine that is ready."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.anyio
async def test_an_engine_on_this_machine_is_not_asked_through_a_proxy(
    port_of_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    engine = LocalEngine(os.getpgid(0), port_of_server, tmp_path / "engine.log")
    with anyio.fail_after(5):
        await engine.wait_until_ready()
    assert await read_device(engine.url) == {"name": "h200"}


@pytest.mark.anyio
async def test_an_engine_may_take_as_long_as_it_is_given(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("still loading")
    engine = LocalEngine(os.getpgid(0), 9, log)
    with pytest.raises(EngineError, match=r"not ready within 0 s(?s:.*)still loading"):
        await engine.wait_until_ready(0.2)


@pytest.mark.anyio
async def test_an_engine_that_has_ended_is_not_one_without_a_modelled_gpu() -> None:
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await read_device("http://127.0.0.1:9")


def test_an_engine_runs_until_its_last_process_has_ended(tmp_path: Path) -> None:
    """Count no ended process, though its parent has not waited for it, as in some containers."""
    code = "import subprocess, sys; subprocess.Popen(['cat']).wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    engine = LocalEngine(process.pid, 1, tmp_path / "engine.log")
    assert engine.is_running()
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not engine.is_running()
    process.wait()
    assert not engine.is_running()


def test_an_engine_runs_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    """Count a process that is shown as a zombie while a thread of it may hold its sockets."""
    code = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start()"
    code += "; ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    status = Path(f"/proc/{process.pid}/status")
    while "State:\tZ" not in status.read_text():
        os.sched_yield()
    assert LocalEngine(process.pid, 1, tmp_path / "engine.log").is_running()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not LocalEngine(process.pid, 1, tmp_path / "engine.log").is_running()
    process.wait()
    process.stdin.close()


def test_a_process_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    """Names are cut after 15 bytes, also within a character."""
    set_name = 15
    code = f"import ctypes; ctypes.CDLL(None).prctl({set_name}, b'\\xff'); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    while Path(f"/proc/{process.pid}/comm").read_bytes() != b"\xff\n":
        os.sched_yield()
    assert LocalEngine(process.pid, 1, tmp_path / "engine.log").is_running()
    process.communicate()
