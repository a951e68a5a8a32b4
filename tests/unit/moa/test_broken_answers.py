"""Answers that end as they should not, and what an agent makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoa.engine import PromptUsage
from flashmoa.moa import AggregationPrompt, Limits, MixtureOfAgents, MixtureResult, Model
from flashmoa.moa.cluster import Member
from tests.unit.moa.scripted_engine import Script, scripted_engine

pytestmark = pytest.mark.anyio

PROMPT = AggregationPrompt("question-first", "Weigh:")
SCRIPTS: dict[str, Script] = {
    "whole": ["It is ", "18."],
    "rest": ["is ", "18."],
    "hung": [("end", "hang")],
    "aborted": ["It ", ("end", "abort")],
    "cut": ["It ", ("end", "cut")],
    "without usage": ["It is ", "18.", ("end", "no usage")],
}


async def ask(first: str, backup: str, **more: Any) -> MixtureResult:
    """Ask a mixture whose last agent writes one script, and its backup another."""
    async with (
        scripted_engine({"m": SCRIPTS[first], "whole": SCRIPTS["whole"]}) as (_, client),
        scripted_engine({"m": SCRIPTS[backup]}) as (_, other),
    ):
        last = Model(client, "m", backups=[other], **more)
        return await MixtureOfAgents([[Model(client, "whole")], [last]], prompt=PROMPT).answer("?")


async def test_an_engine_that_writes_nothing_in_the_answers_time_has_a_backup() -> None:
    limits = Limits(first_token_seconds=30, answer_seconds=0.3)
    result = await ask("hung", "whole", limits=limits)
    assert result.text == "It is 18." and result.substitution is None
    [problem] = result.final.retries
    assert "no token came within 0.3 s" in problem


async def test_an_aborted_answer_is_continued_by_another_engine() -> None:
    result = await ask("aborted", "rest")
    assert result.text == "It is 18." and "aborted its answer" in result.final.retries[0]


async def test_an_answer_with_a_finish_reason_is_complete_without_its_usage() -> None:
    result = await ask("without usage", "rest")
    assert result.text == "It is 18." and not result.final.retries
    assert result.final.finish_reason == "stop"


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"regex": "It is [0-9]+"}]
)
async def test_an_answer_with_a_grammar_is_not_continued(form: dict[str, Any]) -> None:
    result = await ask("cut", "rest", sampling=form)
    assert not result.final.retries and result.substitution is not None
    plain = await ask("cut", "rest", sampling={"response_format": {"type": "text"}})
    assert plain.text == "It is 18." and plain.substitution is None


class _Written:
    """An answer of two words after a thought of eight characters."""

    written, thought = "It is 18", "x" * 8
    usage = PromptUsage(prompt_tokens=5, completion_tokens=100)


def test_an_answers_length_is_without_its_thought() -> None:
    answer: Any = _Written()
    record: Any = None
    assert Member(answer, record, []).tokens == 50
    answer.thought = ""
    assert Member(answer, record, []).tokens == 100
    answer.written = ""
    assert Member(answer, record, []).tokens == 0
