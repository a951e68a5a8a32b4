"""``SplitPattern``: where the matches of a tokenizer's regular expression can begin and end.

An engine looks for a match from left to right, and of several alternatives it takes the first that
leads to one. The expression is read into a small program that keeps this order. All states that the
program can reach in any text are listed once, so that a question about two neighbouring characters
has an exact answer: can a match contain both, and can the second one change a match before it?

Only the classes of the expression tell characters apart. The engine itself says which class has
which character.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
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

# Compiles an expression for one character, and returns what tells which characters of a text match.
Engine = Callable[[str], Callable[[str], Any]]

# Larger expressions are refused.
_MAX_STATES, _MAX_OPEN_LOOKS = 4000, 4


class Meeting(NamedTuple):
    """What an expression's matches do where two characters meet.

    Attributes:
        are_apart: whether no match contains both, and matches before the second character are the
            same as if the text ended there.
        left: whether the first character is in a match in any text; ``None``: in some.
        right: the same of the second one.
    """

    are_apart: bool
    left: bool | None
    right: bool | None


class SplitPattern:
    """An expression, and where its matches can begin and end.

    Args:
        text: the expression.
        engine: compiles expressions like the tokenizer does.
        interval_may_be_possessive: whether ``{1,3}+`` is possessive to the engine.

    Attributes:
        looks_back: whether a match may depend on the character before it.

    Raises: NotUnderstood
    """

    unknown = Meeting(False, None, None)

    def __init__(self, text: str, engine: Engine, interval_may_be_possessive: bool = False) -> None:
        reader = Reader(text, interval_may_be_possessive)
        node = reader.read()
        self.looks_back = reader.looks_back
        self._program = _Program(node)
        self._classes = [engine(each) for each in reader.classes]
        usual = _characters(text)
        self._masks: Any = numpy.unique(self._masks_of(usual))
        if len(self._masks) >= _UNKNOWN:
            raise NotUnderstood("the expression has too many classes")
        # The number of each character's mask, counted from 1; 0: not looked up yet.
        self._numbers = bytearray(sys.maxunicode + 1)
        self._look_up(usual)
        if _MATCH in self._program.threads((0,), [True] * len(self._program.looks)):
            raise NotUnderstood(f"the expression {text!r} matches an empty text")
        self._after = self._explore()
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self.is_one_character = isinstance(node, Character)

    def meeting(self, left: str, right: str) -> Meeting:
        """Return what matches do between two characters."""
        numbers = self._mask(left), self._mask(right)
        if _UNKNOWN in numbers:
            return self.unknown
        if numbers not in self._meetings:
            self._meetings[numbers] = self._meet(*(int(self._masks[one - 1]) for one in numbers))
        return self._meetings[numbers]

    def may_contain(self, character: str) -> bool:
        """Return whether a match may contain a character."""
        number = self._mask(character)
        return number == _UNKNOWN or bool(self._masks[number - 1])

    def _mask(self, character: str) -> int:
        """Return the number of the set of classes that have a character."""
        code = ord(character)
        if not self._numbers[code]:
            start = code & ~0xFF
            block = range(start, start + 0x100)
            self._look_up("".join(chr(each) for each in block if not 0xD800 <= each < 0xE000))
        return self._numbers[code] or _UNKNOWN

    def _look_up(self, characters: str) -> None:
        """Note the number of each character's mask."""
        masks = self._masks_of(characters)
        found = numpy.minimum(numpy.searchsorted(self._masks, masks), len(self._masks) - 1)
        numbers: Any = numpy.where(self._masks[found] == masks, found + 1, _UNKNOWN)
        codes = numpy.frombuffer(characters.encode("utf-32-le"), numpy.uint32)
        numpy.frombuffer(self._numbers, numpy.uint8)[codes] = numbers
        self._numbers[0] = _UNKNOWN  # Engines mark matches with this character.

    def _masks_of(self, characters: str) -> Any:
        """Return the classes of each character, as bits."""
        masks: Any = numpy.zeros(len(characters), numpy.int64)
        for number, matches in enumerate(self._classes):
            masks |= matches(characters).astype(numpy.int64) << number
        return masks

    def _explore(self) -> dict[int, set[_State]]:
        """Return the states that a program can have after a character, by the character's mask."""
        after: dict[int, set[_State]] = defaultdict(set)
        start: _State = (0,)
        seen: set[_State] = {start}
        new: list[_State] = [start]
        while new:
            state = new.pop()
            for mask in map(int, self._masks):
                for following in self._steps(state, mask):
                    after[mask].add(following)
                    if following not in seen:
                        seen.add(following)
                        new.append(following)
            if len(seen) > _MAX_STATES:
                raise NotUnderstood("the expression is too large")
        return after

    def _steps(self, state: _State, mask: int) -> Iterator[_State]:
        """Yield the states that may follow a state on a character."""
        program = self._program
        for truths in _choices([look.truth(mask) for look in program.looks]):
            threads = program.threads(state, truths)
            following = tuple(pc + 1 for pc in threads if program.takes(pc, mask))
            if following:
                yield following

    def _meet(self, left: int, right: int) -> Meeting:
        program = self._program
        are_apart = program.looks_are_settled(left, right) and all(
            program.is_settled(state, left, right) for state in self._after[left]
        )
        return Meeting(are_apart, self._is_matched(left, [right]), self._is_matched(right))

    def _is_matched(self, mask: int, following: Sequence[int | None] = ()) -> bool | None:
        """Return whether a character by itself is a match, whatever of ``following`` follows."""
        if not mask:
            return False
        program = self._program
        for choice in _choices([look.truth(mask) for look in program.looks]):
            threads = program.threads((0,), choice)
            state = tuple(pc + 1 for pc in threads if program.takes(pc, mask))
            for after in following or [*map(int, self._masks), None]:
                for truths in _choices([look.truth(after) for look in program.looks]):
                    if _MATCH not in program.threads(state, truths):
                        return None
        return True


