"""``flashmoa serve`` as a user runs it: its output, its signals, and that no process is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from flashmoa.engine.local import free_port
from tests.integration.support import nightly, slow

COMMAND = [sys.executable, "-c", "from flashmoa.cli import main; main()", "serve"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def group_members(leader: int) -> list[int]:
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == leader and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ending", [slow(signal.SIGTERM), nightly(signal.SIGKILL)])
def test_it_prints_its_url_and_leaves_no_process(
    model: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    port = free_port()
    log = tmp_path / "serve.log"
    arguments = ["--model-path", str(model), "--port", str(port), "--max-total-tokens", "2000"]
    with log.open("wb") as output:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 200
        while f"ready on http://127.0.0.1:{port}" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        info = httpx.get(f"http://127.0.0.1:{port}/flashmoa/info", timeout=30).json()
        assert info["plugin"]["name"] == "flashmoa-sglang"
        # This number comes from the scheduler, a spawned process that loads the plugin itself.
        assert info["kv"][0]["total"] == 2000
        (leader,) = children(process.pid)
        assert len(group_members(leader)) >= 3
        process.send_signal(ending)
        code = process.wait(60)
        assert code == (0 if ending != signal.SIGKILL else -signal.SIGKILL)
        deadline = time.monotonic() + 60
        while group_members(leader):
            assert time.monotonic() < deadline, group_members(leader)
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)


def test_wrong_arguments_are_reported_before_sglang_is_imported(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("--model-path", str(model), "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"port {port} is in use" in done.stderr
    done = run("--port", "30999")
    assert done.returncode == 2
    assert "--model-path" in done.stderr
    assert "usage: flashmoa serve" in run("--help").stdout
