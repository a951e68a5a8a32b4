"""What the plugin leaves alone on engines where it is not known to be right, and the reason."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.scheduler import admission, state
from flashmoa_sglang.sglang import releases
from flashmoa_sglang.sglang.hooks import SCHEDULER_HOOKS
from flashmoa_sglang.sglang.releases import RELEASE, Release, Release0512, Release0521

EACH = [releases.class_for(release)() for release in releases.TESTED]
each_release = pytest.mark.parametrize("release", EACH)
ON = SimpleNamespace(is_none=lambda: False)
PREFILL = "prefill_attention_backend"


class MHATokenToKVPool:
    """The pool of most models."""


class HybridLinearKVPool:
    """The pool of models with a state besides KV."""


class DeepSeekV4TokenToKVPool:
    """A pool that nobody has tried."""


def with_own_classes(test: Any) -> Any:
    """Mark a slow test that imports SGLang, which warns of missing kernels on a CPU."""
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore::UserWarning")(test))


@pytest.fixture(autouse=True)
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take arguments as they are given, without SGLang."""
    monkeypatch.setattr(Release, "resolve_arguments", lambda _, arguments: arguments)
    for release in EACH:
        monkeypatch.setattr(type(release), "pipeline_stages", lambda _, one: one.stages)


def engine(pool: type = MHATokenToKVPool, graphs: str = "breakable", **given: Any) -> Any:
    """Make a scheduler. ``given``: its own attributes, and SGLang's arguments."""
    own = {
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=pool),
        "chunked_prefill_size": 8192,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "require_mlp_sync": False,
        "stages": 1,
        "is_hybrid_ssm": False,
        "is_mixed_chunk": False,
        "enable_overlap": True,
    }
    names = "dllm_algorithm enable_hisparse enable_return_hidden_states dsa_prefill_backend "
    names += "enable_encoder_swa_bounded_replay prefill_attention_backend "
    names += "enable_megamoe_for_layernorm_sp"
    arguments = dict.fromkeys(names.split()) | {
        "attn_cp_size": 1,
        "attention_backend": "fa3",
        "disaggregation_mode": "null",
        "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend=graphs)),
    }
    for name, value in given.items():
        (own if name in own else arguments)[name] = value
    return SimpleNamespace(server_args=SimpleNamespace(**arguments), **own)


@each_release
@pytest.mark.parametrize(
    "known", [{}, {"graphs": "disabled"}, {PREFILL: "flashinfer"}, {"attention_backend": "triton"}]
)
def test_known_engines_mix(release: Release, known: dict[str, Any]) -> None:
    assert release.why_no_rides(engine(**known)) == ""


@each_release
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"chunked_prefill_size": None}, "--chunked-prefill-size"),
        ({"spec_algorithm": ON}, "speculatively"),
        ({"require_mlp_sync": True}, "step together"),
        ({"stages": 2}, "--pp-size"),
        ({"enable_return_hidden_states": True}, "hidden states"),
        ({"attn_cp_size": 2}, "other arguments"),
        ({"enable_hisparse": True}, "other arguments"),
        ({"dllm_algorithm": "any"}, "other arguments"),
        ({"pool": DeepSeekV4TokenToKVPool}, "KV pool DeepSeekV4TokenToKVPool"),
        ({"attention_backend": "dual_chunk_flash_attn"}, "backend dual_chunk_flash_attn"),
        ({PREFILL: "aiter"}, "backend aiter"),
    ],
)
def test_engines_say_why_they_do_not_mix(
    release: Release, given: dict[str, Any], reason: str
) -> None:
    assert reason in release.why_no_rides(engine(**given))


@each_release
def test_mixed_chunk_allows_unknown_pools(release: Release) -> None:
    given: dict[str, Any] = {"pool": DeepSeekV4TokenToKVPool, PREFILL: "aiter"}
    assert release.why_no_rides(engine(is_mixed_chunk=True, **given)) == ""
    assert release.why_no_rides(engine(is_mixed_chunk=True, spec_algorithm=ON, **given))


@pytest.mark.parametrize("mixed", [False, True])
def test_models_with_states_mix_from_0_5_23_on(mixed: bool) -> None:
    hybrid = engine(HybridLinearKVPool, is_hybrid_ssm=True, is_mixed_chunk=mixed)
    assert Release().why_no_rides(hybrid) == ""
    for older in EACH[:-1]:
        assert "state besides KV" in older.why_no_rides(hybrid)


@pytest.mark.parametrize(
    "given",
    [
        {"graphs": "tc_piecewise"},
        {"dsa_prefill_backend": "flashmla_sparse_q8"},
        {"enable_encoder_swa_bounded_replay": True},
        {"enable_megamoe_for_layernorm_sp": True},
    ],
)
def test_newer_releases_refuse_some_more(given: dict[str, Any]) -> None:
    assert Release0512().why_no_rides(engine(**given)) == ""
    assert "refuses" in Release().why_no_rides(engine(**given))


