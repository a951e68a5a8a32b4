"""Where prompts stop sharing a prefix is found and explained."""

from __future__ import annotations

from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.observe.prefix_breaks import find_breaks
from flashmoa.observe.prompt_text import common_prefix
from tests.unit.observe.prompts import (
    ANSWER,
    MORE,
    READ,
    SEARCH,
    SYSTEM,
    TASK,
    Messages,
    Tools,
    call,
    compare,
    only_break,
    render,
    system,
    tool,
    user,
)


def shared_length(one: str, other: str) -> int:
    return len(commonprefix([one, other]))  # noqa: RUF071 - it is meant to compare characters


# Few letters, so that texts have long prefixes in common.
TEXTS = st.text("ab <>\n1", max_size=12)
MESSAGES = st.builds(
    lambda role, text: {"role": role, "content": text},
    st.sampled_from(["user", "assistant"]),
    TEXTS,
)
PROMPTS = st.lists(MESSAGES, min_size=1, max_size=5)
TOOLS = st.lists(st.sampled_from(["search", "read", "write"]).map(tool), max_size=3)


@given(st.text("ab", max_size=300), st.text("ab"), st.text("ab"))
def test_common_prefix_is_as_long_as_the_standard_library_says(
    shared: str, one: str, other: str
) -> None:
    one, other = shared + one, shared + other
    assert common_prefix(one, other) == shared_length(one, other)


@given(PROMPTS, TOOLS, PROMPTS, TOOLS)
def test_first_difference_is_the_first(
    old: Messages, old_tools: Tools, new: Messages, new_tools: Tools
) -> None:
    for broken in find_breaks([call(old, old_tools), call(new, new_tools, at=1.0)]):
        assert broken.old[: broken.at] == broken.new[: broken.at]
        assert broken.old[broken.at] != broken.new[broken.at]
        assert broken.changes
        assert 0 <= broken.repeated <= 1


@given(PROMPTS, TOOLS, PROMPTS, TOOLS)
def test_first_difference_in_rendered_prompts_is_the_first(
    old: Messages, old_tools: Tools, new: Messages, new_tools: Tools
) -> None:
    """Whatever is not reported has the whole earlier prompt, up to its last text, as its prefix."""
    before, now = render(old, old_tools), render(new, new_tools)
    whole = now.text + now.opening
    found = find_breaks(
        [call(old, old_tools), call(new, new_tools, at=1.0)], {"0.0": before, "1.0": now}
    )
    for broken in found:
        assert broken.is_rendered and (broken.old, broken.new) == (before.text, whole)
        assert broken.at == shared_length(before.text, whole)
    if not found:
        is_shorter = old_tools == new_tools and old[: len(new)] == new
        assert whole.startswith(before.text) or is_shorter


@given(PROMPTS, TOOLS, PROMPTS, st.text("ab", min_size=1), st.booleans())
def test_prompt_that_begins_with_the_one_before_is_never_reported(
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
    rendered = {
        one.started.call_id: render(one.prompt.messages, tools) for one in calls if one.prompt
    }
    assert not find_breaks(calls, rendered)


@pytest.mark.parametrize(
    ("old", "new", "kind", "text"),
    [
        ("It is 2025-11-23T10:15:02Z.", "It is 2025-11-23T10:15:07Z.", "value", "a time"),
        ("Now: 9:59 AM.", "Now: 10:00 AM.", "value", "a time"),
        ("At 1763892902.51 you", "At 1763892907.02 you", "value", "a time"),
        ("Today is 2025-11-23.", "Today is 2025-12-01.", "value", "a date"),
        ("Today is 11/23/2025.", "Today is 11/24/2025.", "value", "a date"),
        ("Today is November 30, 2025.", "Today is December 1, 2025.", "value", "a date"),
        ("It is Sunday.", "It is Monday.", "value", "a date"),
        (
            "Run 3f2b8c1e-0f4d-4c57-9d5a-2f6f0b9d8a11.",
            "Run 9d8a11aa-0f4d-4c57-9d5a-2f6f0b3f2b8c.",
            "value",
            "a UUID",
        ),
        ("Session call_8aX1.", "Session call_9bY2.", "value", "an identifier"),
        ("Turn 9 of 10.", "Turn 10 of 10.", "value", "a counter or another number"),
        ("Be brief.\n\nWrite.", "Be brief.\nWrite.", "white space", "white space"),
        ("Be brief. ", "Be brief.", "white space", "white space"),
        ("<think>Hm.</think>Be brief.", "Be brief.", "thought", "a thought"),
        ("Be brief.", "Be brief. Be kind.", "text", None),
        ("You are A.", "You are B.", "text", None),
    ],
)
def test_what_changed_in_a_text_is_named(old: str, new: str, kind: str, text: str | None) -> None:
    (change,) = compare(system(f"{old} Help!"), system(f"{new} Help!")).changes
    assert change.kind == kind
    assert change.text == (f"{text} in the system message" if text else "the system message")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ([SEARCH, READ], [READ, SEARCH], "the order of the tools"),
        ([SEARCH, READ], [SEARCH], "the tool read, which is left out"),
        ([SEARCH], [SEARCH, READ], "the tool read, which is new"),
        ([SEARCH], [], "the tools, of which there are none now"),
        ([], [SEARCH], "the tools, of which there are none before"),
        (
            [SEARCH, READ],
            [tool("search", description="Finds."), READ],
            "the definition of the tool search",
        ),
        (
            [tool("search", description="As of 2025-11-23.")],
            [tool("search", description="As of 2025-11-24.")],
            "a date of the tool search",
        ),
        (
            [{"type": "function", "function": {"name": "search", "strict": True}}],
            [{"type": "function", "function": {"strict": True, "name": "search"}}],
            "the order of the keys in the tool search",
        ),
        ([SEARCH], [SEARCH, SEARCH], "the tools, of which some come twice"),
        (
            ["search"],
            ["read"],
            'the tool "search", which is left out, the tool "read", which is new',
        ),
    ],
)
def test_what_changed_in_tools_is_named(old: Tools, new: Tools, text: str) -> None:
    (change,) = compare([SYSTEM, TASK], [SYSTEM, TASK], old, new).changes
    assert change.text == text


