"""``--flashmoa-kv-cache off``: the arguments, schedulers, pools and requests that it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.moe import kv_free

VALID: dict[str, Any] = {
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "skip_server_warmup": True,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "pp_size": 1,
    "mem_fraction_static": 0.8,
}


@pytest.fixture(autouse=True)
def without_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOA_KV_CACHE", "off")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"disable_radix_cache": False}, "needs --disable-radix-cache."),
        ({"chunked_prefill_size": 2048}, "needs --chunked-prefill-size -1."),
        ({"chunked_prefill_size": None}, "needs --chunked-prefill-size -1."),
        ({"skip_server_warmup": False}, "needs --skip-server-warmup."),
        ({"mem_fraction_static": -0.372}, r"needs --mem-fraction-static 0\.6 \(for example\)\."),
        ({"disaggregation_mode": "prefill"}, "does not go with --disaggregation-mode."),
        ({"speculative_algorithm": "EAGLE"}, "does not go with --speculative-algorithm."),
    ],
)
def test_a_server_that_reads_kv_again_is_refused(arguments: dict[str, Any], message: str) -> None:
    kv_free.refuse_unsupported(SimpleNamespace(**VALID))
    with pytest.raises(SystemExit, match=message):
        kv_free.refuse_unsupported(SimpleNamespace(**VALID | arguments))


class Pool:
    """The part of SGLang's pool that creates its buffers."""

    layer_num = 3
    flashmoa_one_layer = False

    def __init__(self, *, scales: bool) -> None:
        self.is_quantized_kv_cache = scales
        kv_free.create_buffers(Pool.create, self)

    def create(self) -> None:
        self.k_buffer = [object() for _ in range(self.layer_num)]
        self.v_buffer = [object() for _ in range(self.layer_num)]


@pytest.mark.parametrize(
    ("chunk", "scales", "message"),
    [(4096, False, "needs --chunked-prefill-size -1"), (None, True, "has scales")],
)
def test_a_scheduler_that_reads_kv_again_is_refused(
    chunk: int | None, scales: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(scales=scales)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    scheduler = SimpleNamespace(chunked_prefill_size=chunk, token_to_kv_pool_allocator=allocator)
    with pytest.raises(SystemExit, match=message):
        kv_free.verify(scheduler)
    monkeypatch.setenv("FLASHMOA_KV_CACHE", "on")
    kv_free.verify(scheduler)


@pytest.mark.parametrize("scales", [False, True])
def test_one_layers_buffers_serve_all_layers(scales: bool) -> None:
    pool = Pool(scales=scales)
    assert len(pool.k_buffer) == len(pool.v_buffer) == pool.layer_num
    assert len(set(pool.k_buffer)) == (pool.layer_num if scales else 1)
    assert pool.flashmoa_one_layer != scales


def message(new_tokens: int | None, session: object = None) -> Any:
    """Return what the check reads of SGLang's message of a request."""
    params = SimpleNamespace(max_new_tokens=new_tokens)
    return SimpleNamespace(sampling_params=params, session_params=session)


@pytest.mark.parametrize(("new_tokens", "session"), [(128, None), (None, None), (2, None), (1, 0)])
def test_a_request_of_more_forwards_is_refused(
    new_tokens: int | None, session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for few in (0, 1):
        kv_free.check(message(few))
    with pytest.raises(ValueError, match="keeps no KV"):
        kv_free.check(message(new_tokens, session))
    monkeypatch.setenv("FLASHMOA_KV_CACHE", "on")
    kv_free.check(message(new_tokens, session))
