"""Define the stages in which the family's models learn."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoa_bench.family.questions import MODULUS, Grade
from flashmoa_bench.family.training_data import Example, examples

_WARM_UP = 30


@dataclass(frozen=True, slots=True)
class Stage:
    """Defines how long, how fast and from which examples a model learns; lengths are in steps.

    Attributes:
        size: size of the model, a key of ``SHAPES``.
        batch: number of examples of a step.
        rate: learning rate; it falls to 0 over the last ``decay`` steps.
        easy: number of steps with easy questions only.
        narrow, wide: operands have one digit before step ``narrow``; then they grow until step
            ``wide``. A model that sees all operands from the start learns nothing for a long time.
        combining: share of the examples that are an aggregator's.
        starts_from: name and step of the stage whose network this one starts with.
        first_example: number of its first example. Stages that build on each other get different
            examples.
        blind: share of the aggregator's examples whose question has no lines, so that it learns to
            look for agreement.
    """

    size: str
    steps: int
    batch: int
    rate: float
    decay: int
    easy: int = 0
    narrow: int = 0
    wide: int = 0
    combining: float = 0.65
    starts_from: tuple[str, int] | None = None
    first_example: int = 0
    blind: float = 0.0

    def rate_at(self, step: int) -> float:
        left = (self.steps - step) / self.decay
        return self.rate * min(1, (step + 1) / _WARM_UP, left)

    def examples_at(self, seed: int, step: int) -> list[Example]:
        grade: Grade | None = "easy" if step < self.easy else None
        number = seed * 1_000_003 + self.first_example + step
        largest = self.largest_at(step)
        return examples(number, self.batch, self.combining, grade, largest, self.blind)

    def largest_at(self, step: int) -> int:
        """Return the largest operand at a step."""
        if step >= self.wide:
            return MODULUS - 1
        return 9 + max(0, (MODULUS - 10) * (step - self.narrow) // (self.wide - self.narrow))


# The stages in their order. All sizes start with the lines that the smallest model has learned,
# because it learns them at the least cost.
STAGES = {
    "lines": Stage(
        "small",
        steps=1560,
        batch=64,
        rate=4e-3,
        decay=200,
        easy=200,
        narrow=650,
        wide=1000,
        combining=0,
    ),
    "small": Stage(
        "small",
        steps=40,
        batch=64,
        rate=3e-3,
        decay=20,
        combining=0,
        starts_from=("lines", 1100),
        first_example=10_000,
    ),
    "medium": Stage(
        "medium",
        steps=120,
        batch=64,
        rate=2e-3,
        decay=80,
        combining=0,
        starts_from=("lines", 1100),
        first_example=20_000,
    ),
    "large": Stage(
        "large",
        steps=1130,
        batch=32,
        rate=1e-3,
        decay=300,
        blind=0.15,
        starts_from=("lines", 1560),
        first_example=30_000,
    ),
}
