"""A platform for a plain CPU, of real SGLang."""

from __future__ import annotations


def is_all_there_is() -> bool:
    """Return whether no accelerator is usable."""
    import torch

    return not (torch.cuda.is_available() or torch.xpu.is_available())
