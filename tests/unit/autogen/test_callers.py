"""Test how an agent is found on whose behalf a model is called."""

from __future__ import annotations

import gc
import weakref

from flashmoa._stack import owners


class Prompt:
    pass


class Agent:
    def ask(self) -> tuple[list[object], weakref.ref[Prompt]]:
        prompt = Prompt()
        return owners(), weakref.ref(prompt)


def test_a_look_at_the_stack_keeps_no_local_variable_alive() -> None:
    """Prompts and answers are freed at once, and not when the garbage collector comes by."""
    gc.disable()
    try:
        agent = Agent()
        found, prompt = agent.ask()
        assert found[0] is agent
        assert prompt() is None
    finally:
        gc.enable()
