"""The agent prompt cache: what each agent of a workflow has written so far."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Sequence
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary

from flashmoa.errors import FlashMoAError
from flashmoa.linking.streamed_text import Text


class AgentFailed(FlashMoAError):
    """Raised when an answer that others wait for will not be completed."""


class Name(NamedTuple):
    """Whose answer: agents are told apart by workflow, and workflows by their clients' keys."""

    client: str
    workflow: str
    agent: str


class AgentAnswer(Text):
    """One agent's answer.

    Attributes:
        tokens: of the answer; ``None`` where its engine does not tell them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tokens: list[int] | None = []

    def add(self, text: str, tokens: Sequence[int] | None) -> None:
        """The next piece. ``tokens``: all of its tokens, or none of this answer are known."""
        if tokens is None:
            self.tokens = None
        elif self.tokens is not None and not self.is_over:
            self.tokens.extend(tokens)
        self.write(text)

    def token_ids(self) -> list[int]:
        """Its tokens so far. Raises: AgentFailed if they are not known."""
        if self.tokens is None:
            raise AgentFailed(f"{self.name} was not asked by /generate: its tokens are not known")
        return self.tokens

    async def token_pieces(self) -> AsyncGenerator[list[int]]:
        """Its tokens from the first one on, as they come.

        Raises: what it failed with; AgentFailed if they are not known.
        """
        given = 0
        while given < len(self.token_ids()) or not self.is_over:
            if new := self.token_ids()[given:]:
                given += len(new)
                yield new
            else:
                await self._changed.wait()
        await self.complete()


class AgentPromptCache:
    """Answers by name.

    Args:
        most: answers that are kept once they are over; the least recently used ones are forgotten
            beyond it. One that nobody has begun to write is there while somebody waits for it.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._begun: OrderedDict[Name, AgentAnswer] = OrderedDict()
        self._awaited: WeakValueDictionary[Name, AgentAnswer] = WeakValueDictionary()
        # What the request that writes an answer waits for.
        self._reads: dict[Name, frozenset[Name]] = {}

    def __len__(self) -> int:
        """Those that somebody has begun to write."""
        return len(self._begun)

    def read(self, name: Name) -> AgentAnswer:
        """An agent's answer, its last one, or the one to come; for as long as it is held."""
        if name in self._begun:
            self._begun.move_to_end(name)
            return self._begun[name]
        return self._awaited.setdefault(name, AgentAnswer(name.agent))

    def begin(self, name: Name, reads: Collection[Name]) -> AgentAnswer:
        """The answer that a request will write.

        An agent that is asked again writes another one; who reads the one before goes on with it.
        Raises: ValueError if agents wait for each other.
        """
        if self._leads(reads, name):
            raise ValueError(f"{name.agent} would wait for what waits for {name.agent}")
        answer = self._awaited.pop(name, None) or AgentAnswer(name.agent)
        self._begun[name] = answer
        self._begun.move_to_end(name)
        self._reads[name] = frozenset(reads)
        self._forget()
        return answer

    def _forget(self) -> None:
        over = (name for name, answer in self._begun.items() if answer.is_over)
        for name in list(islice(over, max(0, len(self._begun) - self._most))):
            del self._begun[name], self._reads[name]

    def _leads(self, reads: Collection[Name], target: Name) -> bool:
        """Whether something that is read waits, in the end, for ``target``."""
        seen, left = set[Name](), list(reads)
        while left:
            name = left.pop()
            answer = self._begun.get(name)
            if name == target and (answer is None or not answer.is_over):
                return True
            if name not in seen and answer is not None and not answer.is_over:
                seen.add(name)
                left += self._reads[name]
        return False
