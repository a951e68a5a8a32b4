"""GSM8K (openai/gsm8k): {question, answer}; an answer ends with "#### 42"."""

from __future__ import annotations

from flashmoa_bench.datasets.answers import final_number, numbers, without_thoughts
from flashmoa_bench.datasets.files import Row
from flashmoa_bench.datasets.items import Item

_FORM = "Think step by step, and put the final answer, a number, in \\boxed{}."


def read(row: Row) -> Item:
    """Raises: ValueError."""
    _, marked, after = row.text("answer").rpartition("####")
    if not marked or len(known := numbers(after)) != 1:
        raise row.wrong("field 'answer' does not end with #### and a number")

    def score(answer: str) -> float:
        return float(final_number(without_thoughts(answer)) == known[0])

    return Item(row.id, f"{row.text('question')}\n\n{_FORM}", "all", score)