_State = tuple[int, ...]
# Stands for a match among the instructions.
_MATCH = -1
# Stands for the number of a set of classes that no usual character has.
_UNKNOWN = 255


class _Program:
    """An expression as instructions, each a kind with its argument.

    Attributes:
        looks: the conditions among them.
    """

    def __init__(self, node: Node) -> None:
        self.looks: list[_Condition] = []
        self._code: list[tuple[str, Any]] = []
        self._emit(node)
        self._code.append(("match", None))
        if sum(look.is_open for look in self.looks) > _MAX_OPEN_LOOKS:
            raise NotUnderstood("the expression has too many conditions")

    def _emit(self, node: Node) -> None:
        code = self._code
        match node:
            case Character(number):
                code.append(("character", number))
            case Chain(nodes):
                for each in nodes:
                    self._emit(each)
            case Alternatives(nodes):
                self._emit_alternatives(nodes)
            case Repetition(each, least, most, is_lazy):
                for _ in range(least):
                    self._emit(each)
                start = len(code)
                for _ in range(1 if most is None else most - least):
                    self._emit_option(each, is_lazy, None if most is not None else start)
            case Look():
                code.append(("look", len(self.looks)))
                self.looks.append(_Condition(node))

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

    def _emit_option(self, node: Node, is_lazy: bool, again: int | None) -> None:
        """Emit a part that may be left out, and repeated from ``again`` on."""
        code, split = self._code, len(self._code)
        code.append(("split", ()))
        self._emit(node)
        if again is not None:
            code.append(("split", (again,)))
        ways = (split + 1, len(code))
        code[split] = ("split", ways[::-1] if is_lazy else ways)

    def takes(self, pc: int, mask: int) -> bool:
        """Return whether an instruction takes a character."""
        kind, number = self._code[max(pc, 0)]
        return pc >= 0 and kind == "character" and bool(mask >> number & 1)

    def threads(self, state: _State, truths: Sequence[bool]) -> Iterator[int]:
        """Yield the instructions that wait for a character, in the engine's order.

        They end at a match, which excludes later ones.
        """
        seen, stack = set[int](), [*reversed(state)]
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
                yield _MATCH
                return
            else:
                yield pc

    def is_settled(self, state: _State, left: int, right: int) -> bool:
        """Return whether a match that reaches between two characters ends there at the latest.

        Its end is then the same as if the text ended between the two.
        """
        for choice in itertools.product(*(look.truths_between(left, right) for look in self.looks)):
            at_end = self.threads(state, [truth for truth, _ in choice])
            threads = [*self.threads(state, [truth for _, truth in choice])]
            if (_MATCH in at_end) != (_MATCH in threads):
                return False
            if any(self.takes(pc, right) for pc in threads):
                return False
        return True

    def looks_are_settled(self, left: int, right: int) -> bool:
        """Return whether conditions before the two characters hold or not as if the text ended."""
        bodies = [look.body for look in self.looks if look.body is not None]
        return all(
            body.looks_are_settled(left, right)
            and all(
                body.is_settled((pc + 1,), left, right)
                for pc in range(len(body._code))
                if body.takes(pc, left)
            )
            for body in bodies
        )


class _Condition:
    """A condition at a place of a program.

    Attributes:
        body: the program for the text that must follow, if that is longer than a character.
        is_open: whether the condition depends on more than the next character.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        is_long = look.kind == "ahead" and not isinstance(look.node, Character)
        self.body = _Program(look.node) if is_long and look.node is not None else None
        self.is_open = is_long or look.kind in ("back", "edge", "line")

    def truth(self, following: int | None) -> bool | None:
        """Return whether it holds before a character, or at the end; ``None``: in some texts."""
        look = self._look
        if look.kind == "end":
            return following is None
        if look.kind == "line":
            return None if following is not None else True
        if look.kind != "ahead" or not isinstance(look.node, Character):
            return None
        has = following is not None and bool(following >> look.node.number & 1)
        return has != look.is_negated

    def truths_between(self, left: int, right: int) -> list[tuple[bool, bool]]:
        """Return whether it may hold between two characters: if the text ends there, and if not."""
        is_same = self._look.kind == "back" or (
            not right >> self._look.node.number & 1
            if isinstance(self._look.node, Character)
            else self.body is not None and self.body.is_settled((0,), left, right)
        )
        ends, goes_on = (
            [truth] if truth is not None else [True, False]
            for truth in (self.truth(None), self.truth(right))
        )
        pairs = itertools.product(ends, goes_on)
        return [(one, other) for one, other in pairs if one == other or not is_same]


def _choices(truths: Sequence[bool | None]) -> Iterator[tuple[bool, ...]]:
    """Yield the values, with each combination of values in place of ``None``."""
    return itertools.product(*([True, False] if each is None else [each] for each in truths))


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
    near = {ord(each) + step for each in expression for step in (-1, 0, 1)}
    near |= {
        int(code, 16) + step
        for code in re.findall(r"\\(?:x|u)([0-9a-fA-F]{2,4})", expression)
        for step in (-1, 0, 1)
    }
    valid = (code for code in near if 0 < code < 0x110000 and not 0xD800 <= code < 0xE000)
    return _usual_characters() + "".join(map(chr, valid))
