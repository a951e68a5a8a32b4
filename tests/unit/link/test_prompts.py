"""Test prompts and their stable frontier."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.link.prompt import Placeholders, Prompt, Slot


def test_stripped_white_space_is_withheld() -> None:
    slot = Slot("upstream", strip_start=True, strip_end=True)
    prompt = Prompt(["[", slot, "]"])
    slot.append("  \n a ")
    assert prompt.take() == "[a"
    slot.append("b \n")
    assert prompt.take() == " b"
    slot.close()
    assert prompt.take() == "]"


def test_a_slot_is_there_once_and_closed_for_ever() -> None:
    slot = Slot("upstream")
    with pytest.raises(ValueError, match="twice"):
        Prompt([slot, slot])
    slot.close()
    with pytest.raises(ValueError, match="upstream"):
        slot.append("more")


@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=4),
    strip=st.booleans(),
    data=st.data(),
)
def test_pieces_in_any_order_make_the_prompt(
    texts: list[str], strip: bool, data: st.DataObject
) -> None:
    """For any order of appends and closings, the pieces form the prompt, and none changes later."""
    slots = [Slot(str(i), strip_start=strip, strip_end=strip) for i in range(len(texts))]
    segments: list[str | Slot] = ["head"]
    for slot in slots:
        segments += [slot, "|"]
    prompt = Prompt(segments)
    remaining = [list(text) for text in texts]
    taken = prompt.take()
    while any(slot.is_open for slot in slots):
        index = data.draw(st.sampled_from([i for i, slot in enumerate(slots) if slot.is_open]))
        if remaining[index]:
            slots[index].append(remaining[index].pop(0))
        else:
            slots[index].close()
        taken += prompt.take()
    whole = "head" + "".join((text.strip() if strip else text) + "|" for text in texts)
    assert taken == whole == prompt.stable()


@given(
    strips=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_server_has_the_stable_text(strips: list[tuple[bool, bool]], data: st.DataObject) -> None:
    """It puts each piece after as many of its characters as the prompt says."""
    slots = [Slot(f"{i}", strip_start=a, strip_end=b) for i, (a, b) in enumerate(strips)]
    prompt = Prompt(["<", *(each for slot in slots for each in (slot, "|"))])
    written = dict.fromkeys(range(len(slots)), "")
    server = right = prompt.take()
    texts = st.text("ab \n", max_size=4)
    for _ in range(data.draw(st.integers(0, 30))):
        still_open = [i for i, slot in enumerate(slots) if slot.is_open]
        index = data.draw(st.sampled_from(still_open or [0]))
        step = data.draw(st.sampled_from(["append", "replace", "close", "take", "take"]))
        if step == "take" or not still_open:
            start, piece = prompt.take_back(), prompt.take()
            assert start == (None if right == server else len(right))
            server = server[:start] + piece
            assert server == prompt.stable()
            assert prompt.take_back() is None and prompt.take() == ""
            right = server
        elif step == "append":
            slots[index].append(text := data.draw(texts))
            written[index] += text
        elif step == "replace":
            # Some of the text often stays.
            kept = written[index][: data.draw(st.integers(0, len(written[index])))]
            written[index] = kept + data.draw(texts)
            prompt.replace(slots[index], written[index])
        else:
            slots[index].close()
        right = common_beginning(right, naive(prompt, slots, written))
    assert prompt.stable() == naive(prompt, slots, written)


def common_beginning(text: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return "".join(a for a, _ in same)


def naive(prompt: Prompt, slots: list[Slot], written: dict[int, str]) -> str:
    """Return the stable text, from the written texts of the slots."""
    text = "<"
    for index, slot in enumerate(slots):
        part = written[index]
        part = part.lstrip() if slot.strip_start else part
        text += part.rstrip() if slot.strip_end else part
        if slot.is_open:
            break
        text += "|"
    return text


def test_a_prompt_that_restarts_or_becomes_another() -> None:
    slot, same = Slot("A"), Slot("A")
    prompt = Prompt(["So ", slot])
    slot.append("far")
    assert prompt.take() == "So far"
    prompt.replace(slot, "good")
    # The taken-back text does not count.
    same.append("good")
    prompt.become(Prompt(["So ", same, "!"]))
    assert (prompt.take_back(), prompt.take()) == (3, "good")
    prompt.restart()
    assert (prompt.take_back(), prompt.take()) == (None, "So good")


def test_a_prompt_becomes_a_more_certain_prompt() -> None:
    prompt = Prompt(["So ", Slot("?")])
    assert prompt.take() == "So "
    first, second = Slot("A"), Slot("B")
    first.append("far")
    prompt.become(Prompt(["So ", first, " and ", second]))
    assert (prompt.take(), prompt.take()) == ("far", "")
    with pytest.raises(ValueError, match="already sent"):
        prompt.become(Prompt(["So good"]))
    assert prompt.slots == (first, second) and prompt.take() == ""
    first.close()
    assert prompt.take() == " and " and not prompt.is_complete


def test_a_text_in_two_places_has_two_slots() -> None:
    placeholders = Placeholders(["first", "second"])
    first, second = placeholders.padded("first"), placeholders.padded("second")
    prompt = placeholders.build_prompt(f"<{first}|{second}|{first}>")
    assert [slot.name for slot in prompt.slots] == ["first", "second", "first"]
    for slot in prompt.slots:
        slot.append(slot.name[0])
        slot.close()
    assert prompt.stable() == "<f|s|f>"
