"""Read IFBench (allenai/IFBench_test): {key, prompt, instruction_id_list, kwargs}.

The checkers of its authors' package decide whether an answer follows an instruction. An answer
counts if it follows all instructions of its prompt (prompt-level accuracy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoa_bench.datasets.answers import without_thoughts
from flashmoa_bench.datasets.files import Item, PublishedRow, import_package

_SOURCE = "git+https://github.com/allenai/IFBench"
# Importing the package downloads this data, if that is possible.
_DATA_COMMAND = "python -m nltk.downloader punkt punkt_tab stopwords averaged_perceptron_tagger_eng"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of a prompt's instructions; ``arguments`` are those of its checker."""

    id: str
    arguments: Mapping[str, Any]
    prompt: str
    checkers: Mapping[str, Any]

    def is_followed(self, *answers: str) -> bool:
        """Return whether any of these answers follows it; a blank answer does not."""
        checker = self.checkers[self.id](self.id)
        checker.build_description(**self.arguments)
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=self.prompt)
        return any(answer.strip() and checker.check_following(answer) for answer in answers)


def read(row: PublishedRow, *, loosely: bool = True) -> Item:
    """Read a row of IFBench.

    Args:
        loosely: whether it is scored loosely, as IFBench's paper does, or strictly.

    Raises: ValueError if an instruction is unknown or cannot be checked; ModuleNotFoundError if
        IFBench's package is missing.
    """
    instructions = _read_instructions(row)
    try:
        for instruction in instructions:
            instruction.is_followed("A first sentence. A second one.")
    except Exception as error:
        # NLTK raises a plain LookupError, with a message of thirty lines, if its data is missing.
        problem = (
            f"lack data: {_DATA_COMMAND}" if type(error) is LookupError else f"fail: {error!r}"
        )
        raise row.error(f"IFBench's checkers {problem}") from error

    def score(answer: str) -> float:
        answer = without_thoughts(answer)
        answers = vary(answer) if loosely else [answer]
        return float(all(_is_followed(instruction, answers) for instruction in instructions))

    count = len(instructions)
    group = f"{count} instruction{'s' if count != 1 else ''}"
    return Item(row.id, row.text("prompt"), group, score)


def vary(answer: str) -> list[str]:
    """Return the answer with and without its first line, its last line and its asterisks.

    This tolerates an introduction, a closing remark and Markdown (IFEval, arXiv 2311.07911, §2.2).
    """
    lines = answer.split("\n")
    parts = (lines, lines[1:], lines[:-1], lines[1:-1])
    whole, *trimmed = ["\n".join(part) for part in parts]
    texts = [whole, *(text.strip() for text in trimmed)]
    return texts + [text.replace("*", "") for text in texts]


def _is_followed(instruction: Instruction, answers: Sequence[str]) -> bool:
    try:
        return instruction.is_followed(*answers)
    except Exception:
        # Some checkers raise on odd answers, such as one without words.
        return False


def _read_instructions(row: PublishedRow) -> list[Instruction]:
    registry = import_package("ifbench.instructions_registry", "IFBench", _SOURCE)
    checkers: Mapping[str, Any] = registry.INSTRUCTION_DICT
    ids, arguments = row.value("instruction_id_list"), row.value("kwargs")
    if not ids or len(ids) != len(arguments):
        raise row.error(f"{len(ids)} instructions, but arguments for {len(arguments)}")
    if unknown := [id for id in ids if id not in checkers]:
        raise row.error(f"IFBench's package has no instruction {', '.join(unknown)}; update it")
    return [
        Instruction(
            id, {k: v for k, v in values.items() if v is not None}, row.text("prompt"), checkers
        )
        for id, values in zip(ids, arguments, strict=True)
    ]
