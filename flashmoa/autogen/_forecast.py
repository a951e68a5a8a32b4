"""What an agent will send next, told by AutoGen's own code.

A *shadow dry run*: a shallow copy of the agent with a cloned model context and a client that
only listens is given the messages the agent already has and stand-ins for those still being
written. The copy builds its prompt as the agent will; nothing of the team is changed.

Where it is not certain what will be there (agents that write at the same time finish in any
order, memory adds what it finds), several dry runs are made, and what they have in common is
certain.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autogen_agentchat.messages import BaseChatMessage
from autogen_core.models import LLMMessage

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._rendering import render
from flashmoa.errors import FlashMoAError
from flashmoa.linking.placeholders import StandIns
from flashmoa.linking.prompt import Prompt, Slot

# The slot that nobody fills: what comes here is not certain yet.
UNCERTAIN = "(not certain yet)"


class NotForecastable(FlashMoAError):
    """Raised when an agent's next prompt cannot be known; says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a model client was asked."""

    messages: list[LLMMessage]
    tools: list[Any]


# Given what an agent will have received by then: the call it will make.
DryRun = Callable[[Sequence[BaseChatMessage]], Awaitable[Call]]


async def forecast(
    client: FlashMoAChatCompletionClient,
    dry_runs: Sequence[DryRun],
    futures: Sequence[Sequence[BaseChatMessage]],
    stand_ins: StandIns,
) -> Prompt:
    """The prompt that an agent will send.

    Args:
        client: the agent's own.
        dry_runs: of that agent; several where its prompt depends on what cannot be known.
        futures: what it may have received by then, each possibility in its order.
        stand_ins: those used in ``futures``.

    Raises:
        NotForecastable: the agent or its chat template do not allow it.
        EngineError: its engine could not render the prompt.
    """
    calls: list[Call] = []
    for dry_run in dry_runs:
        for future in futures:
            call = await dry_run(future)
            if call not in calls:
                calls.append(call)
    rendered = [await render(client, call.messages, call.tools) for call in calls]
    try:
        if len(rendered) == 1:
            return Prompt(stand_ins.segments(rendered[0]))
        certain = len(os.path.commonprefix(rendered))  # noqa: RUF071
        return Prompt([*stand_ins.segments(rendered[0], certain), Slot(UNCERTAIN)])
    except ValueError as error:
        raise NotForecastable(str(error)) from error
