"""One thing of SGLang that the plugin uses."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoa_sglang.internals.texts import Function


@dataclass(frozen=True, slots=True)
class Use:
    """Where it is, and how it is used.

    ``owner``: a module, or a class as in ``names.py``. ``name``: in it; empty for the module
    itself. ``where``: in the plugin. ``positional``, ``keywords``: the arguments of a call, where
    they can be told. ``override``: a method of ours in its place.
    """

    owner: str
    name: str
    where: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    override: Function | None = None