@with_own_classes
def test_mixed_batches_keep_states_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGLang's own batches; no request decodes in this one."""
    torch = pytest.importorskip("torch")
    RELEASE.prepare_import()
    from sglang.srt.managers import schedule_batch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    lazy = SimpleNamespace(mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False))
    monkeypatch.setattr(schedule_batch, "get_exec", lambda: lazy, raising=False)

    def batch(rows: int) -> Any:
        made: Any = schedule_batch.ScheduleBatch(reqs=[])
        made.sampling_info = SimpleNamespace(merge_batch=lambda _: None)
        made.model_config = SimpleNamespace(is_encoder_decoder=False)
        made.spec_algorithm = SpeculativeAlgorithm.NONE
        made.return_logprob = made.enable_overlap = False
        made.seq_lens_sum = made.extend_num_tokens = 0
        names = "req_pool_indices req_pool_indices_cpu seq_lens seq_lens_cpu orig_seq_lens "
        for name in (names + "out_cache_loc input_ids").split():
            setattr(made, name, torch.arange(rows))
        made.prefix_lens, made.extend_lens, made.extend_logprob_start_lens = [], [], []
        return made

    prefill = batch(2)
    prefill.mamba_track_indices = torch.tensor([3, 4])
    prefill.mamba_track_mask = torch.tensor([True, True])
    prefill.mamba_track_seqlens = torch.tensor([64, 128])
    prefill.mamba_prefill_track_mask_cpu = [True, True]
    prefill.mamba_track_seqlens_cpu = [64, 128]
    prefill.mix_with_running(batch(0))
    assert (prefill.mamba_track_indices is None) == RELEASE.LOSES_STATES


@each_release
def test_kv_waits_for_results_on_prefill_engines(release: Release) -> None:
    assert release.why_late(engine()) == ""
    pair = {"disaggregation_mode": "prefill"}
    assert "PD pair" in release.why_late(engine(**pair))
    assert release.why_late(engine(enable_overlap=False, **pair)) == ""


@with_own_classes
@pytest.mark.skipif(
    not isinstance(RELEASE, Release0521), reason="it looks for room before it mixes decodes in"
)
def test_mixed_batches_reserve_pages() -> None:
    """With SGLang's own account of the pool."""
    pytest.importorskip("torch")
    RELEASE.prepare_import()
    from sglang.srt.managers.schedule_policy import PrefillAdder

    adder: Any = PrefillAdder.__new__(PrefillAdder)
    adder.page_size, adder.running_batch = 64, SimpleNamespace(reqs=[1, 2, 3])
    adder.is_all_swa = adder.is_hybrid_swa = adder.is_hybrid_ssm_cache = False
    pool = SimpleNamespace(available_size=lambda: 1000, page_size=64)
    tree = SimpleNamespace(evictable_size=lambda: 0, supports_mamba=lambda: False)
    adder.token_to_kv_pool_allocator, adder.tree_cache = pool, tree
    # SGLang has counted a token for each decode.
    if isinstance(RELEASE, Release0512):
        adder.rem_total_token_offset = adder.cur_rem_token_offset = 3
    else:
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        adder.memory_budget = PrefillBudget(pool, tree, num_mixed_decode_tokens=3)
    RELEASE.reserve_pages(adder)
    assert adder.rem_total_tokens == adder.cur_rem_tokens == 1000 - 3 * 64


@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("--tokenizer-worker-num", {"tokenizer_worker_num": 4}),
        ("--smg-grpc-mode", {"smg_grpc_mode": True}),
        ("--grpc-mode", {"smg_grpc_mode": True, "grpc_mode": True}),
        ("--enable-pd-role-switch", {"enable_pd_role_switch": True}),
        ("SGLANG_RUST_SERVER", {}),
    ],
)
def test_unserved_engines_are_left_alone(
    way: str,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = SimpleNamespace(tokenizer_worker_num=1)
    assert not state.stands_aside(arguments)
    vars(arguments).update(given)
    if not given:
        monkeypatch.setenv(way, "Yes")
    scheduler: Any = SimpleNamespace(server_args=arguments)
    state.attach(None, scheduler)
    assert vars(scheduler) == {"server_args": arguments}
    assert way in caplog.text
    # An option shows that the user wants the plugin.
    monkeypatch.setenv("FLASHMOA_SCHEDULE", "sjf")
    with pytest.raises(SystemExit, match=way):
        state.attach(None, scheduler)


@pytest.mark.parametrize(
    "method",
    [
        "handle_generate_request", "get_num_allocatable_reqs", "_get_new_batch_prefill_raw",
        "_prefetch_kvcache", "run_batch", "process_batch_result", "flush_cache",
        "check_decode_mem", "filter_batch", "add_one_req", "stream_output",
    ],
)  # fmt: skip
def test_a_scheduler_works_without_the_plugin(method: str) -> None:
    """A mark on a request is a client's then."""
    hooked = {hook.target.rpartition(".")[2]: hook.function for hook in SCHEDULER_HOOKS}
    bare = SimpleNamespace(tree_cache=SimpleNamespace())
    found = hooked[method](lambda *given, **named: (*given, named), bare, "given", named=1)
    assert found == (bare, "given", {"named": 1})


def test_a_queue_keeps_its_order_without_the_plugin() -> None:
    waiting = ["one", "other"]
    admission.order_queue(None, SimpleNamespace(tree_cache=SimpleNamespace()), waiting)
    assert waiting == ["one", "other"]