ONE, TWO, THREE = user("One."), user("Two."), user("Three.")


@pytest.mark.parametrize(
    ("old", "new", "kind", "text"),
    [
        (
            [ONE, TWO, THREE],
            [THREE, MORE],
            "history",
            "2 messages left out before message 2 (user)",
        ),
        (
            [ONE, TWO, THREE],
            [TWO, ONE, THREE],
            "history",
            "the order of the messages from message 2 (user) on",
        ),
        ([ONE, TWO], [MORE, ONE, TWO], "history", "1 message put in before message 2 (user)"),
        ([ONE, TWO], [user("A summary."), MORE], "text", "message 2 (user)"),
        ([ONE, ANSWER], [ONE, {**ANSWER, "role": "user"}], "text", "message 3 (user)"),
        (
            [ONE, {**ANSWER, "content": "<think>Hm.\n</think>\n\nFirst."}, TWO],
            [ONE, {**ANSWER, "content": "First."}, TWO],
            "thought",
            "a thought in message 3 (assistant)",
        ),
        (
            [ONE, {**ANSWER, "reasoning_content": "Hm."}, TWO],
            [ONE, ANSWER, TWO],
            "thought",
            "a thought in message 3 (assistant)",
        ),
    ],
)
def test_what_changed_in_the_history_is_named(
    old: Messages, new: Messages, kind: str, text: str
) -> None:
    (change,) = compare([SYSTEM, *old], [SYSTEM, *new]).changes
    assert (change.kind, change.text) == (kind, text)


def test_answer_that_returns_without_its_thought_is_a_break() -> None:
    """The engine has the answer as it was written; the history has it without the thought."""
    earlier = call([SYSTEM, TASK], answer="<think>Hm.</think>First, walk.")
    broken = only_break(earlier, call([SYSTEM, TASK, ANSWER, MORE], at=1.0))
    assert broken.changes[0].text == "a thought in message 3 (assistant)"
    assert broken.new[broken.at :].startswith("First, walk.")


def test_what_only_the_chat_template_changes_is_said_so() -> None:
    old = [SYSTEM, TASK, {"role": "assistant", "content": "<think>Hm.</think>Go."}, ONE]
    calls = [call(old), call([*old, TWO], at=1.0)]
    assert not find_breaks(calls)
    # Templates of models that think show only the newest thoughts.
    shown = [old[0], old[1], {"role": "assistant", "content": "Go."}, ONE]
    (broken,) = find_breaks(calls, {"0.0": render(old), "1.0": render([*shown, TWO])})
    (change,) = broken.changes
    assert change.kind == "thought"
    assert change.text == "a thought in what the chat template makes of the same messages"


def test_what_the_chat_template_does_not_show_is_no_break() -> None:
    named = [SYSTEM, {**TASK, "name": "one"}]
    other = [SYSTEM, {**TASK, "name": "two"}, MORE]
    calls = [call(named), call(other, at=1.0)]
    assert len(find_breaks(calls)) == 1
    assert not find_breaks(calls, {"0.0": render(named), "1.0": render(other)})
