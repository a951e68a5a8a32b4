"""Which module serves which SGLang release, and what the modules have in common."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

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


def manager_with(*rids: str) -> SimpleNamespace:
    return SimpleNamespace(rid_to_state={rid: SimpleNamespace(finished=False) for rid in rids})


def test_0_5_12_forgets_what_it_refuses() -> None:
    async def refuse(_manager: object, _obj: object) -> None:
        raise ValueError("too long")

    manager = manager_with("a", "b")
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(v0_5_12.tokenize_or_forget(refuse, manager, SimpleNamespace(rid="a")))
    assert list(manager.rid_to_state) == ["b"]


def test_0_5_12_forgets_what_left_the_queue() -> None:
    def finish(manager: SimpleNamespace, message: SimpleNamespace) -> None:
        manager.rid_to_state[message.rid].finished = True

    manager = manager_with("a", "b")
    for _ in range(2):  # The second abort finds nothing, and does not fail.
        v0_5_12.abort_and_forget(finish, manager, SimpleNamespace(rid="a"))
    assert list(manager.rid_to_state) == ["b"]
