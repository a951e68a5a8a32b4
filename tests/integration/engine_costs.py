"""Costs for engines that do not measure them. Measuring takes 5 to 15 s and may be noisy.

An engine on a CPU takes the costs of the first engine like it. An engine in the time of a GPU takes
the costs in the GPU's tables. So no decision of an engine depends on other load on this machine.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import httpx
from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Prefills
from flashmoa_sglang.costs import STEP_SIZES, Costs

from flashmoa.engine.local import LocalEngine

_OVERLAP_OFF = "--disable-overlap-schedule"
# Numbers of tokens in prefills, and the context of requests that decode.
_SIZES = (1, 16, 64, 128, 256, 512, 1024, 4096)
_CONTEXT = 64
_FOLDER = Path(__file__).parents[2] / ".cache" / "costs"
# (model, whether the overlap schedule is on) -> file of costs that an engine on a CPU measured.
_measured: dict[tuple[str, bool], Path] = {}


def known_costs(
    model: Path | str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return environment variables for an engine that need not measure its costs.

    The result is empty if the costs are not known, or if the engine copies experts: such an engine
    measures further costs.
    """
    environment = environment or {}
    file = _measured.get((str(model), _OVERLAP_OFF not in arguments))
    if gpu := environment.get("FLASHMOA_DEVICE"):
        file = _from_tables(gpu, environment["FLASHMOA_DEVICE_MODEL"])
    if file is None or "--flashmoa-asyncep" in arguments:
        return {}
    return {"FLASHMOA_COSTS": str(file)}


async def remember_costs(
    engine: LocalEngine, model: Path | str, arguments: Sequence[str] = ()
) -> None:
    """Keep the costs of an engine in a CPU's time, if it has measured all that engines can."""
    kind = str(model), _OVERLAP_OFF not in arguments
    if kind in _measured:
        return
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        answer = await http.get("/flashmoa/info")
    info = answer.json()
    decodes = {row[0] for row in info["costs"]["mixed"] if row[1]}
    if decodes >= {1, 8, 32}:
        _measured[kind] = engine.log.with_suffix(".json")
        _measured[kind].write_bytes(answer.content)


@cache
def _from_tables(gpu: str, model: str) -> Path:
    """Write what an engine would measure if it took no time itself. Return the file."""
    seconds = MeasuredTables(gpu, model).seconds
    points = tuple((tokens, seconds(Forward(Prefills(1, tokens)))) for tokens in _SIZES)
    mixed = tuple(
        (decodes, ride, seconds(Forward(Prefills(min(ride, 1), ride), decodes, _CONTEXT)))
        for decodes in (1, 8, 32)
        for ride in (0, *(size - decodes for size in STEP_SIZES if size > decodes))
    )
    costs = Costs(points, mixed[0][2], mixed)
    file = _FOLDER / f"{gpu}-{model.replace('/', '-')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    # Parallel test processes write the same file.
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"costs": asdict(costs)}))
    written.replace(file)
    return file
