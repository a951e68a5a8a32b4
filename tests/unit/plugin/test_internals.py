"""Whatever the plugin uses inside SGLang is looked for before an engine starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashmoa_sglang import internals, plugin, releases
from flashmoa_sglang.internals.check import Check
from flashmoa_sglang.internals.sglang_source import Source
from flashmoa_sglang.internals.used_names import Use, used

from tests.integration.support import slow_except
from tests.unit.plugin.renamed import Renamed, copy_renamed, installed

# In every tested release, and of every kind.
USED = {
    internals.EVERYBODY: """
        flush_cache check_decode_mem stream_output handle_request generate_request get_kv_size_bytes
        waiting_queue chunked_req last_batch is_mixed_chunk max_running_requests
        max_total_num_tokens disable_radix_cache is_hybrid_ssm require_mlp_sync
        stash_chunked_request grammar_manager
        has_waiting_grammars _add_request_to_queue send_to_tokenizer send_output send_to_detokenizer
        _request_dispatcher _result_dispatcher _mapping
        origin_input_ids sampling_params custom_params max_new_tokens to_finish last_node
        multimodal_inputs positional_embed_overrides skip_radix_cache_insert is_extend
        get_num_allocatable_reqs max_prefill_tokens rem_chunk_tokens pop_bootstrapped RadixKey
        batch_is_full extend_num_tokens new_tokens_required_next_decode can_run_list priority_sign
        inc_lock_ref to_dec_params evictable_size available_size
        rid_to_state num_reserved_tokens auto_create_handle_loop context_len vocab_size
        routed_dp_rank log_metrics AbortReq finished_reason AddReqResult CONTINUE OTHER
        disaggregation_mode extra_metric_labels moe_a2a_backend
        _process_messages image_data ChatCompletionRequest openai_serving_chat finish_reason
        get_offloader HookRegistry prepare_server_args kill_process_tree
    """,
    internals.ASYNCEP: "run_moe_core num_local_experts wrap_modules NoopOffloader",
    internals.KV_OFF: "layer_num k_buffer tp_worker RadixAttention",
    internals.PD: "FAKE_BOOTSTRAP_HOST bootstrap_room",
    internals.CPU: """
        disaggregation_transfer_backend get_dispatch_key_name PlatformEnum alloc_extend
        merge_and_sort_free set_kv_buffer is_decode_or_idle tp_q_head_num sleep_on_idle
        register_attention_backend
    """,
}


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing has been looked at in this process."""
    plugin.verify.cache_clear()
    yield
    plugin.verify.cache_clear()


@pytest.mark.parametrize("feature", USED)
def test_the_installed_release_has_all_that_is_used(feature: str) -> None:
    check = internals.looked_at(releases.installed(), installed(), feature, plugin.hooked(feature))
    assert not check.problem
    assert not check.untold
    assert len(check.seen) >= 3


@pytest.mark.parametrize(
    ("feature", "name"), [(feature, name) for feature in USED for name in USED[feature].split()]
)
def test_a_renamed_name_is_missed(feature: str, name: str) -> None:
    check = internals.looked_at(
        releases.installed(), Renamed(name), feature, plugin.hooked(feature)
    )
    assert name in check.problem


def test_only_what_the_installed_release_comes_to_is_looked_for() -> None:
    names = {release: names_used(release) for release in releases.TESTED}
    assert "extend_range" in names["0.5.18"] and "prefix_len" not in names["0.5.18"]
    # 0.5.18's function, that 0.5.23 has not replaced; and one that it has.
    assert "needs_host_load_back" in names["0.5.23"] and "extend_range" not in names["0.5.23"]
    assert "abort_request" in names["0.5.12.post1"]
    assert "wrap_as_pickle" not in names["0.5.12.post1"]


def names_used(release: str) -> set[str]:
    features = (internals.EVERYBODY, *internals.FEATURES)
    return {use.name for feature in features for use in used(release, feature)}


def test_each_feature_is_looked_at_where_it_is_on(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "installed", lambda: Renamed("run_moe_core"))
    plugin.verify_what_is_known()
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "h2d")
    with pytest.raises(SystemExit, match=r"FusedMoE\.run_moe_core, which --flashmoa-asyncep needs"):
        plugin.verify_what_is_known()


SAMPLED_NAMES = (
    "waiting_queue",
    "sock_send",
    "inc_lock_ref",
    "num_reserved_tokens",
    "flush_cache",
)


