"""A platform that runs SGLang on a plain CPU."""

from __future__ import annotations


def lacks_accelerator() -> bool:
    """Return whether no accelerator can be used, so that SGLang runs on the CPU."""
    import torch

    return not (torch.cuda.is_available() or torch.xpu.is_available())
