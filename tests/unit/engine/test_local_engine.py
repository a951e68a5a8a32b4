"""Test when a local engine counts as running, with other processes in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flashmoa.engine.local import LocalEngine


def test_an_engine_runs_until_its_last_process_has_ended(tmp_path: Path) -> None:
    """Count no ended process, though nobody has waited for it, as in some containers."""
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
