"""The doctor without an engine: packages, the machine, and URLs of other servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from flashmoa_sglang import internals, releases

import flashmoa
from flashmoa.cli import doctor
from flashmoa.doctor import (
    EngineToCheck,
    check_engine,
    check_installation,
    engine,
    installation,
)
from flashmoa.engine import EngineUnreachable
from tests.unit.plugin.renamed import Renamed

pytestmark = pytest.mark.anyio


@pytest.fixture
def other_server() -> Iterator[str]:
    """Start a web server that answers every path with a page."""
    with serve("text/html", b"<html></html>") as url:
        yield url


@contextmanager
def serve(kind: str, body: bytes) -> Generator[str]:
    """Start a web server that answers every path alike; yield its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_installation_is_ok_without_importing_torch_or_sglang() -> None:
    script = (
        "import sys; from flashmoa.cli import doctor; code = doctor.main(['--json']); "
        "assert not {'torch', 'sglang'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    findings = {finding["about"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    assert findings["SGLang"]["level"] == "ok" and findings["internals"]["level"] == "ok"


def test_an_old_sglang_is_reported_as_a_problem() -> None:
    old = installation.check_release("0.4.6")
    assert old.level == "fix" and all(release in old.text for release in releases.TESTED)
    assert installation.check_release("0.5.19").level == "note"
    assert releases.too_old("0.0.0.dev1+g123") is None


def test_each_missing_internal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A hooked method of a class with bases, one that is called, an attribute that is read.
    for name in ("flush_cache", "stash_chunked_request", "waiting_queue"):
        other = Renamed(name)
        monkeypatch.setattr(internals, "installed", lambda other=other: other)
        (found,) = installation.check_internals()
        assert found.level == "fix"
        assert f"has no sglang.srt.managers.scheduler.Scheduler.{name}" in found.text
        assert found.remedy == f"pip install sglang=={releases.TESTED[-1]}"


def test_missing_internal_of_an_optional_feature_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "installed", lambda: Renamed("run_moe_core"))
    (found,) = installation.check_internals()
    assert found.level == "note" and "--flashmoa-asyncep needs that" in found.text
    # Without a GPU, every engine runs on a CPU.
    monkeypatch.setattr(internals, "installed", lambda: Renamed("PlatformEnum"))
    for gpus, level in ((["nvidia0"], "note"), ([], "fix")):
        monkeypatch.setattr(installation, "accelerators", lambda gpus=gpus: gpus)
        assert [finding.level for finding in installation.check_internals()] == [level]


def test_missing_packages_get_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.shutil, "which", lambda _name: None)
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    remedies = {
        finding.about: finding.remedy for finding in check_installation() if finding.level == "fix"
    }
    assert remedies["C compiler"] == "apt-get install gcc"
    assert "SGLANG_PLATFORM" in remedies["environment"]
    monkeypatch.setattr(installation, "installed", lambda _name: None)
    assert "flashmoa[autogen]" in installation.check_autogen().remedy
    # A machine without both packages has no problem: it is for clients only.
    assert [finding.level for finding in installation.check_plugin()] == ["note"]
    monkeypatch.setattr(installation, "installed", {"sglang": "0.5.18"}.get)
    assert installation.check_plugin()[1].remedy == "pip install ./server_patches"
    monkeypatch.setattr(installation, "installed", {"flashmoa-sglang": "1"}.get)
    (sglang,) = installation.check_plugin()
    assert f"pip install sglang=={releases.TESTED[-1]} (GPU)" in sglang.remedy


async def test_system_other_than_linux_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.sys, "platform", "darwin")
    (_, system) = installation.check_system()
    assert system.level == "note" and "Linux only" in system.text


@pytest.mark.parametrize(
    ("url", "text", "remedy"),
    [
        ("http://127.0.0.1:9", "nothing answers at http://127.0.0.1:9", "--port 9"),
        ("localhost:30000", "is not an engine's URL", "http://HOST:PORT"),
        ("http://127.0.0.1:port", "is not an engine's URL", "http://HOST:PORT"),
    ],
)
async def test_url_without_an_engine(url: str, text: str, remedy: str) -> None:
    (finding,) = await check_engine(EngineToCheck(url))
    assert finding.level == "fix" and text in finding.text and remedy in finding.remedy


async def test_a_server_that_is_not_an_engine_is_a_problem(other_server: str) -> None:
    (finding,) = await check_engine(EngineToCheck(other_server))
    assert (finding.level, finding.text) == ("fix", f"{other_server} answers, but is not an engine")