@pytest.mark.parametrize("name", slow_except(SAMPLED_NAMES, "waiting_queue", "flush_cache"))
def test_a_start_stops_with_the_name_that_is_missing(name: str, tmp_path: Path) -> None:
    if name not in names_used(releases.installed()) and name != "flush_cache":
        pytest.skip(f"{name} is not used of SGLang {releases.installed()}")
    path = [str(copy_renamed(tmp_path, name)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "flashmoa_sglang.serve", "--model-path", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert (
        f"flashmoa-sglang cannot run: SGLang {releases.installed()} has no sglang." in done.stderr
    )
    assert f".{name}" in done.stderr and "Tested releases" in done.stderr


A = """
from dataclasses import dataclass
from sglang.b import *
from .c import Base as Other
try:
    from sglang.b import Guarded
except ImportError:
    Guarded = None

class Base:
    "Says self.in_a_docstring = 1, and is\\n    in_a_docstring: not a field."
    field: int = 1
    def __init__(self, one, *, two=2):
        self.plain = one
        (self.first, _,
            self.second) = 1, 2, 3
        with two as self.opened:
            pass
    def method(self):
        self.later: int = 3
        other.foreign = self.only_read == 1

class Derived(Other, Base):
    __slots__ = ("slot",)

@dataclass
class Data(Derived):
    given: int
    text: str = \"\"\"
Not a field of it: Base
\"\"\"
    after: int = 3

def function(a, b, c=1, *, d): ...
"""
B = "class Guarded: ...\nclass Starred(Guarded):\n    def here(self): ...\n"
C = "import enum\nclass Base(enum.IntEnum):\n    ONE = 1\n    def of_c(self): ...\n"


@pytest.fixture
def small(tmp_path: Path) -> Source:
    for name, text in (("__init__", ""), ("a", A), ("b", B), ("c", C)):
        (tmp_path / f"{name}.py").write_text(text)
    return Source(tmp_path)


@pytest.mark.parametrize(
    ("owner", "there", "missing"),
    [
        ("a:Base", "field plain first second opened later method", "foreign only_read _ two"),
        ("a:Base", "", "in_a_docstring of_c slot anything"),
        ("a:Derived", "field later slot ONE of_c name value", "anything given"),
        ("a:Data", "given text after slot field", "Not anything"),
        ("a:Starred", "here", "anything"),
        ("a", "Base Other Guarded Starred function dataclass", "Missing of_c enum"),
        ("c", "enum Base", "Guarded"),
    ],
)
def test_names_that_source_defines_are_found(
    small: Source, owner: str, there: str, missing: str
) -> None:
    check = Check(small)
    check.uses(names_of(f"sglang.{owner}", f"{there} {missing}"))
    shown = f"sglang.{owner.replace(':', '.')}"
    assert check.lacking == [f"{shown}.{name}" for name in missing.split()]
    assert not check.untold


def names_of(owner: str, wanted: str) -> list[Use]:
    return [Use(owner, name) for name in wanted.split()]


@pytest.mark.parametrize(
    ("owner", "name", "positional", "keywords", "problem"),
    [
        ("a", "function", 2, ("d",), ""),
        ("a", "function", 3, ("d", "e"), "unexpected keyword argument 'e'"),
        ("a", "function", 1, ("d",), "missing a required argument: 'b'"),
        ("a", "function", 4, ("d",), "too many positional arguments"),
        ("a", "function", None, ("d",), ""),
        ("a", "Base", 1, ("two",), ""),
        ("a", "Base", 1, ("three",), "three"),
        ("a:Base", "method", 0, (), ""),
        ("a:Base", "method", 1, (), "too many positional arguments"),
    ],
)
def test_arguments_of_calls_are_checked(
    small: Source,
    owner: str,
    name: str,
    positional: int | None,
    keywords: tuple[str, ...],
    problem: str,
) -> None:
    check = Check(small)
    check.uses([Use(f"sglang.{owner}", name, positional, keywords)])
    assert problem in check.problem and bool(problem) == bool(check.problem)


def test_a_hook_takes_what_is_hooked_takes(small: Source) -> None:
    def fits(original: object, a: int, b: int, c: int = 1, **others: int) -> None: ...

    def swaps(original: object, b: int, a: int, c: int = 1, **others: int) -> None: ...

    def takes_less(original: object, a: int, b: int, c: int = 1) -> None: ...

    def takes_more(original: object, a: int, b: int, c: int, more: int, **_: int) -> None: ...

    check = Check(small)
    check.hook("sglang.a.function", fits)
    assert not check.problem
    for number, function in enumerate((swaps, takes_less, takes_more), 1):
        check = Check(small)
        check.hook("sglang.a.function", function)
        assert len(check.otherwise) == 1, number
