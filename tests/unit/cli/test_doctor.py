"""The doctor without an engine: packages, the machine, and URLs of other servers."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from flashmoa_sglang.sglang import internals, releases

import flashmoa
from flashmoa.cli import checks, doctor
from flashmoa.cli.checks import check_engine, check_installation
from tests.unit.engine.web_server import web_server
from tests.unit.plugin.renamed import Renamed


def test_the_doctor_imports_no_torch() -> None:
    script = (
        "import sys; from flashmoa.cli import doctor; code = doctor.main(['--json']); "
        "assert not {'torch', 'sglang'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    levels = {finding["about"]: finding["level"] for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert levels["SGLang"] == levels["internals"] == "ok"


def test_an_old_sglang_is_reported_as_a_problem() -> None:
    old = checks.check_release("0.4.6")
    assert old.level == "fix" and all(release in old.text for release in releases.TESTED)
    assert checks.check_release("0.5.16").level == "note"
    assert releases.too_old("0.0.0.dev1+g123") is None


def test_each_missing_internal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A hooked method of a class with bases, one that is called, an attribute that is read.
    for name in ("get_num_allocatable_reqs", "stash_chunked_request", "waiting_queue"):
        other = Renamed(name)
        monkeypatch.setattr(internals, "installed", lambda other=other: other)
        (found,) = checks.check_internals()
        assert found.level == "fix"
        assert f"has no sglang.srt.managers.scheduler.Scheduler.{name}" in found.text
        assert found.remedy == f"pip install sglang=={releases.TESTED[-1]}"


def test_a_missing_optional_internal_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "installed", lambda: Renamed("run_moe_core"))
    (found,) = checks.check_internals()
    assert found.level == "note" and "--flashmoa-asyncep needs that" in found.text
    # Without a GPU, every engine runs on a CPU.
    monkeypatch.setattr(internals, "installed", lambda: Renamed("PlatformEnum"))
    for gpus, level in ((["nvidia0"], "note"), ([], "fix")):
        monkeypatch.setattr(checks, "accelerators", lambda gpus=gpus: gpus)
        assert [finding.level for finding in checks.check_internals()] == [level]


def test_missing_packages_get_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda _name: None)
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    remedies = {each.about: each.remedy for each in check_installation() if each.level == "fix"}
    assert remedies["C compiler"] == "apt-get install gcc"
    assert "SGLANG_PLATFORM" in remedies["environment"]

    def installed(**packages: str) -> list[checks.Finding]:
        monkeypatch.setattr(checks, "installed", packages.get)
        return checks.check_plugin()

    # A machine without both packages has no problem: it is for clients only.
    assert [finding.level for finding in installed()] == ["note"]
    assert "flashmoa[autogen]" in checks.check_autogen().remedy
    assert "else pip install flashmoa-sglang" in installed(sglang="0.5.23")[1].remedy
    (sglang,) = installed(**{"flashmoa-sglang": "1"})
    assert f"pip install sglang=={releases.TESTED[-1]} (GPU)" in sglang.remedy


def test_system_other_than_linux_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.sys, "platform", "darwin")
    (_, system) = checks.check_system()
    assert system.level == "note" and "Linux only" in system.text


@pytest.mark.parametrize(
    ("url", "text", "remedy"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached", "--port 9"),
        ("localhost:30000", "is not an engine's URL", "http://HOST:PORT"),
    ],
)
async def test_url_without_an_engine(url: str, text: str, remedy: str) -> None:
    (finding,) = await check_engine(url)
    assert finding.level == "fix" and text in finding.text and remedy in finding.remedy


async def test_a_server_that_is_no_engine_is_a_problem() -> None:
    with web_server(b"<html></html>", "text/html") as server:
        (finding,) = await check_engine(server.url)
    assert (finding.level, finding.text) == ("fix", f"{server.url} answers, but is not an engine")
    info = {"plugin": {"version": "0.0.1"}, "sglang": {"version": "0.5.12"}}
    with web_server(json.dumps(info).encode()) as server:
        (finding,) = await check_engine(server.url)
    assert finding.level == "fix" and "one checkout" in finding.remedy
    assert "flashmoa-sglang 0.0.1" in finding.text and flashmoa.__version__ in finding.text


def test_report_shows_remedies_and_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--engine-only", "--engine", "http://127.0.0.1:9"]) == 1
    report = capsys.readouterr().out
    assert "fix   engine" in report and "→ flashmoa serve" in report and "1 to fix" in report


@pytest.mark.parametrize(
    ("device", "release", "level"),
    [
        ("nvidia0", "2.13.0+cpu", "fix"),
        ("nvidia0", "2.13.0", "ok"),
        ("dxg", "2.13.0+cpu", "note"),
        ("kfd", "2.13.0+rocm6.4", "ok"),
    ],
)
def test_torch_for_cpus_is_reported_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, release: str, level: str
) -> None:
    (tmp_path / device).touch()
    monkeypatch.setattr(checks, "_DEVICES", tmp_path)
    monkeypatch.setattr(checks, "installed", lambda _name: release)
    found = checks._check_accelerator()[-1]
    assert found.level == level and device in found.text and bool(found.remedy) == (level != "ok")


def test_an_engine_without_kv_is_one_problem() -> None:
    plugin = {"version": flashmoa.__version__}
    info = SimpleNamespace(plugin=plugin, sglang={"version": "0.5.23"}, capabilities=["render"])
    settings = {"disable_radix_cache": True, "enable_cache_report": True}
    found = [*checks._check_versions(info, "http://engine"), checks._check_settings(settings)]
    (problem,) = [each for each in found if each.level == "fix"]
    assert "--disable-radix-cache" in problem.remedy
    assert "--flashmoa-kv-cache off" in problem.remedy


def test_an_engine_without_rides_says_why() -> None:
    def rides(*reasons: str) -> list[tuple[str, str]]:
        ranks = [SimpleNamespace(no_rides=reason) for reason in reasons]
        found = checks._check_rides(SimpleNamespace(kv=ranks))
        return [(one.level, one.text.partition(";")[0]) for one in found]

    assert rides("", "") == [("ok", "tokens of prompts ride along with decode steps")]
    why = "the engine decodes speculatively"
    assert rides(why, why) == [("note", f"off, because {why}")]
    # An older plugin does not say it.
    assert not list(checks._check_rides(SimpleNamespace(kv=[SimpleNamespace(no_rides=None)])))
