"""Reads the regular expressions of tokenizers, which Oniguruma and Rust's engines compile.

An expression is refused if the engines differ on one of its parts. Parts that models do not use are
refused, too: conditions on the text before a place, lazy repetitions, references to groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_INTERVAL = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_CLASS_ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w+\}|[sSdDwW]|x[0-7][0-9a-fA-F]|u[0-9a-fA-F]{4}|[rnt])")
# If case does not matter, engines take these pairs of letters for one character, as "ﬁ".
_LIGATURES = re.compile("ss|ff|fi|fl|st", re.IGNORECASE)
_SPECIAL = frozenset("\\.+*?()|[]{}^$")


class NotUnderstood(ValueError):
    """Raised for a part of a tokenizer that may split text anywhere."""


def escaped(character: str) -> str:
    """Return the expression of a character."""
    return f"\\{character}" if character in _SPECIAL else character


@dataclass(frozen=True, slots=True)
class Character:
    """One character of a class. ``number`` is the index of the class in ``Reader.classes``."""

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


@dataclass(frozen=True, slots=True)
class Look:
    """A condition on the text after a place. Without a node: the end of a line."""

    node: Node | None
    is_negated: bool = False


Node = Character | Chain | Alternatives | Repetition | Look


class Reader:
    """Reads an expression.

    Attributes:
        classes: the expression of each class of characters.

    Raises: NotUnderstood
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._ignores_case = False
        self.classes: list[str] = []

    def read(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error()
        return node

    def _error(self) -> NotUnderstood:
        return NotUnderstood(f"the expression {self._text!r} is not understood at {self._at}")

    def _take(self, *beginnings: str) -> str | None:
        """Return the first beginning that comes next, and go past it."""
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
        is_possessive = False
        if (sign := self._take("*", "+", "?")) is not None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            is_possessive = self._take("+") is not None
        elif (interval := _INTERVAL.match(self._text, self._at)) is not None:
            self._at = interval.end()
            least = int(interval[1])
            most = (int(interval[3]) if interval[3] else None) if interval[2] else least
        else:
            return node
        is_misread = isinstance(node, Look) or (is_possessive and not isinstance(node, Character))
        if self._take("*", "+", "?", "{") or is_misread or (most is not None and most < least):
            raise self._error()
        if not is_possessive:
            return Repetition(node, least, most)
        # A possessive repetition ends only where no further character of the class follows.
        end = Look(node, is_negated=True)
        if most is not None:
            return Alternatives((node, end))
        return Chain((Repetition(node, least, None), end))

    def _one(self) -> Node:
        if (group := self._take("(?:", "(?i:", "(?=", "(?!", "(")) is not None:
            return self._group(group)
        sign = self._text[self._at]
        if sign == "[":
            return self._class()
        if sign == "\\":
            return self._escape()
        if sign in "*+?{^":
            raise self._error()
        self._at += 1
        if sign == "$":
            return Look(None)
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
        if beginning in ("(?=", "(?!"):
            return Look(node, beginning == "(?!")
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
