"""The parts of scoring that need no engine: probabilities, questions, lines, ordered workers."""

import json
import math
import random
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.errors import RequestRefused
from flashmoa.scoring import PrefillUsage, Scores, contexts
from flashmoa.scoring.bulk import (
    BadLine,
    Line,
    make_record,
    read_batches,
    score_file,
    work_in_order,
)
from flashmoa.scoring.scores import probability_mass, softmax

LINES = 80_000
logprobs = st.lists(
    st.floats(max_value=0, min_value=-2000) | st.just(-math.inf), min_size=1, max_size=30
)


@given(logprobs)
def test_softmax_keeps_the_order(values: list[float]) -> None:
    found = softmax(values)
    assert len(found) == len(values)
    assert math.isclose(sum(found), 1, rel_tol=1e-9)
    assert all(0 <= one <= 1 for one in found)
    ordered = sorted(zip(values, found, strict=True))
    assert [share for _, share in ordered] == sorted(found)


@given(logprobs)
def test_probability_mass_scales_the_softmax(values: list[float]) -> None:
    total = probability_mass(values)
    assert total >= 0
    if total > 1e-300:
        expected = [math.exp(one) for one in values]
        assert [share * total for share in softmax(values)] == pytest.approx(expected, abs=1e-9)


@given(st.integers(min_value=1, max_value=26))
def test_every_option_has_its_own_letter(count: int) -> None:
    found = contexts.option_letters(count)
    assert len(set(found)) == count == len(found)
    question = contexts.choice_question([f"option {number}" for number in range(count)], "Which?")
    assert question.splitlines()[-2] == f"{found[-1]}. option {count - 1}"


@pytest.mark.parametrize("count", [0, 27])
def test_too_many_options_for_letters_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"not for {count}"):
        contexts.option_letters(count)


def test_a_question_continues_the_users_message() -> None:
    user, model = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    assert contexts.question_item("Text", "Which?") == "\n\nWhich?\nAnswer:"
    assert contexts.question_item([user], "Which?") == "\n\nWhich?"
    assert contexts.question_item([user, model], "Which?") == "Which?"
    assert contexts.question_item([{"role": "user", "content": None}], "Which?") == "Which?"


def test_contexts_are_text_tokens_or_messages() -> None:
    assert [contexts.context_kind(one) for one in ("x", [1], [{"role": "user"}])] == [
        "text",
        "tokens",
        "messages",
    ]
    for wrong in ([], [True], [1, "x"], [None]):
        with pytest.raises(ValueError, match="not empty"):
            contexts.context_kind(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [5, True, {"text": "x"}])
def test_content_that_is_no_text_or_parts_is_refused(content: object) -> None:
    said = [{"role": "assistant", "content": one} for one in (None, "x", [{"type": "text"}])]
    assert contexts.context_kind(said) == "messages"
    with pytest.raises(ValueError, match=r"message 3 has the content .* give a text"):
        contexts.question_item([*said, {"role": "user", "content": content}], "Which?")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "line: Input should be an object"),
        ("{", "line: Invalid JSON"),
        ('{"context": "x"}', "exactly one of candidates, labels, options; got none"),
        ('{"candidates": ["a"]}', "exactly one of context, messages"),
        ('{"context": "x", "messages": [], "labels": []}', r"got \['context', 'messages'\]"),
        ('{"context": "x", "candidates": [1]}', "candidates.0"),
        ('{"query": "x", "documents": []}', "query and documents go together"),
        ('{"documents": ["x"]}', "query and documents go together"),
        ('{"query": "x", "documents": ["y"], "options": ["z"]}', "without other fields"),
        ('{"context": "x", "candidates": ["a"], "multiple": true}', "goes with options"),
        ('{"context": "x", "labels": ["a"], "length_normalised": true}', "goes with candidates"),
        ('{"context": "x", "labels": ["a"], "label": 1}', "label: Extra inputs"),
        ('{"context": [-1, 5], "candidates": [" yes"]}', "greater than or equal to 0"),
        ('{"context": [4294967296], "candidates": [" yes"]}', "less than 2147483648"),
        ('{"context": "x", "candidates": [[5, -1], " yes"]}', "greater than or equal to 0"),
        ('{"context": "x", "labels": {"yes": [5, -1]}}', "greater than or equal to 0"),
    ],
)
def test_a_malformed_line_is_refused(line: str, problem: str) -> None:
    with pytest.raises(BadLine, match=problem):
        Line.read(line.encode())


