"""Programs of DSPy: modules called by code and at once, and ReAct."""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import litellm
import openai

from flashmoa.openai import OpenAI
from tests.coverage.answers import Script
from tests.coverage.measure import instructions, learned, look, task

http = litellm.client_session = openai.DefaultHttpxClient()


class Whole(dspy.ChatAdapter):
    """Takes an answer for the last field of an output, since tiny models write no fields."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        try:
            return super().parse(signature, completion)
        except Exception:
            return dict.fromkeys(signature.output_fields, completion)


def predict(signature: str, name: str) -> Any:
    return dspy.Predict(dspy.Signature(signature, instructions(name)))


def chain() -> list[str]:
    one = predict("task -> plan", "one")(task=task()).plan
    two = predict("task, plan -> review", "two")(task=task(), plan=one).review
    last = predict("task, plan, review -> result", "three")(task=task(), plan=one, review=two)
    return [one, two, last.result]


def at_once() -> list[str]:
    one = predict("task -> plan", "one")(task=task()).plan
    asked = [(predict("plan -> review", name), {"plan": one}) for name in ("two", "three")]
    both = [each.review for each in dspy.Parallel(num_threads=2)(asked)]
    last = predict("plan, reviews -> result", "four")(plan=one, reviews="\n".join(both))
    return [one, *both, last.result]


def look_blocking(place: str) -> str:
    """Look at a place."""
    return asyncio.run(look(place))


look_blocking.__name__ = "look"


def react() -> list[str]:
    agent = dspy.ReAct(dspy.Signature("task -> plan", instructions("one")), [look_blocking])
    one = agent(task=task()).plan
    return [one, predict("plan -> review", "two")(plan=one).review]


def step() -> Script:
    fields = {
        "next_thought": "I look.", "next_tool_name": "look", "next_tool_args": '{"place": "lake"}',
    }  # fmt: skip
    ended = fields | {"next_tool_name": "finish", "next_tool_args": "{}"}
    answers = [
        "\n\n".join(f"[[ ## {key} ## ]]\n{value}" for key, value in each.items())
        for each in (fields, ended)
    ]
    return Script({"one": answers})


def program(composition: str, tools: bool, work: Any, script: Any = Script) -> Any:
    def play(url: str) -> list[str]:
        model = dspy.LM(
            "openai/tiny", engine="litellm", api_base=f"{url}/v1", api_key="none", cache=False
        )
        # LiteLLM keeps its client.
        OpenAI(base_url=url, http_client=http)
        with dspy.context(lm=model, adapter=Whole()):
            return work()

    return learned(composition, tools, play, make_script=script)


PROGRAMS = [
    program("modules called by code", False, chain),
    program("Parallel", False, at_once),
    program("ReAct", True, react, step),
]
