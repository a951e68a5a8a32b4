"""Compare modelled GPUs with what was measured on real ones.

aiconfigurator-core has rows of SGLang that NVIDIA measured on GPUs: a number of clients that each
send the next request when the last one is answered, with prompts and answers of fixed lengths. Each
row is played again with stock SGLang on the modelled GPU. An error is modelled over measured, less
one. TTFT: mean time to the first token. TPOT: mean time between the tokens that follow. With
several slowdowns, each row is played with each; their times, without the slowdown, should agree.
Rows for which this machine is too slow are left out, and named.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines, local_engines
from flashmoa.errors import EngineError
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import STOCK, make_model
from flashmoa_bench.harness.modelled_gpus import (
    SLOWDOWN_OPTION,
    TOLERATED_SHARE,
    MachineTooSlow,
    check_keeps_up,
    environment_of,
    overrun_share,
    read_device,
)
from flashmoa_bench.harness.report import Column, Report, progress_bar
from flashmoa_bench.harness.requests import ask, random_ids

_PACKAGE = "aiconfigurator_core"
# Names of models in the rows whose configuration the package has by another name.
CONFIGURATIONS = {"meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what was run on the GPU, and the times in seconds that were measured."""

    model: str
    gpu: str
    tensor_parallel: int
    clients: int
    prompt: int
    answer: int
    ttft: float
    tpot: float
    weights: str = "bfloat16"

    def __str__(self) -> str:
        """Return a name with the times that were measured."""
        times = f"TTFT {1000 * self.ttft:.0f}, TPOT {1000 * self.tpot:.1f}"
        return f"{self.name}: {times}"

    @property
    def name(self) -> str:
        shape = f"{self.clients} x {self.prompt}+{self.answer}"
        return f"{self.model.rpartition('/')[2]} {self.gpu} TP{self.tensor_parallel} {shape}"


def measured_rows() -> list[Row]:
    """Return the rows of dense models that SGLang served as one engine, in bfloat16 or FP8."""
    table = Path(str(files(_PACKAGE))) / "systems" / "silicon_sample.csv"
    with table.open(encoding="utf-8") as file:
        return [
            Row(
                each["model_path"],
                each["system"],
                int(each["tp_size"]),
                int(each["batch_size"]),
                int(each["isl"]),
                int(each["osl"]),
                float(each["silicon_ttft_ms"]) / 1000,
                float(each["silicon_tpot_ms"]) / 1000,
                each["gemm_quant_mode"] or "bfloat16",
            )
            for each in csv.DictReader(file)
            if (each["backend"], each["mode"]) == ("sglang", "agg")
            and each["model_path"] in ("Qwen/Qwen3-32B", *CONFIGURATIONS)
        ]


