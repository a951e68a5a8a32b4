"""Test what a team's report says of calls that were not linked, on real engines."""

import pytest
from autogen_agentchat.teams import BaseGroupChat, MagenticOneGroupChat

from flashmoa.autogen import link
from flashmoa.engine.local import LocalEngine
from tests.integration.frameworks.autogen.runs import Client, connected
from tests.integration.frameworks.autogen.teams import agents, orchestrate, swarm
from tests.integration.scripted import script


async def reported(team: BaseGroupChat, task: str) -> tuple[str, str]:
    """Run a team, and return its report right after the run, and once its links have ended."""
    async with link(team) as linked:
        await team.run(task=task)
        shown = str(linked)
    return join(shown), join(str(linked))


def join(report: str) -> str:
    return " ".join(report.split())


async def test_a_speaker_that_hands_nothing_over_gets_a_reason_and_its_links_are_open(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda _: "I stay.")
    team = swarm(model_client, {"alice": ["bob"], "bob": ["alice"]}, 3)
    shown, ended = await reported(team, guide[:600])
    assert "0 of 2 calls linked" in shown and "first: it began the run; none: not linked" in shown
    reason = "an agent's own next turn is linked only while its tools run"
    assert f"why alice: it spoke again: {reason}" in shown
    assert "links, by why they ended: 1 still open" in shown and "still open" not in ended


async def test_an_orchestrators_text_that_is_not_streamed_is_no_failure_and_said_once(
    engine: LocalEngine, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, _ = orchestrate(monkeypatch, turns=2)
    async with connected(engine, model_info=info, max_tokens=12) as (client,):
        team = MagenticOneGroupChat(
            agents(client, "coder writer"), model_client=client, max_turns=4
        )
        shown, _ = await reported(team, guide[:600])
    assert shown.count("the text of (manager) is not streamed to it: it decides who speaks") == 1
    assert "What failed" not in shown
