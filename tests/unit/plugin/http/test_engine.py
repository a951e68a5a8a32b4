"""Test the plugin's own requests to SGLang."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import EngineDraining, EngineFailed
from flashmoa_sglang.http.stream import PromptStream
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.sglang import hooks
from flashmoa_sglang.sglang.releases import RELEASE


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for SGLang's ``TokenizerManager``; ``outputs`` are the outputs of each request."""
    messages = SimpleNamespace(GenerateReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setattr(RELEASE, "resolve_arguments", lambda arguments: arguments)

    async def generate_request(_obj: object, _request: object) -> AsyncGenerator[Any]:
        for meta in made.outputs:
            yield {"meta_info": meta}

    made = SimpleNamespace(
        tokenizer=None,
        server_args=SimpleNamespace(disaggregation_mode="null"),
        generate_request=generate_request,
        outputs=[],
        _result_dispatcher=SimpleNamespace(_mapping={}),
        server_status=SimpleNamespace(value="Up"),
        gracefully_exit=False,
        is_pause=False,
        rid_to_state={},
    )
    return made


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([{"finish_reason": {"type": "abort", "message": "too late"}}], "aborted .*: too late. S"),
        ([{"finish_reason": None}, {"finish_reason": {"type": "abort"}}], "aborted .*: aborted. S"),
        ([], "without an answer"),
    ],
)
async def test_a_prefill_without_a_result_has_failed(
    manager: Any, outputs: list[dict[str, Any]], says: str
) -> None:
    engine, manager.outputs = Engine(manager), outputs
    with pytest.raises(EngineFailed, match=says):
        await engine.generate([1, 2], RequestMark(timed=True))
    # The next request succeeds.
    manager.outputs = [{"finish_reason": {"type": "length"}, "prompt_tokens": 2}]
    assert (await engine.generate([1, 2], RequestMark()))["prompt_tokens"] == 2


@pytest.mark.parametrize(
    "state",
    [
        {"server_status": SimpleNamespace(value="Starting")},
        {"gracefully_exit": True},
        {"is_pause": True},
        {"rid_to_state": {"a client's": object()}},
    ],
    ids=lambda state: next(iter(state)),
)
def test_nothing_is_measured_in_some_states(manager: Any, state: dict[str, Any]) -> None:
    engine = Engine(manager)
    assert engine.may_measure
    vars(manager).update(state)
    assert not engine.may_measure


async def test_a_change_waits_for_what_is_measured(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ends, changes = Engine(manager), anyio.Event(), list[bool]()
    asked = list[bool]()

    async def ask() -> None:
        asked.append(bool(engine._timed))

    monkeypatch.setattr(engine, "kv", ask)

    async def answer(_obj: object, _request: object) -> AsyncGenerator[Any]:
        await ends.wait()
        yield {"meta_info": {}}

    async def change() -> None:
        async with engine.change():
            changes.append(engine.may_measure)

    manager.generate_request = answer
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, [1, 2], RequestMark(timed=True))
        await anyio.wait_all_tasks_blocked()
        group.start_soon(change)
        await anyio.wait_all_tasks_blocked()
        assert not engine.may_measure and not changes
        ends.set()
    assert changes == [False] and engine.may_measure
    # The scheduler has answered after its last forward.
    assert asked == [False, False]


async def test_nothing_is_measured_without_memory(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.flashmoa_table = StreamTable(engine := Engine(manager))

    async def done(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(engine, "kv", done)
    for tags, others in ((["weights", "kv_cache"], ["weights"]), (None, ["cuda_graph", "weights"])):
        await hooks.release_memory(done, manager, SimpleNamespace(tags=tags))
        assert not engine.may_measure
        await hooks.resume_memory(done, manager, SimpleNamespace(tags=others))
        assert not engine.may_measure
        with pytest.raises(EngineDraining, match="being changed"):
            manager.flashmoa_table.open(PromptStream(60.0, None))
        await hooks.resume_memory(done, manager, SimpleNamespace(tags=["kv_cache"]))
        assert engine.may_measure


async def test_nothing_runs_while_weights_are_updated_in_steps(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.flashmoa_table = StreamTable(engine := Engine(manager))
    succeeds = False

    async def answer(*_: Any) -> Any:
        return succeeds, "Success"

    async def no_reports() -> list[Any]:
        return []

    monkeypatch.setattr(engine, "kv", no_reports)
    assert await hooks.begin_update(answer, manager, "all") == (False, "Success")
    assert engine.may_measure
    succeeds = True
    assert await hooks.begin_update(answer, manager, "all") == (True, "Success")
    assert not engine.may_measure
    with pytest.raises(EngineDraining, match="being changed"):
        manager.flashmoa_table.open(PromptStream(60.0, None))
    assert await hooks.end_update(answer, manager) == (True, "Success")
    assert engine.may_measure
