"""Whatever the plugin uses inside SGLang is looked for before an engine starts."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import flashmoa_cpu
import flashmoa_sglang
import pytest
from flashmoa_sglang.sglang import hooks as plugin
from flashmoa_sglang.sglang import internals, releases
from flashmoa_sglang.sglang.internals import Source, used

from tests.conftest import ROOT
from tests.integration.support import slow_except
from tests.unit.plugin.renamed import Renamed, installed

FEATURES = (internals.EVERYBODY, *internals.FEATURES)
# Names of every kind: hooked and called methods, attributes, functions, members of enumerations.
RENAMED = {
    internals.EVERYBODY: """
        flush_cache check_decode_mem stream_output generate_request get_kv_size_bytes waiting_queue
        chunked_req is_hybrid_ssm stash_chunked_request _add_request_to_queue send_to_tokenizer
        origin_input_ids custom_params positional_embed_overrides is_extend RadixKey
        get_num_allocatable_reqs rem_chunk_tokens pop_bootstrapped new_tokens_required_next_decode
        inc_lock_ref to_dec_params evictable_size rid_to_state finished_reason NO_TOKEN image_data
    """,
    internals.ASYNCEP: "run_moe_core wrap_modules NoopOffloader",
    internals.KV_OFF: "layer_num k_buffer",
    internals.PD: "FAKE_BOOTSTRAP_HOST bootstrap_room",
    internals.CPU: "PlatformEnum alloc_extend merge_and_sort_free",
}


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing has been looked at in this process."""
    plugin._problem.cache_clear()
    yield
    plugin._problem.cache_clear()


@pytest.mark.parametrize("feature", FEATURES)
def test_the_installed_release_has_all_names(feature: str) -> None:
    hooks = plugin.hooked(feature)
    findings = internals.looked_at(releases.installed(), installed(), feature, hooks)
    listed = {
        f"sglang.srt.{owners.split('|')[0].replace(':', '.')}.{name}"
        for owners, name, _ in used(releases.installed(), feature)
    }
    assert not findings.problem
    assert findings.seen == listed | set(hooks) and len(listed) >= 3


@pytest.mark.parametrize(
    ("feature", "name"), [(each, name) for each in RENAMED for name in RENAMED[each].split()]
)
def test_a_renamed_name_is_missed(feature: str, name: str) -> None:
    hooks = plugin.hooked(feature)
    findings = internals.looked_at(releases.installed(), Renamed(name), feature, hooks)
    assert name in findings.problem


def test_only_used_names_are_listed() -> None:
    roots = (Path(package.__file__).parent for package in (flashmoa_sglang, flashmoa_cpu))
    files = (file for root in roots for file in root.rglob("*.py"))
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    names = {name for one in releases.TESTED for each in FEATURES for _, name, _ in used(one, each)}
    assert names <= words


def test_each_feature_is_looked_at_where_it_is_on(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "installed", lambda: Renamed("run_moe_core"))
    plugin.verify()
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "h2d")
    with pytest.raises(SystemExit, match=r"FusedMoE\.run_moe_core, which --flashmoa-asyncep needs"):
        plugin.verify()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("name", slow_except(("waiting_queue", "flush_cache"), "waiting_queue"))
def test_a_start_stops_at_a_missing_name(name: str, tmp_path: Path) -> None:
    script = (
        "import runpy; from flashmoa_sglang.sglang import internals; "
        "from tests.unit.plugin.renamed import Renamed; "
        f"internals.installed = lambda: Renamed({name!r}); "
        "runpy.run_module('flashmoa_sglang.serve', run_name='__main__', alter_sys=True)"
    )
    done = run(script, "--model-path", str(tmp_path))
    assert done.returncode == 1
    release = releases.installed()
    assert f"flashmoa-sglang cannot run: SGLang {release} has no sglang." in done.stderr
    assert f".{name}" in done.stderr and "Tested releases" in done.stderr


NOT_APPLIED = """
import flashmoa_sglang.serve  # This prepares the import of SGLang.
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry._apply_target = classmethod(lambda cls, target, hooks: 1 / 0)
load_plugins()
print("still running")
"""


@pytest.mark.slow
def test_a_start_stops_at_an_unapplied_hook() -> None:
    done = run(NOT_APPLIED)
    assert done.returncode != 0 and "still running" not in done.stdout
    problem = f"cannot run: SGLang {releases.installed()} did not take the hook on sglang.srt."
    assert problem in done.stderr


OTHERS = [release for release in releases.TESTED if release != releases.installed()]


@pytest.mark.nightly
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("release", OTHERS)
def test_other_releases_have_all_names(release: str, feature: str) -> None:
    folder = ROOT / ".cache" / "sglang" / release / "sglang"
    assert folder.is_dir(), f"{folder} is missing: run make .cache/sglang/{release}/.ready"
    assert internals.looked_at(release, Source(folder), feature).problem == ""


@pytest.mark.nightly
def test_the_newest_release_has_all_names(tmp_path: Path) -> None:
    pip = f"-m pip download --quiet --no-deps --only-binary :all: --dest {tmp_path} sglang"
    subprocess.run([sys.executable, *pip.split()], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    release, source = wheel.name.split("-")[1], Source(tmp_path / "sglang")
    # The hooks are the installed release's.
    is_ours = releases.class_for(release) is type(releases.RELEASE)
    for feature in FEATURES:
        hooks = plugin.hooked(feature) if is_ours else None
        problem = internals.looked_at(release, source, feature, hooks).problem
        assert problem == "", f"SGLang {release} {problem}"


A = """
class Base:
    def __init__(self, one, *, two=2):
        self.plain = one
    @property
    def method(self):
        pass

def function(
    a, b: dict[str, int], c=(1, ":"), *, d: int | None = None
) -> tuple[int, ...]:
    pass
"""


@pytest.fixture
def small(tmp_path: Path) -> Source:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "a.py").write_text(A)
    return Source(tmp_path)


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        ("a function(_,_,d=_)", ""),
        ("a function(_,_,d=_,e=_)", "unexpected keyword argument 'e'"),
        ("a function(d=_)", "missing a required argument: 'a'"),
        ("a function(_,_,_,_)", "too many positional arguments"),
        ("a Base(_,two=_)", ""),
        ("a Base(_,three=_)", "three"),
        ("a:Base method()", ""),
        ("a:Base method(_)", "too many positional arguments"),
        ("a:Moved method(_)", ""),
    ],
)
def test_arguments_of_calls_are_checked(
    small: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, problem: str
) -> None:
    monkeypatch.setattr(internals, "LIST", tmp_path / "list")
    internals.LIST.write_text(f"[every engine]\n{use}\n")
    found = internals.looked_at("0.5.23", small).problem
    assert problem in found and bool(problem) == bool(found)


# The parameters of hooks after the hooked function, and whether they fit the function.
HOOKS = {
    "a, b, c=1, **others": True,
    "b, a, c=1, **others": False,
    "a, b, c=1": False,
    "a, b, c, more, **others": False,
    "a, b, c, **others": False,
}


@pytest.mark.parametrize(("parameters", "fits"), HOOKS.items())
def test_a_hook_takes_what_is_hooked_takes(
    small: Source, monkeypatch: pytest.MonkeyPatch, parameters: str, fits: bool
) -> None:
    monkeypatch.setattr(internals, "used", lambda *_: ())
    hook = eval(f"lambda original, {parameters}: None")
    findings = internals.looked_at("", small, hooks={"sglang.srt.a.function": hook})
    assert (not findings.otherwise) == fits and len(findings.otherwise) <= 1
