"""Whether SGLang's source has what the plugin uses, and takes and passes what the plugin does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any

from flashmoa_sglang.internals import names
from flashmoa_sglang.internals.modules import Class, Module
from flashmoa_sglang.internals.source import Source
from flashmoa_sglang.internals.texts import FUNCTIONS, Function
from flashmoa_sglang.internals.use import Use

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Check:
    """Against one SGLang.

    Attributes:
        seen: the names that were looked for. lacking: those that are not there.
        otherwise: what takes other arguments, and which.
        untold: classes that were not found, so that nothing could be said of their objects. The
            plugin does not name them itself: a class may move.
    """

    def __init__(self, source: Source) -> None:
        self.seen: set[str] = set()
        self.lacking: list[str] = []
        self.otherwise: list[str] = []
        self.untold: set[str] = set()
        self._source = source

    @property
    def problem(self) -> str:
        """What is wrong with SGLang, to follow its name; empty: nothing."""
        lacking = f"has no {', '.join(self.lacking)}" if self.lacking else ""
        otherwise = f"takes other arguments for {', '.join(self.otherwise)}"
        return "; ".join(filter(None, (lacking, otherwise if self.otherwise else "")))

    def uses(self, uses: Iterable[Use]) -> None:
        """Look for each of these once."""
        for use in dict.fromkeys(replace(use, where="") for use in uses):
            owners = names.OF_SOME.get((use.owner, use.name), use.owner)
            for owner in owners.split("&"):
                if ":" in owner and next(self._places(owner), None) is None:
                    self.untold.add(owner)
                else:
                    self._look(owner, use)

    def hook(self, target: str, function: Callable[..., Any]) -> None:
        """Look for what is hooked: ``function`` is called as it is, with one more in front."""
        module, _, name = target.rpartition(".")
        owner = module
        if self._source.module(module) is None:
            module, _, class_name = module.rpartition(".")
            owner = f"{module}:{class_name}"
        found = self._found(owner, name, target)
        if isinstance(found, FUNCTIONS):
            ours = list(inspect.signature(function).parameters.values())[1:]
            theirs = signature(found, bound=False)
            self._compare(target, theirs, Signature(ours), methods=owner != module)

    def _look(self, owner: str, use: Use) -> None:
        shown = ".".join(filter(None, (_shown(owner), use.name)))
        name, _, passed = use.name.rstrip(")").partition("(")
        found = self._found(owner, name, shown)
        takes = self._takes(found, is_method=":" in owner)
        if takes is None:
            return
        if use.override is not None:
            self._compare(shown, takes, signature(use.override, bound=True))
            return
        keywords = (*use.keywords, *filter(None, [passed]))
        if problem := _call_problem(takes, use.positional, keywords):
            self._report(self.otherwise, f"{shown} ({problem})")

    def _found(self, owner: str, name: str, shown: str) -> ast.AST | Class | Module | None:
        self.seen.add(shown)
        found = next(self._members(owner, name), None)
        if found is None:
            self._report(self.lacking, shown)
        return found

    def _compare(
        self, shown: str, theirs: Signature, ours: Signature, *, methods: bool = False
    ) -> None:
        if problem := _override_problem(theirs, ours, first=1 if methods else 0):
            self._report(self.otherwise, f"{shown} ({problem})")

    def _places(self, owner: str) -> Iterator[Class | Module]:
        """The modules and classes of which any may have what is used."""
        for one in owner.split("|"):
            module, colon, name = one.partition(":")
            if not colon and module.endswith("/*"):
                for each in self._source.submodules(module.removesuffix("/*")):
                    yield from each.classes()
            elif not colon or name == "*":
                if (found := self._source.module(module)) is not None:
                    yield found
            elif isinstance(found := self._source.find(module, name), Class | Module):
                yield found

    def _members(self, owner: str, name: str) -> Iterator[ast.AST | Class | Module]:
        for place in self._places(owner):
            if isinstance(place, Class):
                if name.startswith("'"):
                    found = place.node if place.has_string(name.strip("'")) else None
                else:
                    found = self._source.member(place, name)
            elif owner.endswith(":*"):
                found = place if place.assigns(name) else None
            else:
                found = self._source.find(place.name, name) if name else place
            if found is not None:
                yield found

    def _takes(
        self, found: ast.AST | Class | Module | None, *, is_method: bool
    ) -> Signature | None:
        if isinstance(found, Class):
            made = self._source.constructor(found)
            return arguments(made, bound=True) if made is not None else None
        return signature(found, bound=is_method) if isinstance(found, FUNCTIONS) else None

    @staticmethod
    def _report(problems: list[str], problem: str) -> None:
        if problem not in problems:
            problems.append(problem)


def _shown(owner: str) -> str:
    return owner.split("|")[0].removesuffix(":*").replace(":", ".")


def _call_problem(takes: Signature, positional: int | None, keywords: tuple[str, ...]) -> str:
    """Why a call fails; with ``positional`` unknown there may be more arguments than these."""
    bind = takes.bind if positional is not None else takes.bind_partial
    try:
        bind(*[None] * (positional or 0), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return ""


def _override_problem(theirs: Signature, ours: Signature, first: int) -> str:
    """Why ours cannot be called as theirs is; names before ``first`` do not matter."""
    parameters = list(theirs.parameters.values())
    own = list(ours.parameters.values())
    for most in (True, False):
        # With all that can be given, and with no more than must be.
        given = [one for one in parameters if most or one.default is Parameter.empty]
        positional = sum(one.kind in _BY_POSITION for one in given)
        keywords = [one.name for one in given if one.kind is Parameter.KEYWORD_ONLY]
        try:
            ours.bind(*[None] * positional, **dict.fromkeys(keywords))
        except TypeError as error:
            return str(error)
    for one, its in zip(parameters[first:], own[first:], strict=False):
        meant = (its.name.lstrip("_"), *names.PARAMETERS.get(its.name, ()))
        if {one.kind, its.kind} <= set(_BY_POSITION) and one.name not in meant:
            return f"{one.name!r} in place of {meant[-1]!r}"
    return ""


def signature(node: Function, *, bound: bool) -> Signature:
    """What a function takes; ``bound``: as a method, of an instance."""
    static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
    return arguments(node.args, bound=bound and not static)


def arguments(taken: ast.arguments, *, bound: bool) -> Signature:
    """The same of what is written between the brackets."""
    plain = [*taken.posonlyargs, *taken.args]
    first = len(plain) - len(taken.defaults)
    kinds = [
        Parameter.POSITIONAL_ONLY
        if at < len(taken.posonlyargs)
        else Parameter.POSITIONAL_OR_KEYWORD
        for at in range(len(plain))
    ]
    parameters = [
        Parameter(one.arg, kind, default=None if at >= first else Parameter.empty)
        for at, (one, kind) in enumerate(zip(plain, kinds, strict=True))
    ]
    if taken.vararg:
        parameters.append(Parameter(taken.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(one.arg, Parameter.KEYWORD_ONLY, default=None if default else Parameter.empty)
        for one, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    ]
    if taken.kwarg:
        parameters.append(Parameter(taken.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters[1:] if bound else parameters)
