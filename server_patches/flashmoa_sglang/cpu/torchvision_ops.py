"""Lets ``import torchvision`` succeed beside a torch build its C library does not match.

SGLang imports torchvision at start, for image decoding. A torchvision whose ``_C.so`` was
built for CUDA cannot load beside CPU torch; it then registers fake kernels for operators
that are not defined, and raises. Declaring the operators' schemas is enough: text models never
call them, and a call would say that no kernel exists. With a matching pair this does nothing.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _DeclareOnImport(MetaPathFinder):
    """Acts right after ``torchvision.extension`` has tried to load the C library."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            _declare_missing_operators()
        return None


def _declare_missing_operators() -> None:
    import torch

    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


def allow_mismatched_build() -> None:
    """Install the import hook; call before anything imports torchvision."""
    if "torchvision" not in sys.modules and PathFinder.find_spec("torchvision") is not None:
        sys.meta_path.insert(0, _DeclareOnImport())