async def test_an_engine_with_another_version_of_the_plugin_is_named_with_both() -> None:
    info = {"plugin": {"version": "0.0.1"}, "sglang": {"version": "0.5.12"}}
    with serve("application/json", json.dumps(info).encode()) as url:
        (finding,) = await check_engine(EngineToCheck(url))
    assert finding.level == "fix" and "one checkout" in finding.remedy
    assert "flashmoa-sglang 0.0.1" in finding.text and flashmoa.__version__ in finding.text


async def test_a_certificate_that_is_not_trusted_is_said_so() -> None:
    problem = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
    error = EngineUnreachable(f"https://engine cannot be reached ({problem})")
    error.__cause__ = OSError(problem)
    finding = await engine._explain_failure(error, "https://engine", None)
    assert finding.level == "fix" and "SSL_CERT_FILE" in finding.remedy
    assert "the certificate of https://engine is not trusted" in finding.text
    assert "self-signed certificate" in finding.text


async def test_report_shows_remedies_and_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    # anyio.run() needs a thread without the session's event loop.
    command = ["--engine-only", "--engine", "http://127.0.0.1:9"]
    assert await anyio.to_thread.run_sync(doctor.main, command) == 1
    report = capsys.readouterr().out
    assert "fix   engine" in report and "→ flashmoa serve" in report and "1 to fix" in report


def test_torch_without_cuda_is_to_be_fixed_if_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(installation, "_DEVICES", tmp_path)
    monkeypatch.setattr(installation, "_torch_build", lambda: ("2.13.0", None))
    assert installation._check_accelerator()[-1].level == "fix"
    monkeypatch.setattr(installation, "_torch_build", lambda: ("2.13.0", "CUDA 12.8"))
    assert installation._check_accelerator()[-1].text == "nvidia0"


@pytest.mark.parametrize("device", ["dxg", "kfd"])
def test_gpus_of_wsl_and_rocm_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    (tmp_path / device).touch()
    monkeypatch.setattr(installation, "_DEVICES", tmp_path)
    monkeypatch.setattr(installation, "_torch_build", lambda: ("2.13.0", None))
    found = installation._check_accelerator()[-1]
    assert found.level == "note" and f"{device} found" in found.text and found.remedy
    monkeypatch.setattr(installation, "_torch_build", lambda: ("2.13.0", "ROCm 6.4"))
    assert installation._check_accelerator()[-1].text == device


@pytest.mark.parametrize(
    ("lines", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", "CUDA 12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.4'", "ROCm 6.4.4"),
        ("cuda = None\nhip = None", None),
    ],
)
def test_what_torch_is_built_for_is_read_from_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, build: str | None
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{lines}\n")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(installation, "find_spec", lambda _name: spec)
    assert installation._torch_build() == ("2.13.0", build)


@pytest.mark.parametrize(("stat", "free"), [("anon 5\ninactive_file 300\n", 500), ("", 200)])
def test_a_containers_page_cache_is_free_memory(
    monkeypatch: pytest.MonkeyPatch, stat: str, free: int
) -> None:
    files = {
        "/proc/meminfo": "MemAvailable: 1000 kB\n",
        "/sys/fs/cgroup/memory.max": "1000\n",
        "/sys/fs/cgroup/memory.current": "800\n",
        "/sys/fs/cgroup/memory.stat": stat,
    }
    monkeypatch.setattr(installation, "_read", lambda path: files[str(path)])
    assert installation.available_memory() == free


def test_an_engine_beside_whose_decodes_nothing_rides_says_why() -> None:
    def rides(*reasons: str) -> list[tuple[str, str]]:
        ranks = [SimpleNamespace(no_rides=reason) for reason in reasons]
        found = engine._check_rides(SimpleNamespace(kv=ranks))
        return [(one.level, one.text.partition(";")[0]) for one in found]

    assert rides("", "") == [("ok", "tokens of prompts ride along with decode steps")]
    why = "the engine decodes speculatively"
    assert rides(why, why) == [("note", f"off, because {why}")]
    # An older plugin does not say it.
    assert engine._check_rides(SimpleNamespace(kv=[SimpleNamespace(no_rides=None)])) == []


@pytest.mark.parametrize(
    ("total", "ahead", "level"),
    [(0, 0, None), (4000, 3900, "ok"), (4000, 20, "note"), (9, 0, "ok")],
)
def test_an_engine_that_knew_few_tokens_of_streamed_text_says_so(
    total: int, ahead: int, level: str | None
) -> None:
    info = SimpleNamespace(streamed_tokens=SimpleNamespace(total=total, ahead=ahead))
    assert [finding.level for finding in engine._check_streams(info)] == ([level] if level else [])
