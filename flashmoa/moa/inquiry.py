"""Count what the agents of one question cost (``Inquiry``), and hold its budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashmoa import FlashMoAError, Workflow
from flashmoa.engine import PromptUsage
from flashmoa.moa.results import Spending
from flashmoa.moa.settings import Budget, Limits
from flashmoa.observe import Listener

if TYPE_CHECKING:
    from flashmoa.moa.calls import AgentCall


class BudgetSpent(FlashMoAError):
    """Raised when an agent is not asked because the question's budget is spent."""


@dataclass(slots=True)
class Inquiry:
    """What all agents of one question share.

    Attributes:
        limits: the limits of models that have none of their own.
        calls: every agent's calls so far.
    """

    flow: Workflow
    listener: Listener
    limits: Limits = field(default_factory=Limits)
    budget: Budget | None = None
    calls: list[AgentCall] = field(default_factory=list["AgentCall"])

    def spending(self) -> Spending:
        """Return what the question has cost so far."""
        spent = PromptUsage.total([call.spent() for call in self.calls])
        total, left = spent.prompt_tokens + spent.completion_tokens, None
        if self.budget is not None:
            left = max(0, self.budget.tokens - total)
        return Spending(spent.prompt_tokens, spent.completion_tokens, left)

    def check_budget(self, *, is_last: bool) -> None:
        """Check that a further agent may be asked.

        Args:
            is_last: whether it writes the question's answer, for which tokens are reserved.

        Raises: BudgetSpent if it may not.
        """
        if self.budget is None:
            return
        spending, reserve = self.spending(), 0 if is_last else self.budget.reserve
        if spending.tokens_left is not None and spending.tokens_left <= reserve:
            raise BudgetSpent(
                f"the budget of {self.budget.tokens} tokens is spent: {spending.tokens} are used"
                + (f", and {reserve} are kept for the last answer" if reserve else "")
            )
