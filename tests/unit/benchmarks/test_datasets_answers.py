"""Test finding the result in an answer, and comparing mathematical results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from flashmoa_bench.datasets import mathematics
from flashmoa_bench.datasets.answers import (
    find_box,
    find_final_number,
    find_numbers,
    find_statements,
    without_thoughts,
)
from flashmoa_bench.datasets.multiple_choice import find_choice
from hypothesis import given
from hypothesis import strategies as st

# Math-Verify keeps time by the alarm that pytest-timeout would use.
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"So \boxed{42}.", "42"),
        (r"\boxed{7}, no: \boxed{\$1,234.50}", "1234.5"),
        (r"\boxed{1{,}234 \text{ dollars}}", "1234"),
        (r"\boxed{3 \times 4 = 12 \text{ m}^2}", "12"),
        (r"\boxed{x = -5}, as 2 x 3 is 6", "-5"),
        (r"\boxed{\dfrac{84}{2}}", "42"),
        (r"\boxed{30^\circ}", "30"),
        (r"\boxed{\text{forty}}, of 50", None),
        ("She has 3 x 4 = 12 eggs.\n#### 12", "12"),
        ("#### 5\n#### 1,600 sticks", "1600"),
        ("The answer is $5 for 3 of them.", "5"),
        ("The answer is 4 + 5 = 9 points. I checked it 2 times.", "9"),
        ("**Final Answer:** **18**", "18"),
        ("The answer is 42. Say if this answer is helpful.", "42"),
        ("He needs 10-4 = 6 classes", "6"),
        ("A loss of -$20", "-20"),
        ("A loss of −20.", "-20"),
        ("It grows by 12.5%.", "12.5"),
        ("That leaves 3/4", "3/4"),
        ("The area is 12 cm^2", "12"),
        ("The area is 12 cm^{2}", "12"),
        ("as x_2 is 7 and so is x2", "7"),
        ("about 10^6", None),
        pytest.param("The answer is " + "3" * 5000, None, id="digits without end"),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_the_final_number_of_an_answer_is_found(text: str, number: str | None) -> None:
    assert find_final_number(text) == (None if number is None else Fraction(number))


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{:d}", "{:,}", "{:,}.00", "{:d}.", "{:,} apples", "{:d}%", "**{:d}**"]),
    st.sampled_from(
        [r"\boxed{{{}}}", r"\boxed{{\text{{about }} {}}}", "#### {}", "The answer is {}", "so {}"]
    ),
)
def test_a_number_is_found_however_it_is_written(number: int, form: str, said: str) -> None:
    assert find_final_number("Of 17, 3 are left.\n\n" + said.format(form.format(number))) == number


@given(st.text(alphabet=st.characters(exclude_categories=["Nd"], exclude_characters="\\")))
def test_text_without_digits_has_no_number(text: str) -> None:
    assert find_numbers(text) == []


BALANCED = st.recursive(
    st.text(alphabet="ab1 ,+\n", max_size=5),
    lambda inner: st.lists(inner.map(lambda text: f"\\frac{{{text}}}"), max_size=3).map("".join),
)


@given(BALANCED, BALANCED)
def test_the_last_box_is_found_whole(first: str, last: str) -> None:
    assert find_box(f"\\boxed{{{first}}} and \\boxed{{{last}}} or so }}{{") == last.strip()


def test_a_box_that_is_not_closed_is_ignored() -> None:
    assert find_box(r"\boxed{\frac{1}{2}") is None
    assert find_box(r"\boxed{1} and \boxed{\frac{1}{2}") == "1"
    assert find_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


def test_statements_end_with_their_sentence() -> None:
    text = "The answer is 3.5 or so. But no.\n\nAnswer:\n\\[ x \\]\n\nDone."
    assert find_statements(text) == ["\\[ x \\]", "3.5 or so"]


def test_text_before_the_end_of_thinking_is_removed() -> None:
    assert without_thoughts("<think>perhaps 3</think>It is 4") == "It is 4"
    assert without_thoughts("perhaps 3</think>It is 4") == "It is 4"
    assert without_thoughts("<think>perhaps 3") == ""
    assert without_thoughts("It is 4") == "It is 4"


# Forms that occur in MATH-500.
@pytest.mark.parametrize(
    ("known", "answer"),
    [
        (r"\frac{14}{3}", r"\boxed{\dfrac{14}{3}}"),
        (r"\frac{14}{3}", r"\boxed{14/3}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\pi/2)}"),
        ("p - q", r"\boxed{p-q}"),
        (r"\text{Evelyn}", r"\boxed{Evelyn}"),
        (r"\text{June 20}", r"\boxed{June 20}"),
        (r"\text{(C)}", r"\boxed{C}"),
        (r"11,\! 111,\! 111,\! 100", r"\boxed{11111111100}"),
        (r"90^\circ", r"\boxed{90}"),
        (r"5.4 \text{ cents}", r"\boxed{5.4}"),
        (r"\$36", r"\boxed{36}"),
        (r"864 \mbox{ inches}^2", r"\boxed{864}"),
        ("1,-2", r"\boxed{-2, 1}"),
        ("1,-2", r"\boxed{1} and \boxed{-2}"),
        (r"x \in [-2,7]", r"\boxed{[-2,7]}"),
        (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(-\infty,2)\cup(3,\infty)}"),
        (r"3\sqrt{13}", r"\boxed{\sqrt{117}}"),
        ("x^3+3x-6", r"\boxed{-6 + 3x + x^3}"),
        ("y = 2x + 3", r"\boxed{2x + 3}"),
        ("6 - 5i", r"\boxed{6-5i}"),
        (
            r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}",
            r"\boxed{\begin{pmatrix} \frac{1}{5} \\ -\frac{18}{5} \end{pmatrix}}",
        ),
        ("42", "The answer is 42."),
        (r"\frac{3}{4}", "The answer is\n\\[ \\frac{3}{4} \\]"),
        (r"\frac{3}{4}", "Final answer: $0.75$"),
    ],
)
def test_the_same_answer_written_differently_is_right(known: str, answer: str) -> None:
    assert mathematics.is_right(answer, known)


@pytest.mark.parametrize(
    ("known", "answer"),
    [
        ("p - q", r"\boxed{q - p}"),
        ("-3", r"\boxed{3}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("12,3", r"\boxed{123}"),
        ("12", r"\boxed{1 2}"),
        (r"\text{Evelyn}", r"Evelyn is fast, but \boxed{\text{Carla}}"),
        (r"\frac{14}{3}", r"\boxed{4.667}"),
        ("42", r"\boxed{}"),
        ("42", r"\boxed{42"),
        ("42", "It might be 42"),
        ("5", "The answer is unclear. There are 5 cases."),
        ("42", ""),
        pytest.param("42", f"\\boxed{{{'3' * 5000}}}", id="digits without end"),
    ],
)
def test_a_different_or_missing_answer_is_wrong(known: str, answer: str) -> None:
    assert not mathematics.is_right(answer, known)


def test_a_comparison_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "_TIMEOUT", 1)
    assert not mathematics.is_right(r"\boxed{9^{9^{9^{9}}}}", "1")


def test_answers_can_be_compared_in_other_threads() -> None:
    with ThreadPoolExecutor() as threads:
        assert threads.submit(mathematics.is_right, r"\boxed{\frac12}", "0.5").result()


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("Thus the answer is (B).", "B"),
        ("The answer is (A). No, wait: the answer is (C)", "C"),
        ("The correct answer is **D**", "D"),
        ("the answer is: option E, Paris", "E"),
        (r"The answer is $\boxed{\text{F}}$", "F"),
        (r"\boxed{(G) 12}", "G"),
        ("Answer: H. Paris", "H"),
        ("The answer is \\(I\\)", "I"),
        ("The answer is A because of that", "A"),
        ("The answer is a matter of taste", None),
        ("The answer is I think unclear", None),
        ("The answer is Boston", None),
        ("The answer is B-cells", None),
        ("I think so.", None),
        ("A is wrong, and so is B", None),
        ("不是 (A)。\n答案是 (C)", "C"),
        ("答案是（D）。", "D"),
        ("It is (A) or (B)", None),
        ("J", "J"),
        ("**C**", "C"),
        ("B. Paris", "B"),
        ("A. no\nB. no", None),
        ("The answer is (K)", None),
        ("", None),
    ],
)
def test_the_letter_that_an_answer_chooses_is_found(text: str, chosen: str | None) -> None:
    assert find_choice(text) == chosen
