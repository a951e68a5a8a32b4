"""``SplitPattern``: where the matches of a tokenizer's regular expression can begin and end.

An engine looks for a match from left to right. If several alternatives lead to a match, the first
wins. The expression is read into a small program that keeps this order. All states that the program
can reach in any text are listed once. So a question about two neighbouring characters has an exact
answer: can a match contain both, and can the second one change a match before it?

Only the classes of the expression tell characters apart. The engine itself says which characters
each class has.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy

from flashmoa_sglang.http.tokens.expressions import (
    Alternatives,
    Chain,
    Character,
    Look,
    Node,
    NotUnderstood,
    Reader,
    Repetition,
)

# Compiles the expression of a class. The result tells which characters of a text the class has.
Engine = Callable[[str], Callable[[str], Any]]
# A set of classes: bit N stands for ``Reader.classes[N]``.
Mask = int
# The instructions that a program may go on with, in the engine's order.
_State = tuple[int, ...]

# Most instructions of a program, and most states.
_MAX_PROGRAM_SIZE = 4000


class Meeting(NamedTuple):
    """What an expression's matches do where two characters meet.

    Attributes:
        are_apart: whether no match contains both characters, and the matches before the second
            character are the same as if the text ended there.
        are_matched: whether a match contains one of the characters in any text.
    """

    are_apart: bool
    are_matched: bool


class SplitPattern:
    """An expression, and where its matches can begin and end.

    Args:
        text: the expression.
        engine: compiles the expressions of classes as the tokenizer does.

    Raises: NotUnderstood
    """

    def __init__(self, text: str, engine: Engine) -> None:
        reader = Reader(text)
        node = reader.read()
        self.is_one_character = isinstance(node, Character)
        self._program = _Program(node)
        if len(reader.classes) > 62:
            raise NotUnderstood("the expression has too many classes for the bits of an integer")
        self._classes = [engine(each) for each in reader.classes]
        # The masks that characters are known to have.
        self.masks: frozenset[Mask] = frozenset(self.masks_of(_characters(text)))
        if self._program.threads((0,), [True] * len(self._program.looks))[1]:
            raise NotUnderstood(f"the expression {text!r} matches an empty text")
        self._after = self._explore()
        self._mask = lru_cache(maxsize=1 << 16)(self._find_mask)
        self._meet = cache(self._find_meeting)

    def meeting(self, left: str, right: str) -> Meeting:
        """Return what matches do between two characters."""
        left_mask, right_mask = self._mask(left), self._mask(right)
        if left_mask is None or right_mask is None:
            return Meeting(False, False)
        return self._meet(left_mask, right_mask)

    def masks_of(self, characters: str) -> set[Mask]:
        """Return the different masks of some characters."""
        masks: Any = numpy.zeros(len(characters), numpy.int64)
        for number, matches in enumerate(self._classes):
            masks |= matches(characters).astype(numpy.int64) << number
        return set(map(int, numpy.unique(masks)))

    def _find_mask(self, character: str) -> Mask | None:
        """Return a character's mask; ``None`` if no usual character has it."""
        if character == "\0":
            return None  # Engines mark matches with this character.
        (mask,) = self.masks_of(character)
        return mask if mask in self.masks else None

    def _explore(self) -> dict[Mask, set[_State]]:
        """Return the states that the program can have after a character, by the mask."""
        after: dict[Mask, set[_State]] = defaultdict(set)
        start: _State = (0,)
        seen: set[_State] = {start}
        new: list[_State] = [start]
        while new:
            state = new.pop()
            for mask in self.masks:
                for following in self._program.steps(state, mask):
                    after[mask].add(following)
                    if following not in seen:
                        seen.add(following)
                        new.append(following)
            if len(seen) > _MAX_PROGRAM_SIZE:
                raise NotUnderstood("the expression is too large")
        return after

    def _find_meeting(self, left: Mask, right: Mask) -> Meeting:
        program = self._program
        are_apart = not program.read_ahead & left and all(
            program.is_settled(state, right) for state in self._after[left]
        )
        are_matched = self._is_match(left, [right]) or self._is_match(right, [*self.masks, None])
        return Meeting(are_apart, are_matched)

    def _is_match(self, mask: Mask, following: Sequence[Mask | None]) -> bool:
        """Return whether one character is a match, whatever of ``following`` comes next."""
        program = self._program
        return bool(mask) and all(
            program.threads(state, truths)[1]
            for state in program.steps((0,), mask, may_end=True)
            for after in following
            for truths in program.truths(after)
        )


