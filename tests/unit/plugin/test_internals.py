"""Whatever the plugin uses inside SGLang is looked for before an engine starts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashmoa_sglang import internals, plugin, releases
from flashmoa_sglang.internals import Findings, Source, used

from tests.integration.support import slow_except
from tests.unit.plugin.renamed import Renamed, installed

FEATURES = (internals.EVERYBODY, *internals.FEATURES)
# Of every kind: methods that are hooked or called, attributes, functions, members of enumerations.
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
def test_the_installed_release_has_all_that_is_used(feature: str) -> None:
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


def test_nothing_is_listed_that_the_plugin_does_not_use() -> None:
    root = Path(plugin.__file__).parent
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in root.rglob("*.py"))))
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


@pytest.mark.parametrize("name", slow_except(("waiting_queue", "flush_cache"), "waiting_queue"))
def test_a_start_stops_with_the_name_that_is_missing(name: str, tmp_path: Path) -> None:
    script = (
        "import runpy; from flashmoa_sglang import internals; from tests.unit.plugin.renamed import"
        f" Renamed; internals.installed = lambda: Renamed({name!r}); "
        "runpy.run_module('flashmoa_sglang.serve', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--model-path", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    release = releases.installed()
    assert f"flashmoa-sglang cannot run: SGLang {release} has no sglang." in done.stderr
    assert f".{name}" in done.stderr and "Tested releases" in done.stderr


A = """
from dataclasses import dataclass
from sglang.srt.b import *
from sglang.srt.c import Base as Other
try:
    from sglang.srt.b import Guarded
except ImportError:
    Guarded = None

class Base:
    field: int = 1
    def __init__(self, one, *, two=2):
        self.plain = one
        (self.first, _,
            self.second) = 1, 2, 3
    @property
    def method(self):
        other.foreign = self.only_read == 1

class Derived(Other, Base):
    pass

@dataclass
class Data(Derived):
    given: int

def function(
    a, b: dict[str, int], c=(1, ":"), *, d: int | None = None
) -> tuple[int, ...]:
    pass
"""
B = "class Guarded: ...\nclass Starred(Guarded):\n    async def here(self): ...\n"
C = "import enum\nclass Base(enum.IntEnum):\n    ONE = 1\n    def of_c(self): ...\n"


@pytest.fixture
def small(tmp_path: Path) -> Source:
    (tmp_path / "srt").mkdir()
    for name, text in (("a", A), ("b", B), ("c", C)):
        (tmp_path / "srt" / f"{name}.py").write_text(text)
    return Source(tmp_path)


@pytest.mark.parametrize(
    ("owner", "there", "missing"),
    [
        ("a:Base", "field plain first second method", "foreign _ two of_c"),
        ("a:Derived", "field ONE of_c", "anything given"),
        ("a:Data", "given field", "anything"),
        ("a:Starred", "here", "anything"),
        ("a:Missing|b:Starred", "here", "anything"),
        ("a", "Base Other Guarded Starred function dataclass", "Missing of_c enum"),
        ("c", "enum Base", "Guarded"),
    ],
)
def test_names_that_source_defines_are_found(
    small: Source, owner: str, there: str, missing: str
) -> None:
    findings = Findings(small)
    for name in f"{there} {missing}".split():
        findings.look(owner, name, lambda _: "")
    shown = f"sglang.srt.{owner.split('|')[0].replace(':', '.')}"
    assert findings.lacking == [f"{shown}.{name}" for name in missing.split()]


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
    found = internals.looked_at("0.5.18", small).problem
    assert problem in found and bool(problem) == bool(found)


def test_a_hook_takes_what_is_hooked_takes(small: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(original: object, a: int, b: int, c: int = 1, **others: int) -> None: ...

    def swaps(original: object, b: int, a: int, c: int = 1, **others: int) -> None: ...

    def takes_less(original: object, a: int, b: int, c: int = 1) -> None: ...

    def takes_more(original: object, a: int, b: int, c: int, more: int, **_: int) -> None: ...

    def needs_more(original: object, a: int, b: int, c: int, **others: int) -> None: ...

    monkeypatch.setattr(internals, "used", lambda *_: ())
    for function in (fits, swaps, takes_less, takes_more, needs_more):
        findings = internals.looked_at("", small, hooks={"sglang.srt.a.function": function})
        assert len(findings.otherwise) == (function is not fits), function.__name__
