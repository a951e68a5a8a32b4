"""Which prompts are compared, and what it cost where they stopped sharing a prefix."""

from __future__ import annotations

import pytest

from flashmoa.engine import PromptUsage
from flashmoa.observe import CallStarted, earlier_prompts
from flashmoa.observe.calls import Call
from flashmoa.observe.prefix_breaks import find_breaks, group_breaks
from flashmoa.observe.prompt_text import count_repeated
from tests.unit.observe.prompts import (
    MORE,
    READ,
    SEARCH,
    SYSTEM,
    TASK,
    call,
    compare,
    only_break,
    render,
    system,
    used,
    user,
)


def test_settings_of_the_request_are_compared() -> None:
    prompt = [SYSTEM, TASK]
    thinking = call(prompt, at=1.0, template_args={"enable_thinking": False})
    salted = call(prompt, at=2.0, namespace={"cache_salt": "s"})
    texts = [one.changes[0].text for one in find_breaks([call(prompt), thinking, salted])]
    assert texts == [
        "the request's enable_thinking",
        "the request's enable_thinking and cache_salt",
    ]


def test_only_settings_that_change_a_prompts_beginning_break_its_prefix() -> None:
    plain = call(LONG, at=0.0)
    forced = call(LONG, at=1.0, options={"tool_choice": "required", "continue_final_message": True})
    low = call(LONG, at=2.0, options={"reasoning_effort": "low"})
    assert find_breaks([plain, forced]) == []
    (found,) = find_breaks([plain, low])
    assert [change.text for change in found.changes] == ["the request's reasoning_effort"]


def test_prompts_with_another_cache_salt_share_nothing() -> None:
    """The engine renders them alike, but does not share their KV."""
    salted = call(LONG, at=1.0, namespace={"cache_salt": "s"}, usage=used(1000, 0))
    same = render(LONG)
    (broken,) = find_breaks([call(LONG), salted], {"0.0": same, "1.0": same})
    assert broken.at == 0 and broken.changes[0].text == "the request's cache_salt"
    assert (broken.again_tokens or 0) > 950


def test_all_of_settings_tools_and_messages_are_named() -> None:
    changes = compare(system("Turn 1."), system("Turn 2."), [SEARCH, READ], [READ, SEARCH]).changes
    assert [change.kind for change in changes] == ["tools", "value"]


GUIDE = user("A guide to the mountains. " * 50)


def test_first_prompt_of_an_agent_is_compared_with_those_that_have_much_in_common() -> None:
    planner = [{"role": "system", "content": "You plan."}, GUIDE]
    reviewer = [{"role": "system", "content": "You review."}, GUIDE]
    calls = [
        call(planner, agent="planner"),
        call([{"role": "system", "content": "You sing."}, TASK], agent="singer", at=1.0),
        call(reviewer, agent="reviewer", at=2.0),
        # It shares the guide with the reviewer, so the planner's prompt does not matter.
        call([*reviewer, MORE], agent="critic", at=3.0),
        # It leaves the critic's prompt behind the guide, where nothing that it could share is left.
        call([*reviewer, TASK], agent="editor", at=4.0),
    ]
    (broken,) = find_breaks(calls)
    assert (broken.call.agent, broken.earlier.agent) == ("reviewer", "planner")
    assert broken.repeated > 0.9
    assert "differs from the prompt of planner at" in broken.describe()


def test_prompts_of_other_engines_and_models_are_not_compared() -> None:
    one, other, third = (call(system(f"Turn {turn}."), at=turn) for turn in (1.0, 2.0, 3.0))
    other.started = CallStarted(agent="writer", engine="http://other", call_id="2.0", model="m")
    third.started = CallStarted(agent="writer", engine="http://e", call_id="3.0", model="n")
    assert not find_breaks([one, other, third])
    # A call without a prompt, as in traces without prompts, is left out.
    third.prompt = None
    assert not find_breaks([third, third])


LONG = [SYSTEM, *(user(f"{number} " + "word " * 20) for number in range(9))]


