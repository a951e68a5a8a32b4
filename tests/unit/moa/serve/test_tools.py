"""Tools go to the agent that answers; all others read calls and results as text."""

import json
from typing import Any

import httpx
import pytest

from flashmoa.moa import EarlyExit, Fallback, MixtureFailed, Model
from tests.unit.moa.embedders import Embedder
from tests.unit.moa.scripted_engine import mix, scripted_engine
from tests.unit.moa.serve.served import ask, serving
from tests.unit.moa.serve.test_application import events
from tests.unit.moa.serve.test_parameters import IN_PARTS, KINDS

SCRIPTS: dict[str, Any] = {
    "first": ["Read ", "a.py."],
    "calls": ["I look.", ("call", "read")],
    "only calls": [("call", "read")],
    "cut": [("call", "read"), ("end", "cut")],
}
CALL = {"name": "read", "arguments": '{"path": "a.py"}'}
TOOL = {"type": "function", "function": {"name": "read", "description": "Reads a file."}}
TRANSCRIPT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Mend it."},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "list", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "read", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "1", "content": "a.py"},
    {"role": "tool", "tool_call_id": "2", "content": "x = 1"},
]  # fmt: skip


async def post(http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await ask(http, **{"messages": TRANSCRIPT, "tools": [TOOL], **more})


@pytest.mark.parametrize("kind", KINDS)
async def test_advisers_read_calls_and_results_as_text(kind: str) -> None:
    first: dict[str, Any] = {"model": "first", "repeat": 2}
    async with serving(SCRIPTS, [first], [{"model": "calls"}], **KINDS[kind]) as (engine, http):
        answer = await post(http, tool_choice="required")
    assert answer.status_code == 200, answer.text
    [last] = [body for body in engine.bodies if body["model"] == "calls"]
    assert last["tools"] == [TOOL] and last["tool_choice"] == "required"
    *before, result = [one for one in last["messages"] if one["role"] in ("assistant", "tool")]
    assert [one["role"] for one in before] == ["assistant", "tool"]
    assert len(before[0]["tool_calls"]) == 2 and result["content"] == "x = 1"
    assert "Read a.py." in last["messages"][-1]["content"]
    advisers = [body for body in engine.bodies if body["model"] == "first"]
    assert advisers
    for body in advisers:
        assert not {"tools", "tool_choice"} & body.keys()
        system, user = body["messages"][:2]
        assert "Be brief." in system["content"] and "- read: Reads a file." in system["content"]
        assert "tool_calls" not in json.dumps(body["messages"])
        assert user["content"].startswith(
            "Mend it.\n\nResult of list({}):\na.py\n\nResult of read({}):\nx = 1"
        )
    if kind in IN_PARTS:
        assert answer.json()["flashmoa"]["in_one_request_for"] == ["tools"]


@pytest.mark.parametrize("text", ["I look.", None])
async def test_a_call_is_the_answer(text: str | None) -> None:
    last = {"model": "calls" if text else "only calls"}
    async with serving(SCRIPTS, [{"model": "first"}], [last]) as (_, http):
        whole = (await post(http)).json()["choices"][0]
        streamed = events(await post(http, stream=True))
    call = {"id": "call_read", "type": "function", "function": CALL}
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == text and whole["message"]["tool_calls"] == [call]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(delta.get("content") or "" for delta in deltas) == (text or "")
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta] == [
        [{"index": 0, **call}]
    ]
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_early_exit_skips_advisers_but_not_the_agent_with_the_tools() -> None:
    async with scripted_engine({**SCRIPTS, "hung": ["Hm", ("end", "hang")]}) as (_, client):
        policy = EarlyExit(Embedder(), rule="threshold", threshold=0)
        mixture = mix(client, ["first", "first", "hung"], "only calls", early_exit=policy)
        result = await mixture.answer(TRANSCRIPT, {"tools": [TOOL]})
    assert [agent.status for agent in result.agents] == ["used", "used", "left out", "used"]
    assert result.tool_calls and result.finish_reason == "tool_calls"


async def test_no_advice_takes_the_place_of_an_answer_with_tools() -> None:
    last: dict[str, Any] = {"model": "cut", "limits": {"attempts": 1}}
    async with serving(SCRIPTS, [{"model": "first"}], [last]) as (engine, http):
        failed = await post(http)
        answered = await post(http, tool_choice="none")
    assert failed.status_code == 502, failed.text
    advises = ["- read: Reads a file." in str(body["messages"]) for body in engine.bodies]
    # Without a choice of tools the members answer.
    assert advises == [True, False, False, False]
    assert answered.json()["choices"][0]["message"]["content"] == "Read a.py."


async def test_tools_that_may_not_be_called_leave_a_staircase() -> None:
    first: dict[str, Any] = {"model": "first", "repeat": 2}
    async with serving(SCRIPTS, [first], [{"model": "first"}], kind="staircase") as (_, http):
        answer = await post(http, tool_choice="none")
    assert answer.json()["flashmoa"]["in_one_request_for"] == []


@pytest.mark.parametrize("has_text", [False, True])
async def test_a_backup_repeats_a_call_that_broke_off_before_any_text(*, has_text: bool) -> None:
    text = ["I look."] if has_text else []
    async with (
        scripted_engine({**SCRIPTS, "m": [*text, *SCRIPTS["cut"]]}) as (_, client),
        scripted_engine({"m": [("call", "list")]}) as (other, backup),
    ):
        mixture = mix(client, ["first"], Model(client, "m", backups=[backup]))
        if has_text:
            with pytest.raises(MixtureFailed):
                await mixture.answer(TRANSCRIPT, {"tools": [TOOL]})
            assert not other.bodies
            return
        result = await mixture.answer(TRANSCRIPT, {"tools": [TOOL]})
    assert [call["function"]["name"] for call in result.tool_calls] == ["list"]
    assert len(result.final.retries) == 1 and result.substitution is None


async def test_another_agent_calls_the_tool_in_place_of_a_call_that_broke_off() -> None:
    async with scripted_engine(SCRIPTS) as (engine, client):
        fallback = Fallback([Model(client, "only calls")])
        mixture = mix(client, ["first"], "cut", fallback=fallback)
        result = await mixture.answer(TRANSCRIPT, {"tools": [TOOL]})
    assert [call["function"] for call in result.tool_calls] == [CALL]
    assert result.substitution is not None and result.substitution.kind == "aggregator"
    assert engine.bodies[-1]["tools"] == [TOOL]
