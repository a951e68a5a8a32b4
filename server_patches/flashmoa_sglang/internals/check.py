"""Whether SGLang's source has what the plugin uses, and takes and passes what the plugin does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

from flashmoa_sglang.internals.sglang_modules import FUNCTIONS, Class, Function, Module, parameters
from flashmoa_sglang.internals.sglang_source import Source
from flashmoa_sglang.internals.used_names import Use

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
# What SGLang calls parameters of methods that are hooked or replaced, where we call them otherwise.
_THEIR_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "device_id": ("local_rank",),
    "message": ("recv_obj",),
}


class Check:
    """The findings about one SGLang.

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
        """Look for each of these."""
        for use in uses:
            if ":" in use.owner and next(self._places(use.owner), None) is None:
                self.untold.add(use.owner)
            else:
                self._look(use)

    def hook(self, target: str, function: Callable[..., Any]) -> None:
        """Look for what is hooked: ``function`` is called as it is, with one more in front."""
        module, _, name = target.rpartition(".")
        owner = module
        if self._source.module(module) is None:
            module, _, class_name = module.rpartition(".")
            owner = f"{module}:{class_name}"
        found = self._found(owner, name, target)
        if isinstance(found, FUNCTIONS):
            ours = Signature(list(inspect.signature(function).parameters.values())[1:])
            first = 1 if owner != module else 0
            self._report(target, _override_problem(signature(found), ours, first))

    def _look(self, use: Use) -> None:
        shown = use.owner.split("|")[0].removesuffix(":*").replace(":", ".")
        shown = ".".join(filter(None, (shown, use.name)))
        found = self._found(use.owner, use.name, shown)
        if isinstance(found, Class):
            made = self._source.constructor(found)
            takes = _arguments(made, bound=True) if made is not None else None
        else:
            bound = ":" in use.owner
            takes = signature(found, bound=bound) if isinstance(found, FUNCTIONS) else None
        if takes is None:
            return
        if use.override is not None:
            ours = _arguments(parameters(use.override), bound=False)
            self._report(shown, _override_problem(takes, ours))
        else:
            self._report(shown, _call_problem(takes, use.positional, use.keywords))

    def _found(self, owner: str, name: str, shown: str) -> ast.AST | Class | Module | None:
        self.seen.add(shown)
        found = next(self._members(owner, name), None)
        if found is None and shown not in self.lacking:
            self.lacking.append(shown)
        return found

    def _report(self, shown: str, problem: str) -> None:
        if problem and f"{shown} ({problem})" not in self.otherwise:
            self.otherwise.append(f"{shown} ({problem})")

    def _places(self, owner: str) -> Iterator[Class | Module]:
        """Yield the modules and classes of which any may have what is used."""
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
                    found = place if place.has_string(name.strip("'")) else None
                else:
                    found = self._source.member(place, name)
            elif owner.endswith(":*"):
                found = place if place.assigns(name) else None
            else:
                found = self._source.find(place.name, name) if name else place
            if found is not None:
                yield found


def _call_problem(takes: Signature, positional: int | None, keywords: tuple[str, ...]) -> str:
    """Say why a call fails; with ``positional`` unknown there may be more arguments than these."""
    bind = takes.bind if positional is not None else takes.bind_partial
    try:
        bind(*[None] * (positional or 0), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return ""


def _override_problem(theirs: Signature, ours: Signature, first: int = 0) -> str:
    """Say why ours cannot be called as theirs is; names before ``first`` do not matter."""
    takes = list(theirs.parameters.values())
    # With all that can be given, and with no more than must be.
    for given in (takes, [one for one in takes if one.default is Parameter.empty]):
        positional = sum(one.kind in _BY_POSITION for one in given)
        keywords = [one.name for one in given if one.kind is Parameter.KEYWORD_ONLY]
        if problem := _call_problem(ours, positional, tuple(keywords)):
            return problem
    for one, its in list(zip(takes, ours.parameters.values(), strict=False))[first:]:
        meant = (its.name.lstrip("_"), *_THEIR_PARAMETERS.get(its.name, ()))
        if {one.kind, its.kind} <= set(_BY_POSITION) and one.name not in meant:
            return f"{one.name!r} in place of {meant[-1]!r}"
    return ""


def signature(node: Function, *, bound: bool = False) -> Signature:
    """Return what a function takes; ``bound``: as a method, of an instance."""
    static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
    return _arguments(node.args, bound=bound and not static)


def _arguments(taken: ast.arguments, *, bound: bool) -> Signature:
    """Return the signature of a function with these arguments, every default being ``None``."""
    taken.defaults = [ast.Constant(None) for _ in taken.defaults]
    taken.kw_defaults = [one and ast.Constant(None) for one in taken.kw_defaults]
    made = ast.fix_missing_locations(ast.Expression(ast.Lambda(taken, ast.Constant(None))))
    takes = inspect.signature(eval(compile(made, "<signature>", "eval")))
    return Signature(list(takes.parameters.values())[1:]) if bound else takes