class _Program:
    """An expression as instructions, each a kind with its argument.

    Attributes:
        looks: the conditions among the instructions.
        read_ahead: the classes of characters that decide about a condition further to the left.
    """

    def __init__(self, node: Node) -> None:
        self.looks: list[Look] = []
        self._code: list[tuple[str, Any]] = []
        self._emit(node)
        self._code.append(("match", None))
        long = [look for look in self.looks if not isinstance(look.node, Character)]
        if len(long) > 4:
            raise NotUnderstood("the expression has too many conditions")
        self.read_ahead = reduce(or_, map(_classes_in, long), 0)

    def _emit(self, node: Node) -> None:
        code = self._code
        if len(code) > _MAX_PROGRAM_SIZE:
            raise NotUnderstood("the expression is too large")
        match node:
            case Character(number):
                code.append(("character", number))
            case Chain(nodes):
                for each in nodes:
                    self._emit(each)
            case Alternatives(nodes):
                self._emit_alternatives(nodes)
            case Repetition(each, least, most):
                for _ in range(least):
                    self._emit(each)
                start = len(code)
                for _ in range(1 if most is None else most - least):
                    self._emit_option(each, None if most is not None else start)
            case Look():
                code.append(("look", len(self.looks)))
                self.looks.append(node)

    def _emit_alternatives(self, nodes: Sequence[Node]) -> None:
        code, jumps = self._code, list[int]()
        for each in nodes[:-1]:
            split = len(code)
            code.append(("split", ()))
            self._emit(each)
            jumps.append(len(code))
            code.append(("split", ()))
            code[split] = ("split", (split + 1, len(code)))
        self._emit(nodes[-1])
        for jump in jumps:
            code[jump] = ("split", (len(code),))

    def _emit_option(self, node: Node, again: int | None) -> None:
        """Emit a part that may be left out, and repeated from ``again`` on."""
        code, split = self._code, len(self._code)
        code.append(("split", ()))
        self._emit(node)
        if again is not None:
            code.append(("split", (again,)))
        code[split] = ("split", (split + 1, len(code)))

    def truths(self, following: Mask | None) -> Iterator[tuple[bool, ...]]:
        """Yield which conditions may hold together before a character, or before the text's end."""
        return itertools.product(*(_truths(look, following) for look in self.looks))

    def steps(self, state: _State, mask: Mask, *, may_end: bool = False) -> Iterator[_State]:
        """Yield the states that may follow a state on a character.

        Args: may_end: whether to yield the state without an instruction, too.
        """
        for truths in self.truths(mask):
            waiting, _ = self.threads(state, truths)
            following = tuple(pc + 1 for pc in waiting if self._takes(pc, mask))
            if following or may_end:
                yield following

    def threads(self, state: _State, truths: Sequence[bool]) -> tuple[list[int], bool]:
        """Return the instructions that wait for a character, in the engine's order.

        Return also whether there is a match, which excludes later instructions.
        """
        waiting, seen, stack = list[int](), set[int](), [*reversed(state)]
        while stack:
            pc = stack.pop()
            if pc in seen:
                continue
            seen.add(pc)
            kind, value = self._code[pc]
            if kind == "split":
                stack.extend(reversed(value))
            elif kind == "look":
                if truths[value]:
                    stack.append(pc + 1)
            elif kind == "match":
                return waiting, True
            else:
                waiting.append(pc)
        return waiting, False

    def is_settled(self, state: _State, right: Mask) -> bool:
        """Return whether a match that has come to a character ends before it at the latest.

        The match then ends where it would end if the text ended before the character.
        """
        for at_end, before_right in itertools.product(self.truths(None), self.truths(right)):
            waiting, matches = self.threads(state, before_right)
            if self.threads(state, at_end)[1] != matches:
                return False
            if any(self._takes(pc, right) for pc in waiting):
                return False
        return True

    def _takes(self, pc: int, mask: Mask) -> bool:
        return bool(mask >> self._code[pc][1] & 1)


def _truths(look: Look, following: Mask | None) -> Sequence[bool]:
    """Return the values that a condition may have before a character, or before the text's end."""
    if isinstance(look.node, Character):
        has = following is not None and bool(following >> look.node.number & 1)
        return [has != look.is_negated]
    return [True] if look.node is None and following is None else [True, False]


def _classes_in(node: Node | None) -> Mask:
    match node:
        case Character(number):
            return 1 << number
        case Chain(nodes) | Alternatives(nodes):
            return reduce(or_, map(_classes_in, nodes), 0)
        case Repetition(inner) | Look(inner):
            return _classes_in(inner)
        case None:
            return 0


@cache
def _usual_characters() -> str:
    """Return characters with all combinations of properties that characters have."""
    # The other blocks have only ideographs, syllables, and characters without meaning.
    blocks = [(1, 0x3400), (0xA000, 0xAC00), (0xD7A4, 0xD800), (0xF900, 0x20000)]
    whole = itertools.chain.from_iterable(itertools.starmap(range, blocks))
    samples = (code for code in range(0x3400, 0x110000, 0x100) if not 0xD800 <= code < 0xE000)
    return "".join(map(chr, [*whole, *samples]))


def _characters(expression: str) -> str:
    """Return characters with all combinations of the classes of an expression."""
    codes = [*map(ord, expression)]
    codes += [int(code, 16) for code in re.findall(r"\\(?:x|u)([0-9a-fA-F]{2,4})", expression)]
    near = {code + step for code in codes for step in (-1, 0, 1)}
    valid = (code for code in near if 0 < code < 0x110000 and not 0xD800 <= code < 0xE000)
    return _usual_characters() + "".join(map(chr, valid))
