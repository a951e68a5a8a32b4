"""Test which class serves which SGLang release, and how the releases differ."""

import asyncio
import tomllib
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.sglang import releases
from flashmoa_sglang.sglang.releases import TESTED, Release, Release0512, Release0521, v0_5_12
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.unit.plugin.sglang.test_options import graphs


def test_the_newest_older_class_serves_a_release() -> None:
    for served, served_by in (
        ("0.5.11 0.5.12.post1 0.5.17", Release0512),
        ("0.5.21 0.5.21.post2", Release0521),
        ("0.5.23 0.5.24.dev3+g1a2b3c4 1.0", Release),
    ):
        assert {releases.class_for(release) for release in served.split()} == {served_by}


def test_the_extra_names_exactly_the_tested_releases() -> None:
    with (ROOT / "server_patches" / "pyproject.toml").open("rb") as file:
        (extra,) = tomllib.load(file)["project"]["optional-dependencies"]["sglang"]
    numbers = ["0.5.12.post1", *(f"0.5.{number}" for number in range(100)), "0.6.0"]
    assert tuple(Requirement(extra).specifier.filter(numbers)) == TESTED


def test_a_release_derives_from_the_next() -> None:
    for older, newer in pairwise(map(releases.class_for, TESTED)):
        assert older.__bases__ == (newer,)
        assert {name for name in vars(older) if not name.startswith("_")} <= {*dir(Release)}


class HybridTree:
    """The radix tree of a model with windows or a state in SGLang 0.5.12."""

    def evictable_size(self) -> int:
        raise NotImplementedError

    protected_size = evictable_size

    def full_evictable_size(self) -> int:
        return 7

    def full_protected_size(self) -> int:
        return 5


def test_hybrid_pools_are_counted() -> None:
    release = Release0512()
    assert release.evictable_tokens(HybridTree()) == 7
    assert release.protected_tokens(HybridTree()) == 5


@pytest.mark.parametrize(
    ("release", "arguments", "off"),
    [
        (Release(), graphs("disabled", "disabled"), True),
        # The result of --disable-cuda-graph --cuda-graph-backend-prefill breakable.
        (Release(), graphs("disabled", "breakable") | {"disable_cuda_graph": True}, False),
        (Release(), graphs("full", "disabled"), False),
        (Release0512(), {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True}, True),
        (Release0512(), {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": False}, False),
    ],
)
def test_graphs_are_off_if_no_phase_has_any(
    release: Release, arguments: dict[str, Any], off: bool
) -> None:
    assert release.graphs_are_off(SimpleNamespace(**arguments)) == off


def test_attention_ranks_count_from_0_5_22_on() -> None:
    assert Release0521().data_parallel_ranks(SimpleNamespace(dp_size=None)) == 1
    assert Release0521().data_parallel_ranks(SimpleNamespace(dp_size=2)) == 2
    for sizes in ((2, 1), (1, 2)):
        arguments = SimpleNamespace(dp_size=sizes[0], attn_dp_size=sizes[1])
        assert Release().data_parallel_ranks(arguments) == 2


def manager_with(*rids: str) -> SimpleNamespace:
    return SimpleNamespace(rid_to_state={rid: SimpleNamespace(finished=False) for rid in rids})


def test_0_5_12_forgets_unsent_requests() -> None:
    async def refuse(manager: SimpleNamespace, _obj: object, _request: object) -> AsyncIterator:
        for rid, sent in (("sent", 1.0), ("refused", 0.0), ("unsent", 0.0)):
            stats = SimpleNamespace(api_server_dispatch_time=sent)
            manager.rid_to_state[rid] = SimpleNamespace(time_stats=stats)
        raise ValueError("too long")
        yield

    async def ask(manager: SimpleNamespace) -> None:
        batch = SimpleNamespace(rid=["sent", "refused", "unsent", "a"])
        async for _ in Release0512().forget_refused(refuse)(manager, batch):
            pass

    manager = manager_with("a")
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(ask(manager))
    assert list(manager.rid_to_state) == ["a", "sent"]


def test_0_5_12_forgets_aborted_requests() -> None:
    def finish(manager: SimpleNamespace, message: SimpleNamespace) -> None:
        manager.rid_to_state[message.rid].finished = True

    manager = manager_with("a", "b")
    for _ in range(2):  # The second abort finds no request, and does not fail.
        v0_5_12.abort_and_forget(finish, manager, SimpleNamespace(rid="a"))
    assert list(manager.rid_to_state) == ["b"]