def choose_rows(rows: Sequence[Row], model: str, count: int) -> list[Row]:
    """Return rows of a model that are evenly spread over its GPUs, clients and lengths.

    Raises: ValueError if there is none.
    """
    known = sorted({row.model for row in rows})
    own = sorted(
        (row for row in rows if row.model == model),
        key=lambda row: (row.tensor_parallel, row.clients, row.prompt, row.answer),
    )
    if not own:
        raise ValueError(f"no measured rows of {model!r}; there are rows of {', '.join(known)}")
    count = min(count, len(own))
    return [own[index * len(own) // count] for index in range(count)]


# Each client sends this many requests that count. As all are equal, clients that begin together
# stay together.
_WAVES = 3
# A row for which this machine is too slow is played again, twice as slowly.
_SLOWEST = 8.0


@dataclass(frozen=True, slots=True)
class Compared:
    """A row, and what the modelled GPU took.

    Attributes:
        ttft, tpot: its times, without the slowdown.
        slowdown: factor of the GPU's times in the run.
        overrun: share of the GPU's time by which forwards were computed too late.
    """

    row: Annotated[Row, Column("row")]
    ttft: Annotated[float, Column("TTFT", "{:.0f}", 1000)]
    tpot: Annotated[float, Column("TPOT", "{:.1f}", 1000)]
    slowdown: Annotated[float, Column("K", "{:g}")]
    overrun: Annotated[float, Column("overrun", "{:.1%}")]

    @property
    def ttft_error(self) -> Annotated[float, Column("TTFT error", "{:+.0%}")]:
        return self.ttft / self.row.ttft - 1

    @property
    def tpot_error(self) -> Annotated[float, Column("TPOT error", "{:+.0%}")]:
        return self.tpot / self.row.tpot - 1


async def _measure(report: Report) -> None:
    options = report.options
    short = [row for row in measured_rows() if row.answer <= options.answer]
    rows = choose_rows(short, options.device_model, options.rows)
    report.print_head()
    model = await make_model("test", options)
    async with local_engines() as engines:
        compared, left_out = await play_rows(
            rows,
            options.device_slowdown,
            lambda row, slowdown: _play(engines, f"hash:{model}", row, slowdown),
            report.console,
        )
    if not compared:
        raise EngineError("no row could be played: give --rows other rows, or a faster machine")
    show(compared, report)
    rows_with_errors = [
        {**asdict(each), "ttft_error": each.ttft_error, "tpot_error": each.tpot_error}
        for each in compared
    ]
    report.save({"rows": rows_with_errors, "left_out": left_out})


async def play_rows(
    rows: Sequence[Row],
    slowdowns: Sequence[float],
    play: Callable[[Row, float], Awaitable[Compared]],
    console: Console,
) -> tuple[list[Compared], list[str]]:
    """Play each row with each slowdown. Return the results, and the names of the rows left out.

    Rows for which this machine is too slow are left out. Any other error of ``play`` is raised.
    """
    compared: list[Compared] = []
    left_out: list[str] = []
    with progress_bar(console) as bar:
        task = bar.add_task("rows", total=len(rows))
        for row in rows:
            bar.update(task, description=row.name)
            try:
                compared += [await play(row, slowdown) for slowdown in slowdowns]
            except MachineTooSlow as error:
                console.print(f"{row.name} is left out: {error}", highlight=False)
                left_out.append(row.name)
            bar.advance(task)
    return compared, left_out


async def _play(engines: LocalEngines, model: str, row: Row, slowdown: float) -> Compared:
    """Play a row. Raises: MachineTooSlow if this machine is, even for the largest slowdown."""
    engine = await engines.start(
        model,
        arguments=["--random-seed", "0"],
        environment={
            **STOCK,
            **environment_of(
                row.gpu,
                CONFIGURATIONS.get(row.model, row.model),
                row.tensor_parallel,
                slowdown,
                row.weights,
            ),
        },
    )
    try:
        ttft, tpot = await load(engine, row)
        device = await read_device(engine.url)
    finally:
        await engine.stop()
    assert device is not None
    overrun = overrun_share(device)
    if overrun > TOLERATED_SHARE and slowdown < _SLOWEST:
        return await _play(engines, model, row, 2 * slowdown)
    check_keeps_up({row.name: device}, SLOWDOWN_OPTION)
    return Compared(row, ttft / slowdown, tpot / slowdown, slowdown, overrun)


async def load(engine: LocalEngine, row: Row) -> tuple[float, float]:
    """Send a row's requests. Return their mean TTFT and TPOT in seconds."""
    firsts: list[float] = []
    betweens: list[float] = []
    dice = random.Random(0)

    async def client(prompts: Sequence[Sequence[int]]) -> None:
        async with EngineClient(engine.url, timeout=3600) as http:
            for prompt in prompts:
                started = time.perf_counter()
                answer = await ask(http, prompt, row.answer)
                firsts.append(answer.first - started)
                betweens.append((answer.last - answer.first) / (row.answer - 1))

    async with anyio.create_task_group() as group:
        for _ in range(row.clients):
            group.start_soon(client, [random_ids(dice, row.prompt) for _ in range(_WAVES)])
    return mean(firsts), mean(betweens)


def show(compared: Sequence[Compared], report: Report) -> None:
    """Print the table, and the errors' medians and worst."""
    report.show("Modelled against measured, ms", compared, left=("row",))
    for name, errors in (
        ("TTFT", [each.ttft_error for each in compared]),
        ("TPOT", [each.tpot_error for each in compared]),
    ):
        off = [abs(error) for error in errors]
        report.console.print(
            f"{name}: error {median(errors):+.0%} in the median, {median(off):.0%} without its "
            f"sign, {max(off):.0%} at most"
        )
    for name, difference in slowdown_differences(compared).items():
        report.console.print(f"{name}: {difference:.1%} between the slowdowns of a row at most")


def slowdown_differences(compared: Sequence[Compared]) -> dict[str, float]:
    """Return by how much TTFT and TPOT of a row differ between slowdowns, relative to the least.

    It is empty if each row was played with one slowdown.
    """
    runs: dict[Row, list[Compared]] = {}
    for each in compared:
        runs.setdefault(each.row, []).append(each)
    if len(runs) == len(compared):
        return {}
    times = {
        "TTFT": [[each.ttft for each in run] for run in runs.values()],
        "TPOT": [[each.tpot for each in run] for run in runs.values()],
    }
    return {name: max(max(row) / min(row) - 1 for row in rows) for name, rows in times.items()}


main = command(
    "device_check",
    __doc__,
    _measure,
    options=(
        Option("--rows", positive, 12, "rows to play, evenly chosen"),
        Option("--answer", positive, 128, "most tokens in the answers of those rows"),
        Option("--device-model", str, "Qwen/Qwen3-32B", "only rows of this model"),
        Option("--device-slowdown", float, [1.0], "factors of all times"),
        Option("--cache", Path, Path(".cache"), "where models are kept"),
    ),
)
