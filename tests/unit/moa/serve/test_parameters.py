"""Which parameters of a request reach which agents of each kind, and which are refused."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from flashmoa.moa.settings import Sampling
from tests.unit.moa.scripted_engine import ScriptedEngine
from tests.unit.moa.serve.served import ask, serving

KINDS: dict[str, dict[str, Any]] = {
    "mixture": {},
    "staircase": {"kind": "staircase"},
    "debate": {"kind": "debate"},
    "staircase debate": {"kind": "debate", "staircase": {}},
}
IN_PARTS = {"staircase", "staircase debate"}
FORM = {"type": "json_object"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
EVERYWHERE: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "user": "ada",
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1,
    "logit_bias": {"7": -100}, "skip_special_tokens": True, "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1}, "verbosity": "low", "metadata": {"chat": "7"},
    "ignore_eos": True, "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto",
}  # fmt: skip
OF_ONE_REQUEST: dict[str, Any] = {
    "tools": TOOLS,
    "response_format": FORM, "regex": "x", "ebnf": "root ::= 'x'", "stop_regex": "x",
    "stop_token_ids": [7], "no_stop_trim": True, "min_tokens": 1,
}  # fmt: skip
NOWHERE: dict[str, tuple[Any, str]] = {
    "n": (2, "n is 2: a question gets one answer; send it again for another"),
    "best_of": (2, "best_of is 2: a question gets one answer"),
    "logprobs": (True, "logprobs is true: answers come without log-probabilities"),
    "top_logprobs": (2, "top_logprobs is 2: answers come without log-probabilities"),
    "functions": ([{"name": "f"}], "give tools and tool_choice"),
    "prediction": ({"type": "content"}, "answers cannot be predicted"),
    "store": (True, "store is true: nothing is stored here"),
    "web_search_options": ({}, "agents cannot search the web"),
    "audio": ({"voice": "x"}, 'audio is {"voice": "x"}: agents write text'),
}
NEUTRAL: Any = {"n": 1, "tools": [], "logprobs": False, "response_format": {"type": "text"},
                "min_tokens": 0}  # fmt: skip


def three_agents(
    kind: str,
) -> AbstractAsyncContextManager[tuple[ScriptedEngine, httpx.AsyncClient]]:
    """Serve two agents, and one that answers."""
    scripts = {"first": ["It is ", "18."], "last": ["It is ", "19."]}
    first: dict[str, Any] = {"model": "first", "repeat": 2}
    return serving(scripts, [first], [{"model": "last"}], **KINDS[kind])


def test_every_parameter_is_tested() -> None:
    of_the_answer = {"stop", "max_tokens", "max_completion_tokens"}
    assert Sampling.model_fields.keys() <= EVERYWHERE.keys() | OF_ONE_REQUEST | of_the_answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {**OF_ONE_REQUEST, "stop": ["#"]}], ids=["parts", "whole"])
async def test_parameters_reach_the_agent_that_answers(kind: str, more: Any) -> None:
    given = {**EVERYWHERE, **more}
    if "tools" in given:
        given |= {"tool_choice": "auto", "parallel_tool_calls": False}
    async with three_agents(kind) as (engine, http):
        answer = await ask(http, **given)
    assert answer.status_code == 200, answer.text
    passed = [body for body in engine.bodies if body["model"] == "last"]
    assert passed and all(given.items() <= body.items() for body in passed)
    others = [body for body in engine.bodies if body not in passed]
    assert others and not any(given.keys() & body.keys() for body in others)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_no_agent_can_follow_is_refused(kind: str) -> None:
    async with three_agents(kind) as (engine, http):
        for name, (value, sentence) in NOWHERE.items():
            answer = await ask(http, **{name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert error["code"] == "unsupported_parameter" and sentence in error["message"]
        assert not engine.bodies
        answer = await ask(http, **NEUTRAL)
    assert answer.status_code == 200
    assert not answer.json()["flashmoa"].get("in_one_request_for")


@pytest.mark.parametrize("kind", sorted(IN_PARTS))
@pytest.mark.parametrize("name", OF_ONE_REQUEST)
async def test_what_parts_cannot_follow_has_one_request(kind: str, name: str) -> None:
    async with three_agents(kind) as (engine, http):
        answer = await ask(http, **{name: OF_ONE_REQUEST[name]})
    assert answer.json()["flashmoa"]["in_one_request_for"] == [name]
    assert answer.json()["choices"][0]["message"]["content"] == "It is 19."
    [body] = [body for body in engine.bodies if body["model"] == "last"]
    assert not body.get("continue_final_message")
    # It has read whole answers.
    assert "".join(message["content"] for message in body["messages"]).count("It is 18.") == 2
