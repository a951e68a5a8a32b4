"""Where the trained models of the family are."""

from __future__ import annotations

from pathlib import Path

# By number of parameters, as Mixture-of-Agents has a 4B, an 8B and a 32B model.
SIZES = ("small", "medium", "large")
# The one that has learned to combine answers; the others only answer.
AGGREGATOR = "large"
SHIPPED = Path(__file__).parent / "weights"


def model_folder(size: str) -> Path:
    """The folder of one of ``SIZES`` that engines load. Raises: ValueError for another name."""
    if size not in SIZES:
        raise ValueError(f"no model {size!r} in the family; there are {', '.join(SIZES)}")
    return SHIPPED / size