def turn(number: int, usage: PromptUsage | None) -> Call:
    messages = [{"role": "system", "content": f"Turn {number}."}, *LONG[1:]]
    return call(messages, at=float(number), usage=usage)


def test_cost_is_what_was_computed_again() -> None:
    broken = only_break(turn(1, used(1000, 0)), turn(2, used(1000, 20)))
    assert broken.computed_tokens == 980
    assert broken.again_tokens == 979  # A few are of the number, which is new.
    # Nothing is computed again if another prompt was in the cache.
    broken = only_break(turn(1, used(1000, 0)), turn(2, used(1000, 995)))
    assert broken.again_tokens == 5
    # What a link computed ahead of the call was in the cache when the call came.
    broken = only_break(turn(1, used(1000, 0)), turn(2, used(1000, 900, streamed=880)))
    assert (broken.computed_tokens, broken.again_tokens) == (980, 979)
    assert "(880 ahead of the call)" in broken.describe()
    # The engine may report nothing, or no cached tokens.
    broken = only_break(turn(1, None), turn(2, None))
    assert (broken.computed_tokens, broken.again_tokens) == (None, None)
    assert "not known" in broken.describe()
    broken = only_break(turn(1, None), turn(2, used(1000, None)))
    assert broken.computed_tokens is None
    assert 950 < (broken.again_tokens or 0) <= 1000


def test_new_text_does_not_count_as_computed_again() -> None:
    kept = LONG[5:]
    new = user("new " * 500)
    broken = only_break(call(LONG), call([SYSTEM, *kept, new], at=1.0, usage=used(3000, 10)))
    assert broken.changes[0].kind == "history"
    kept_share = sum(len(one["content"]) for one in kept) / (len(new["content"]) + 600)
    assert (broken.again_tokens or 0) == pytest.approx(3000 * kept_share, rel=0.1)


def test_breaks_of_one_agent_for_one_reason_are_grouped() -> None:
    calls = [turn(number, used(1000, 20)) for number in range(1, 5)]
    cheap = call([{"role": "system", "content": "Turn 5."}, TASK], at=5.0, usage=used(1000, 999))
    (group,) = group_breaks(find_breaks([*calls, cheap]))
    assert (group.count, group.again_tokens) == (3, 2937)
    assert group.describe().splitlines()[-1] == (
        "  3 times in all, about 2,937 tokens computed again"
    )


def test_description_shows_the_difference_in_its_context() -> None:
    broken = only_break(turn(1, used(1000, 0)), turn(2, used(1000, 20)))
    assert broken.describe().splitlines() == [
        "writer, call 2: a counter or another number in the system message",
        "  differs from its prompt before at character 13 of 996 of its tools and messages",
        "  common  'system: Turn '",
        "  before  '1.\\nuser: 0 word word word word word word word wo…'",
        "  now     '2.\\nuser: 0 word word word word word word word wo…'",
        "  cost    980 of 1,000 prompt tokens computed, about 979 of them again; first token after "
        "500 ms",
    ]
    assert broken.remedy == "leave such values out, or put them at the end of the last message"


def test_the_time_for_prompts_of_many_agents_does_not_grow_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a trace of OpenAI's client, each call may have an agent's name of its own."""
    compared: list[int] = []

    def count(old: list[str], new: list[str], first: int) -> int:
        compared.append(first)
        return count_repeated(old, new, first)

    monkeypatch.setattr(earlier_prompts, "count_repeated", count)
    calls = [
        call([SYSTEM, GUIDE, user(f"Question {number}.")], agent=f"agent {number}", at=number)
        for number in range(400)
    ]
    # It shares nothing with those before, and more than enough with the very first one.
    other = call([GUIDE, SYSTEM, user("Question.")], agent="other", at=400)
    again = call([SYSTEM, GUIDE, user("Question 0.")], agent="again", at=401)
    shuffled = [call([GUIDE, MORE], agent=f"late {n}", at=500 + n) for n in range(40)]
    found = find_breaks([*calls, other, *shuffled, again])
    assert [broken.call.agent for broken in found] == ["other"]
    assert len(compared) < 40 * 450
