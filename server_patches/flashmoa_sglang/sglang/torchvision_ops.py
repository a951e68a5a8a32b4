"""Lets ``import torchvision`` succeed if its C library was built for another torch.

SGLang imports torchvision at start, for image decoding. With a torch for CPUs, a torchvision that
was built for CUDA cannot load its ``_C.so``. It then registers fake kernels for operators that are
not defined, and raises. Declaring the operators' schemas prevents that. Text models never call
these operators, and a call would fail because there is no kernel. If both builds match, nothing is
declared.
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
    """Declares the operators right after ``torchvision.extension`` tried to load the C library."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            import torch

            for name, schema in _SCHEMAS.items():
                if not hasattr(torch.ops.torchvision, name):
                    torch.library.define(f"torchvision::{name}", schema)
        return None


def allow_mismatched_build() -> None:
    """Install the import hook; call this before anything imports torchvision."""
    if "torchvision" not in sys.modules and PathFinder.find_spec("torchvision") is not None:
        sys.meta_path.insert(0, _DeclareOnImport())