def test_infinite_logprobs_are_valid_json() -> None:
    line = Line.read(b'{"id": 7, "context": "x", "candidates": ["a", "b"]}')
    scores = Scores.of(["a", "b"], [-0.1234567891, -math.inf], None, PrefillUsage())
    written = json.loads(json.dumps(make_record(3, line, scores), allow_nan=False))
    assert written["line"] == 3 and written["id"] == 7 and written["best"] == "a"
    assert written["logprobs"] == [-0.123457, None]
    assert written["probabilities"] == [1.0, 0.0]


async def test_results_are_written_in_order() -> None:
    dice = random.Random(3)
    running, most, written = 0, 0, list[int]()
    taken = 0

    async def batches() -> AsyncIterator[list[int]]:
        for start in range(0, 300, 7):
            yield list(range(start, min(300, start + 7)))

    async def work(item: int) -> int:
        nonlocal running, most, taken
        taken += 1
        assert taken - len(written) <= 16
        running += 1
        most = max(most, running)
        for _ in range(dice.randrange(20) if item % 50 else 60):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return item

    await work_in_order(batches(), work, written.extend, workers=8, ahead=16)
    assert written == list(range(300))
    assert most == 8


async def test_failing_work_stops_all_workers() -> None:
    written: list[int] = []

    async def batches() -> AsyncIterator[list[int]]:
        yield list(range(10))

    async def work(item: int) -> int:
        if item == 4:
            raise ConnectionError("gone")
        if item > 4:
            await anyio.sleep_forever()
        return item

    with pytest.raises(ConnectionError, match="gone"):
        await work_in_order(batches(), work, written.extend, workers=8, ahead=8)
    assert written == list(range(4))


async def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    source = tmp_path / "lines.jsonl"
    text = json.dumps({"context": "Is it good?" * 16, "candidates": [" yes", " no"]})
    source.write_text(f"{text}\n" * LINES)
    count = 0

    async def work(raw: object) -> int:
        return 1

    def write(results: Sequence[int]) -> None:
        nonlocal count
        count += len(results)
        # Memory that grows with the lines grows during their last quarter, too. Tracing all lines
        # would be slow.
        if count >= LINES * 3 / 4 and not tracemalloc.is_tracing():
            tracemalloc.start()

    try:
        await work_in_order(read_batches(source, 1000), work, write, workers=32, ahead=256)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == LINES - 1000
    assert source.stat().st_size > 15_000_000
    assert 0 < peak < 1_250_000


class Refusing:
    """A scorer whose engine refuses each request with this status."""

    concurrency = 1

    def __init__(self, status: int) -> None:
        self._status = status

    async def score(self, *_: object, **__: object) -> Scores:
        raise RequestRefused("no", self._status, "refused")


@pytest.mark.parametrize(("status", "skipped"), [(400, 1), (413, 1), (422, 1), (401, 0), (503, 0)])
async def test_only_a_refusal_that_blames_the_line_skips_it(
    tmp_path: Path, status: int, skipped: int
) -> None:
    source = tmp_path / "lines.jsonl"
    source.write_text('{"context": "One", "candidates": [" two"]}\n')
    scorer: Any = Refusing(status)
    work = partial(
        score_file, scorer, source, tmp_path / "out", errors=tmp_path / "no", progress=print
    )
    if skipped:
        assert (await work()).skipped == skipped
    else:
        with pytest.raises(RequestRefused):
            await work()
