"""Which module serves which SGLang release, and what the modules have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.releases import TESTED, module_for, v0_5_12, v0_5_18, v0_5_23


@pytest.mark.parametrize(
    ("release", "module"),
    [
        ("0.5.11", "v0_5_12"),
        ("0.5.12.post1", "v0_5_12"),
        ("0.5.17", "v0_5_12"),
        ("0.5.18", "v0_5_18"),
        ("0.5.23", "v0_5_23"),
        ("0.5.24.dev3+g1a2b3c4", "v0_5_23"),
        ("1.0", "v0_5_23"),
    ],
)
def test_a_release_is_served_by_the_newest_module_that_is_not_newer(
    release: str, module: str
) -> None:
    assert module_for(release) == module


def test_each_tested_release_has_a_module_of_its_own() -> None:
    assert len({module_for(release) for release in TESTED}) == len(TESTED)


@pytest.mark.parametrize("module", [v0_5_12, v0_5_23])
def test_modules_only_replace_what_there_is(module: object) -> None:
    own = {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    }
    mends = {function.__name__ for _, function in module.MENDED}
    assert own - mends <= set(vars(v0_5_18))


def graphs(decode: str, prefill: str) -> dict[str, Any]:
    config = {"decode": decode, "prefill": prefill}
    backends = {phase: SimpleNamespace(backend=backend) for phase, backend in config.items()}
    return {"cuda_graph_config": SimpleNamespace(**backends)}


@pytest.mark.parametrize(
    ("release", "arguments", "off"),
    [
        (v0_5_18, graphs("disabled", "disabled"), True),
        # As --disable-cuda-graph --cuda-graph-backend-prefill breakable leaves them.
        (v0_5_18, graphs("disabled", "breakable") | {"disable_cuda_graph": True}, False),
        (v0_5_18, graphs("full", "disabled"), False),
        (v0_5_12, {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True}, True),
        (v0_5_12, {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": False}, False),
        (v0_5_12, graphs("disabled", "disabled") | {"disable_cuda_graph": False}, True),
    ],
)
def test_graphs_are_off_where_no_phase_has_any(
    release: ModuleType, arguments: dict[str, Any], off: bool
) -> None:
    assert release.graphs_are_off(SimpleNamespace(**arguments)) == off


ALONE = {"pp_size": 1, "moe_a2a_backend": "none", "moe_dense_tp_size": None}


@pytest.mark.parametrize(
    ("given", "together"),
    [
        ({}, False),
        ({"pp_size": 2}, True),
        ({"enable_dp_attention": True}, True),
        ({"moe_a2a_backend": "deepep"}, True),
        ({"moe_dense_tp_size": 1}, True),
    ],
)
def test_some_ranks_step_together(given: dict[str, Any], together: bool) -> None:
    arguments = SimpleNamespace(**ALONE | {"enable_dp_attention": False} | given)
    assert v0_5_18.steps_together(arguments) == together


def test_0_5_23_counts_ranks_of_attention_too() -> None:
    assert v0_5_18.data_parallel_ranks(SimpleNamespace(dp_size=None)) == 1
    assert v0_5_18.data_parallel_ranks(SimpleNamespace(dp_size=2)) == 2
    for sizes in ((2, 1), (1, 2)):
        arguments = SimpleNamespace(dp_size=sizes[0], attn_dp_size=sizes[1])
        assert v0_5_23.data_parallel_ranks(arguments) == 2


def manager_with(*rids: str) -> SimpleNamespace:
    return SimpleNamespace(rid_to_state={rid: SimpleNamespace(finished=False) for rid in rids})


def test_0_5_12_forgets_what_it_refuses() -> None:
    async def refuse(_manager: object, _obj: object) -> None:
        raise ValueError("too long")

    manager = manager_with("a", "b")
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(v0_5_12.tokenize_or_forget(refuse, manager, SimpleNamespace(rid="a")))
    assert list(manager.rid_to_state) == ["b"]


def test_0_5_12_forgets_a_batch_of_which_one_is_refused() -> None:
    async def refuse(manager: SimpleNamespace, _obj: object, _request: object) -> AsyncIterator:
        for rid, sent in (("sent", 1.0), ("refused", 0.0), ("unsent", 0.0)):
            stats = SimpleNamespace(api_server_dispatch_time=sent)
            manager.rid_to_state[rid] = SimpleNamespace(time_stats=stats)
        raise ValueError("too long")
        yield

    async def ask(manager: SimpleNamespace) -> None:
        batch = SimpleNamespace(rid=["sent", "refused", "unsent", "a"])
        async for _ in v0_5_12.forgetting(refuse)(manager, batch):
            pass

    manager = manager_with("a")
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(ask(manager))
    assert list(manager.rid_to_state) == ["a", "sent"]


def test_0_5_12_forgets_what_left_the_queue() -> None:
    def finish(manager: SimpleNamespace, message: SimpleNamespace) -> None:
        manager.rid_to_state[message.rid].finished = True

    manager = manager_with("a", "b")
    for _ in range(2):  # The second abort finds nothing, and does not fail.
        v0_5_12.abort_and_forget(finish, manager, SimpleNamespace(rid="a"))
    assert list(manager.rid_to_state) == ["b"]
