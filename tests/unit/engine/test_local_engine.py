"""Test when a local engine counts as running, with other processes in its place."""

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from flashmoa_bench.harness.modelled_gpus import read_device

from flashmoa.engine.local import LocalEngine
from flashmoa.errors import EngineError, EngineUnreachable
from tests.unit.engine.web_server import web_server


async def test_a_local_engine_has_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with web_server(b'{"internal_states": [{"modelled_gpu": {"name": "h200"}}]}') as server:
        engine = LocalEngine(os.getpgid(0), int(server.url.split(":")[-1]), tmp_path / "engine.log")
        with anyio.fail_after(5):
            await engine.wait_until_ready()
        assert await read_device(engine.url) == {"name": "h200"}


async def test_an_engine_may_take_as_long_as_it_is_given(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("still loading")
    engine = LocalEngine(os.getpgid(0), 9, log)
    with pytest.raises(EngineError, match=r"not ready within 0 s(?s:.*)still loading"):
        await engine.wait_until_ready(0.2)


async def test_an_ended_engine_has_no_device() -> None:
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await read_device("http://127.0.0.1:9")


def start(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def test_an_engine_runs_until_its_last_process_ends(tmp_path: Path) -> None:
    """Count no ended process, though its parent has not waited for it, as in some containers."""
    process = start("import subprocess, sys; subprocess.Popen(['cat']).wait()")
    engine = LocalEngine(process.pid, 1, tmp_path / "engine.log")
    assert engine.is_running()
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not engine.is_running()
    process.wait()
    assert not engine.is_running()


def test_an_engine_runs_until_its_last_thread_ends(tmp_path: Path) -> None:
    """Count a process that is shown as a zombie while one thread may hold its sockets."""
    code = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start()"
    process = start(f"{code}; ctypes.CDLL(None).pthread_exit(None)")
    status = Path(f"/proc/{process.pid}/status")
    while "State:\tZ" not in status.read_text():
        os.sched_yield()
    engine = LocalEngine(process.pid, 1, tmp_path / "engine.log")
    assert engine.is_running()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not engine.is_running()
    process.communicate()


def test_a_process_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    """Names are cut after 15 bytes, also within a character."""
    set_name = 15
    code = f"import ctypes; ctypes.CDLL(None).prctl({set_name}, b'\\xff'); input()"
    process = start(code)
    while Path(f"/proc/{process.pid}/comm").read_bytes() != b"\xff\n":
        os.sched_yield()
    assert LocalEngine(process.pid, 1, tmp_path / "engine.log").is_running()
    process.communicate()
