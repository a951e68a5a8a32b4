"""Three tiny Qwen3 models that do a real task, so that Mixture-of-Agents can be right or wrong.

``questions`` and ``prompts`` are plain Python. ``network``, ``net2net``, ``training_data``,
``stages`` and ``train`` are how the models in ``weights`` were made, ``inference`` and ``evaluate``
what they can do (these need torch).
"""

from __future__ import annotations

from pathlib import Path

# By number of parameters, as Mixture-of-Agents has a 4B, an 8B and a 32B model.
SIZES = ("small", "medium", "large")
# The one that has learned to combine answers; the others only answer.
AGGREGATOR = "large"
SHIPPED = Path(__file__).parent / "weights"


def model_folder(size: str) -> Path:
    """Return the folder of one of ``SIZES``, which engines load.

    Raises: ValueError for another name.
    """
    if size not in SIZES:
        raise ValueError(f"no model {size!r} in the family; there are {', '.join(SIZES)}")
    return SHIPPED / size
