"""Test teams on the main families' chat templates: predicted, and answered the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from autogen_agentchat.base import TaskResult

from flashmoa.autogen import link
from flashmoa.engine.local import LocalEngines
from flashmoa.observe import Event
from tests.chat_templates import ALTERNATING, TEMPLATES
from tests.integration.autogen.exactness import count_outcomes, finished_calls, mostly_hit
from tests.integration.autogen.teams import Build, Client, filtered_fan, round_robin
from tests.integration.support import nightly, slow, start_special_engine, wait_until_idle

# Each family needs an engine of its own.
pytestmark = pytest.mark.anyio


def sorted_messages(result: TaskResult) -> list[tuple[str, str]]:
    """Return the messages, sorted as the reviewers finish in any order."""
    return sorted((message.source, message.to_text()) for message in result.messages)


@pytest.mark.parametrize(
    "family", [slow(family) if family == "chatml" else nightly(family) for family in TEMPLATES]
)
async def test_teams_on_a_familys_template_are_predicted_and_answer_the_same(
    engines: LocalEngines, model: Path, tmp_path: Path, guide: str, family: str
) -> None:
    template = tmp_path / f"{family}.jinja"
    template.write_text(TEMPLATES[family])
    arguments = ["--chat-template", str(template), "--enable-cache-report"]
    async with start_special_engine(engines, model, *arguments) as engine:
        client = Client(
            model="tiny",
            base_url=engine.url,
            temperature=0,
            max_tokens=40,
            extra_body={"ignore_eos": True},
            merge_user_messages=family in ALTERNATING,
        )
        try:
            for build in (round_robin, filtered_fan):
                await compare(client, build, guide[:800], family)
            await wait_until_idle(client.engine)
        finally:
            await client.close()


async def compare(client: Client, build: Build, task: str, family: str) -> None:
    await client.engine.flush_cache()
    plain = sorted_messages(await build(client).run(task=task))
    await client.engine.flush_cache()
    team, events = build(client), list[Event]()
    running = link(team, listener=events.append)
    linked = sorted_messages(await team.run(task=task))
    await running.close()
    assert linked == plain
    calls = finished_calls(events)[1:]
    count_outcomes(f"template: {family}", calls)
    assert {call.status for call in calls} <= {"hit", "late"}
    assert mostly_hit(calls)
