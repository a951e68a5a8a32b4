"""Reads the regular expressions of tokenizers, which Oniguruma and Rust's engines compile.

An expression is refused if it has a part that is not listed here, or on which the engines differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_INTERVAL = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_CLASS_ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w+\}|[sSdDwW]|x[0-7][0-9a-fA-F]|u[0-9a-fA-F]{4}|[rnt])")
# Engines take these pairs of letters for one character, as "ﬁ", where case does not matter.
_LIGATURES = re.compile("ss|ff|fi|fl|st", re.IGNORECASE)
_SPECIAL = frozenset("\\.+*?()|[]{}^$")
_MAX_REPETITIONS, _MAX_CLASSES = 32, 60


class NotUnderstood(ValueError):
    """Raised for a part of a tokenizer that may split text anywhere."""


def escaped(character: str) -> str:
    """Return the expression of a character."""
    return f"\\{character}" if character in _SPECIAL else character


@dataclass(frozen=True, slots=True)
class Character:
    """One character of a class, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Chain:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    node: Node
    least: int
    most: int | None
    is_lazy: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """A condition at a place.

    ``back`` looks at the character before the place, and ``ahead`` at the text after it. ``edge``
    looks at both sides; ``node``, if there is one, is a character of a word then. ``line`` and
    ``end`` hold at the ends of a line and of the text.
    """

    kind: Literal["back", "ahead", "edge", "line", "end"]
    node: Node | None = None
    is_negated: bool = False


Node = Character | Chain | Alternatives | Repetition | Look


class Reader:
    """Reads an expression.

    Attributes:
        classes: the expression of each class of characters.
        looks_back: whether a condition looks at the character before a place.

    Raises: NotUnderstood
    """

    def __init__(self, text: str, interval_may_be_possessive: bool) -> None:
        self._text, self._at = text, 0
        self._interval_may_be_possessive = interval_may_be_possessive
        self._ignores_case = False
        self.classes: list[str] = []
        self.looks_back = False

    def read(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text) or len(self.classes) > _MAX_CLASSES:
            raise self._error()
        return node

    def _error(self) -> NotUnderstood:
        return NotUnderstood(f"the expression {self._text!r} is not understood at {self._at}")

    def _take(self, *beginnings: str) -> str | None:
        """Return the first of some texts that comes next, and go past it."""
        for each in beginnings:
            if self._text.startswith(each, self._at):
                self._at += len(each)
                return each
        return None

    def _alternatives(self) -> Node:
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return Alternatives(tuple(nodes)) if len(nodes) > 1 else nodes[0]

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            nodes.append(self._repeated(self._one()))
        return nodes[0] if len(nodes) == 1 else Chain(tuple(nodes))

    def _repeated(self, node: Node) -> Node:
        modes = ("?", "+")
        if (sign := self._take("*", "+", "?")) is not None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif (interval := _INTERVAL.match(self._text, self._at)) is not None:
            self._at = interval.end()
            least = int(interval[1])
            most = (int(interval[3]) if interval[3] else None) if interval[2] else least
            modes = ("+",) if self._interval_may_be_possessive else ()
        else:
            return node
        mode = self._take(*modes)
        if (
            self._take("*", "+", "?", "{")
            or isinstance(node, Look)
            or max(least, most or 0) > _MAX_REPETITIONS
            or (most is not None and most < least)
        ):
            raise self._error()
        if mode == "+":
            return self._possessive(node, least, most)
        return Repetition(node, least, most, mode == "?")

    def _possessive(self, node: Node, least: int, most: int | None) -> Node:
        """Return a repetition that ends only where no further character of the class follows."""
        if not isinstance(node, Character):
            raise self._error()
        end = Look("ahead", node, is_negated=True)
        if most is None:
            return Chain((Repetition(node, least, None), end))
        rest: Node = Chain(())
        for _ in range(most - least):
            rest = Alternatives((Chain((node, rest)), end))
        return Chain((Repetition(node, least, least), rest))

    def _one(self) -> Node:
        if (group := self._take("(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(")) is not None:
            return self._group(group)
        if self._text[self._at] == "[":
            return self._class()
        if self._text[self._at] == "\\":
            return self._escape()
        sign = self._text[self._at]
        if sign in "*+?{":
            raise self._error()
        self._at += 1
        if sign == "^":
            self.looks_back = True
            return Look("edge")  # To Oniguruma, no line begins where the text ends.
        if sign == "$":
            return Look("line")
        return self._character("." if sign == "." else None, sign)

    def _group(self, beginning: str) -> Node:
        if beginning == "(" and self._text.startswith("?", self._at):
            raise self._error()
        before, start = self._ignores_case, self._at
        self._ignores_case = before or beginning == "(?i:"
        node = self._alternatives()
        inside = self._text[start : self._at]
        if not self._take(")"):
            raise self._error()
        if self._ignores_case and (not inside.isascii() or _LIGATURES.search(inside)):
            raise self._error()
        self._ignores_case = before
        if "<" in beginning:
            ways = node.nodes if isinstance(node, Alternatives) else (node,)
            if not all(isinstance(way, Character) for way in ways):
                raise self._error()  # It may look further back than one character.
            self.looks_back = True
            return Look("back")
        if beginning in ("(?=", "(?!"):
            return Look("ahead", node, beginning == "(?!")
        return node

    def _class(self) -> Node:
        start, depth = self._at, 0
        while self._at < len(self._text):
            if self._take("[^", "["):
                depth += 1
                if self._text.startswith("]", self._at):
                    raise self._error()
            elif self._take("]"):
                depth -= 1
                if not depth:
                    return self._character(self._text[start : self._at])
            elif self._text[self._at] != "\\":
                self._at += 1
            elif (escape := _CLASS_ESCAPE.match(self._text, self._at)) is not None:
                self._at = escape.end()
            elif self._text[self._at + 1 : self._at + 2].isalnum():
                raise self._error()
            else:
                self._at += 2
        raise self._error()

    def _escape(self) -> Node:
        if (escape := _CLASS_ESCAPE.match(self._text, self._at)) is not None:
            self._at = escape.end()
            return self._character(escape[0])
        sign = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        if sign in ("b", "B"):
            self.looks_back = True
            word = self._character(r"\w")
            return Look("edge", word)
        if sign == "z":
            return Look("end")
        if sign == "A":
            self.looks_back = True
            return Look("back")
        if not sign or sign.isalnum() or not sign.isascii():
            raise self._error()
        return self._character(None, sign)

    def _character(self, expression: str | None, literal: str = "") -> Node:
        if expression is None:
            expression = escaped(literal)
        elif self._ignores_case and ("\\" in expression or "[^" in expression):
            raise self._error()
        if self._ignores_case:
            expression = f"(?i:{expression})"
        if expression not in self.classes:
            self.classes.append(expression)
        return Character(self.classes.index(expression))
