"""Reads the costs of forwards from a file, for engines that shall not measure them."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from pydantic import BaseModel, ValidationError

from flashmoa_sglang.costs import Costs
from flashmoa_sglang.saturation import Saturation


class _Info(BaseModel):
    """What counts of an answer of ``GET /flashmoa/info``."""

    costs: Costs | None
    saturation: Saturation | None = None


def read_costs(file: str) -> tuple[Costs, Saturation | None]:
    """Return what another engine has measured, from a file with its ``GET /flashmoa/info``.

    Raises: ValueError if the file cannot be read, or has no costs; the message says what to do.
    """
    try:
        info = _Info.model_validate_json(Path(file).read_bytes())
    except OSError as error:
        raise ValueError(f"--flashmoa-costs {file} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"--flashmoa-costs {file} must have the answer of GET /flashmoa/info; {place}: "
            f"{first['msg']}."
        ) from error
    if info.costs is None:
        raise ValueError(
            f"--flashmoa-costs {file} is the answer of an engine that had not measured its costs "
            "yet; ask GET /flashmoa/info again when it has been idle for some seconds."
        )
    steps = [seconds for *_, seconds in (*info.costs.points, *info.costs.mixed)]
    if not all(isfinite(seconds) and seconds >= 0 for seconds in (*steps, info.costs.decode_step)):
        raise ValueError(f"--flashmoa-costs {file} has seconds that are not numbers from 0 on.")
    return info.costs, info.saturation
