"""Provide three tiny Qwen3 models with a real task, at which Mixture-of-Agents can succeed or fail.

``questions`` and ``prompts`` define the task. ``network``, ``net2net``, ``training_data``,
``stages`` and ``train`` made the models in ``weights``; ``inference`` and ``evaluate`` measure what
they can do. Those that train or run models need torch.
"""

from __future__ import annotations

from pathlib import Path

# In the order of their parameters; Faster-MoA has a 4B, an 8B and a 32B model.
SIZES = ("small", "medium", "large")
# The one that has learned to combine answers; the others only answer.
AGGREGATOR = "large"
SHIPPED = Path(__file__).parent / "weights"


def model_folder(size: str) -> Path:
    """Return the folder of the model of a size, which engines load.

    Raises: ValueError if the size is not one of ``SIZES``.
    """
    if size not in SIZES:
        raise ValueError(f"no model {size!r} in the family; there are {', '.join(SIZES)}")
    return SHIPPED / size
