"""Where prompts stop sharing a prefix is found, and what that cost."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashmoa.engine import PromptUsage
from flashmoa.observe import CallFinished, CallStarted, PromptSent
from flashmoa.observe.calls import Call
from flashmoa.observe.prefix_breaks import PrefixBreak, find_breaks, group_breaks

Messages = list[dict[str, Any]]
Tools = Sequence[dict[str, Any]]

SYSTEM = {"role": "system", "content": "You are a writer."}
TASK = {"role": "user", "content": "Write a plan."}
ANSWER = {"role": "assistant", "content": "First, walk."}
MORE = {"role": "user", "content": "Go on, please."}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A tool.", **fields}}


def call(
    messages: Messages,
    tools: Tools = (),
    *,
    agent: str = "writer",
    at: float = 0.0,
    answer: str = "",
    usage: PromptUsage | None = None,
    **sent: Any,
) -> Call:
    """Make a call; ``at`` is also its id."""
    who = {"agent": agent, "engine": "http://e", "call_id": str(at)}
    prompt = PromptSent(**who, at=at, messages=messages, tools=list(tools), **sent)
    finished = CallFinished(**who, at=at + 0.9, text=answer, usage=usage)
    return Call(CallStarted(**who, at=at, model="m"), at + 0.5, finished, prompt)


def used(prompt: int, cached: int | None, streamed: int | None = None) -> PromptUsage:
    counts: dict[str, Any] = {"cached_tokens": cached, "streamed_tokens": streamed}
    return PromptUsage(prompt_tokens=prompt, completion_tokens=5, **counts)


def only_break(earlier: Call, later: Call) -> PrefixBreak:
    (found,) = find_breaks([earlier, later])
    return found


def compare(
    old: Messages, new: Messages, old_tools: Tools = (), new_tools: Tools = ()
) -> PrefixBreak:
    return only_break(call(old, old_tools), call(new, new_tools, at=1.0))


def system(text: str, *more: dict[str, Any]) -> Messages:
    return [{"role": "system", "content": text}, *(more or [TASK])]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SEARCH, READ = tool("search"), tool("read")


# Few letters, so that texts have long prefixes in common.
TEXTS = st.text("ab <>\n1", max_size=12)
MESSAGES = st.builds(
    lambda role, text: {"role": role, "content": text},
    st.sampled_from(["user", "assistant"]),
    TEXTS,
)
PROMPTS = st.lists(MESSAGES, min_size=1, max_size=5)
TOOLS = st.lists(st.sampled_from(["search", "read", "write"]).map(tool), max_size=3)


@example([user(""), user("")], [], [user("\n")], [])
@given(PROMPTS, TOOLS, PROMPTS, TOOLS)
def test_first_difference_is_the_first(
    old: Messages, old_tools: Tools, new: Messages, new_tools: Tools
) -> None:
    for broken in find_breaks([call(old, old_tools), call(new, new_tools, at=1.0)]):
        assert broken.old[: broken.at] == broken.new[: broken.at]
        assert broken.old[broken.at] != broken.new[broken.at]
        assert broken.place and broken.remedy
        assert 0 <= broken.repeated <= 1


@given(PROMPTS, TOOLS, PROMPTS, st.text("ab", min_size=1), st.booleans())
def test_a_prompt_that_goes_on_is_never_a_break(
    prompt: Messages, tools: Tools, more: Messages, answer: str, is_answered: bool
) -> None:
    own = [{"role": "assistant", "content": answer}] if is_answered else []
    others = [{**message, "role": "user"} for message in more]
    longer = [*prompt, *own, *others]
    calls = [
        call(prompt, tools, answer=answer),
        call(longer, tools, at=1.0),
        call(longer, tools, at=2.0),
        call(prompt, tools, at=3.0),
    ]
    assert not find_breaks(calls)


ONE, TWO, THREE = user("One."), user("Two."), user("Three.")


@pytest.mark.parametrize(
    ("old", "new", "place", "before", "now"),
    [
        ([SYSTEM, ONE], [user("Be brief."), ONE], "message 1 (user)", "system:", "user:"),
        ([SYSTEM], [{**SYSTEM, "content": "You"}], "the system message", " are a", "user"),
        ([SYSTEM, ONE, TWO], [SYSTEM, TWO, MORE], "message 2 (user)", "One.", "Two."),
        ([ONE, {**ANSWER, "name": "a"}], [ONE, ANSWER], "message 2 (assistant)", " {", ""),
        ([ONE, ANSWER], [ONE, {**ANSWER, "role": "user"}], "message 2 (user)", "assist", "user"),
    ],
)
def test_the_first_different_message_is_named(
    old: Messages, new: Messages, place: str, before: str, now: str
) -> None:
    broken = compare([*old, THREE], [*new, THREE])
    assert broken.place == place
    lines = broken.describe().splitlines()
    assert lines[0] == f"writer, call 2: {place} differs"
    assert before in lines[3] and now in lines[4]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([SEARCH, READ], [READ, SEARCH]),
        ([SEARCH], [SEARCH, READ]),
        ([SEARCH], []),
        ([SEARCH, READ], [tool("search", description="Finds."), READ]),
        ([{"name": "a", "strict": True}], [{"strict": True, "name": "a"}]),
    ],
)
def test_differing_tools_are_named_first(old: Tools, new: Tools) -> None:
    broken = compare(system("Turn 1."), system("Turn 2."), old, new)
    assert broken.place == "the list of tools" and "same tools" in broken.remedy


def test_an_answer_without_its_thought_is_a_break() -> None:
    """The engine has the answer as it was written; the history has it without the thought."""
    earlier = call([SYSTEM, TASK], answer="<think>Hm.</think>First, walk.")
    broken = only_break(earlier, call([SYSTEM, TASK, ANSWER, MORE], at=1.0))
    assert broken.place == "message 3 (assistant)"
    assert broken.new[broken.at :].startswith("First, walk.")


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"enable_thinking": False}, "the request's enable_thinking"),
        ({"cache_salt": "s"}, "the request's cache_salt"),
        ({"reasoning_effort": "low"}, "the request's reasoning_effort"),
        # These change the end of a prompt only.
        ({"tool_choice": "required", "continue_final_message": True}, None),
    ],
)
def test_settings_at_the_beginning_break_prefixes(
    settings: dict[str, Any], place: str | None
) -> None:
    found = find_breaks([call(LONG), call(LONG, at=1.0, settings=settings)])
    assert [one.place for one in found] == ([place] if place else [])


GUIDE = user("A guide to the mountains. " * 50)


def test_first_prompts_are_compared() -> None:
    planner, reviewer = system("You plan.", GUIDE), system("You review.", GUIDE)
    calls = [
        call(planner, agent="planner"),
        call(system("You sing."), agent="singer", at=1.0),
        call(reviewer, agent="reviewer", at=2.0),
        # It shares the guide with the reviewer, so the planner's prompt does not matter.
        call([*reviewer, MORE], agent="critic", at=3.0),
        # It leaves the critic's prompt behind the guide, where nothing that it could share is left.
        call([*reviewer, TASK], agent="editor", at=4.0),
    ]
    (broken,) = find_breaks(calls)
    assert (broken.call.agent, broken.earlier.agent) == ("reviewer", "planner")
    assert broken.repeated > 0.9
    assert "from the prompt of planner at" in broken.describe()


def test_other_engines_and_models_are_not_compared() -> None:
    one, other, third = (call(system(f"Turn {turn}."), at=turn) for turn in (1.0, 2.0, 3.0))
    other.started = CallStarted(agent="writer", engine="http://other", call_id="2.0", model="m")
    third.started = CallStarted(agent="writer", engine="http://e", call_id="3.0", model="n")
    assert not find_breaks([one, other, third])
    # A call without a prompt, as in traces without prompts, is left out.
    third.prompt = None
    assert not find_breaks([third, third])


LONG = [SYSTEM, *(user(f"{number} " + "word " * 20) for number in range(9))]


def turn(number: int, usage: PromptUsage | None) -> Call:
    return call(system(f"Turn {number}.", *LONG[1:]), at=float(number), usage=usage)


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
    assert "(980 computed, 880 ahead of the call)" in broken.describe()
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
    kept_share = sum(len(one["content"]) for one in kept) / (len(new["content"]) + 600)
    assert (broken.again_tokens or 0) == pytest.approx(3000 * kept_share, rel=0.1)


def test_breaks_with_the_same_reason_are_grouped() -> None:
    calls = [turn(number, used(1000, 20)) for number in range(1, 5)]
    cheap = call(system("Turn 5."), at=5.0, usage=used(1000, 999))
    (group,) = group_breaks(find_breaks([*calls, cheap]))
    assert (group.times, group.again_in_all) == (3, 2937)
    last = group.describe().splitlines()[-1]
    assert last == "  3 times in all, about 2,937 tokens computed again"


def test_a_description_shows_the_difference() -> None:
    broken = only_break(turn(1, used(1000, 0)), turn(2, used(1000, 20)))
    assert broken.describe().splitlines() == [
        "writer, call 2: the system message differs",
        "  from its prompt before at character 13 of 996",
        "  common  'system: Turn '",
        "  before  '1.\\nuser: 0 word word word word word word word wo…'",
        "  now     '2.\\nuser: 0 word word word word word word word wo…'",
        "  cost    about 979 of 1,000 prompt tokens computed again (980 computed, 0 ahead of the "
        "call); first token after 500 ms",
        "  remedy  put what differs at the end of the last message",
    ]
