"""Check and measure FlashMoA on one GPU: stages with time limits, the most valuable ones first.

Results are written after every stage and every try to start an engine. A failure is recorded, and
the next stage goes on. Nothing outlives this program.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio

from flashmoa.engine.local import tiny_model
from flashmoa.errors import EngineError
from flashmoa_bench.gpu import stages
from flashmoa_bench.gpu.engines import (
    CPU_WAYS,
    GPU_WAYS,
    GpuEngines,
    Wanted,
    gpu_engines,
)
from flashmoa_bench.gpu.forwards import Expected
from flashmoa_bench.harness.engines import random_words
from flashmoa_bench.harness.report import machine, versions

# Costs without meaning, for engines without streams. With experts in host memory, the measurement
# would keep the engine busy for minutes.
_COSTS = Path(__file__).with_name("costs.json")


@dataclass
class Run:
    """One run: its options, its engines and its results so far.

    Attributes:
        models: folders of the dense model and of the model with experts.
        stage: cancelled at the current stage's deadline.
        found: results, by stage.
    """

    options: argparse.Namespace
    engines: GpuEngines
    models: tuple[Path, Path]
    sizes: stages.Sizes
    begun: float
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    found: dict[str, Any] = field(default_factory=dict[str, Any])
    stage: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def left(self) -> float:
        return self.options.budget - (time.perf_counter() - self.begun)

    @property
    def gpu(self) -> str:
        return "".join(machine()["gpus"])

    def read_expected(self) -> Expected | None:
        file: Path = self.options.expected
        return json.loads(file.read_text()) if file.exists() else None

    def write(self) -> None:
        document = {
            "command": sys.argv,
            "seconds": time.perf_counter() - self.begun,
            "machine": machine(),
            "versions": versions(),
            "engines": [asdict(start) for start in self.engines.starts],
            "stages": self.found,
        }
        scratch = self.options.out / "results.partial"
        scratch.write_text(json.dumps(document, indent=1, default=str) + "\n")
        scratch.replace(self.options.out / "results.json")

    async def use(self, *names: str) -> None:
        """Have these engines run. Raises: EngineError if one does not start.

        Starts may take the whole budget. They do not count against the stage's limit.
        """
        begun, deadline = anyio.current_time(), self.stage.deadline
        self.stage.deadline = begun + self.left
        try:
            await self.engines.use({name: self._wanted(name) for name in names})
        finally:
            now = anyio.current_time()
            self.stage.deadline = min(deadline + now - begun, now + self.left)
            self.write()

    def _wanted(self, name: str) -> Wanted:
        kv, most = str(self.sizes.kv), str(self.sizes.expert_forward)
        mixed = ("--enable-mixed-chunk", "--chunked-prefill-size", "512")
        agents = ("--max-total-tokens", kv)
        whole = ("--chunked-prefill-size", str(self.sizes.chunk))
        experts = (
            *("--chunked-prefill-size", most, "--max-prefill-tokens", most),
            *("--max-total-tokens", str(2 * int(most)), "--disable-cuda-graph"),
            # By default SGLang would set aside a third of the memory that other engines left.
            *("--mem-fraction-static", "0.85", "--flashmoa-costs", str(_COSTS)),
        )
        model, with_experts = self.models
        return {
            "stock": Wanted(model, False, (*agents, *whole)),
            "plugin": Wanted(model, True, (*agents, *whole)),
            "mixed": Wanted(model, False, (*agents, *mixed)),
            "resident": Wanted(with_experts, True, experts),
            "h2d": Wanted(with_experts, True, (*experts, "--flashmoa-asyncep", "h2d")),
            "offload": Wanted(
                with_experts, True, (*experts, "--cpu-offload-gb", str(self.options.offload))
            ),
        }[name]

    async def bench(self, key: str, name: str, arguments: str, **roles: str) -> None:
        """Run a benchmark on running engines, and keep its results even if it is ended.

        Args:
            key: key of the results.
            roles: names of the engines, by the benchmark's roles.
        """
        file = self.options.out / "benchmark.json"
        file.unlink(missing_ok=True)
        urls = [
            part
            for role, engine in roles.items()
            for part in (f"--{role.replace('_', '-')}-url", self.engines[engine].url)
        ]
        program = "from flashmoa.cli import main; main()"
        command = [sys.executable, "-c", program, "bench", name, "--json", str(file), *urls]
        try:
            ended = await anyio.run_process(
                [*command, *shlex.split(arguments)], stdout=None, stderr=None, check=False
            )
            if ended.returncode:
                self.found[f"{key} problem"] = f"flashmoa bench {name} ended with an error"
        finally:
            if file.exists():
                self.found[key] = json.loads(file.read_text())
                file.unlink()
            self.write()


async def _check_kernels(run: Run) -> None:
    if run.options.cpu:
        return
    command = [sys.executable, "-m", "flashmoa_bench.gpu.kernels"]
    ended = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False)
    lines = ended.stdout.decode(errors="replace").splitlines()
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith("{"):
            found |= json.loads(line)
    run.found["0"] = found
    if ended.returncode or found["wrong_kernels"]:
        output = "\n".join(lines[-40:])
        raise RuntimeError(f"kernels are wrong, or missing; the end of their output:\n{output}")


async def _start(run: Run) -> None:
    await run.use("stock", "plugin")
    both = [run.engines["stock"], run.engines["plugin"]]
    run.found["1"] = await stages.repeat(both, run.dice)


async def _compare(run: Run) -> None:
    await run.use("stock", "plugin")
    run.found["2"] = await stages.compare_streams(
        run.engines["plugin"], run.engines["stock"], run.sizes, run.dice
    )


async def _hand_off(run: Run) -> None:
    await run.use("stock", "plugin")
    arguments = f"--policies fcfs {run.sizes.handoff}"
    await run.bench("3", "handoff", arguments, stock="stock", flashmoa="plugin")


async def _share(run: Run) -> None:
    """Play chains and a stranger against a stock engine without mixed chunks, and with them.

    On a large GPU, a third engine stays, so that the next stage need not start it.
    """
    others = ("stock",) if run.options.cpu or run.options.has_room else ()
    for stock in ("stock", "mixed"):
        await run.use(stock, "plugin", *others)
        for chains in run.sizes.chains:
            arguments = f"--rows {chains} --repeats 2 --apart 0.12 --stock-forwards"
            await run.bench(
                f"4 chains {stock} {chains}", "shared_engine", arguments,
                stock=stock, flashmoa="plugin",
            )  # fmt: skip
        arguments = f"{run.sizes.stranger} --stock-forwards"
        await run.bench(
            f"4 stranger {stock}", "interference", arguments, stock=stock, flashmoa="plugin"
        )


async def _idle(run: Run) -> None:
    await run.use("stock", "plugin")
    engines = {name: run.engines[name] for name in ("stock", "plugin")}
    run.found["5"] = await stages.compare_throughput(engines, run.sizes, run.dice)


async def _forwards(run: Run) -> None:
    await run.use("stock", "plugin")
    run.found["6"] = await stages.time_forwards(
        run.engines["stock"], run.sizes, run.dice, run.read_expected(), run.gpu
    )


async def _experts(run: Run) -> None:
    names = {"resident": "resident", "h2d": "h2d"}
    try:
        await run.use(*names.values(), *([] if run.options.cpu else ["offload"]))
    except EngineError as error:
        if any(name not in run.engines for name in names):
            raise
        run.found["7 offload problem"] = str(error)
    if "offload" in run.engines:
        names["cpu_offload"] = "offload"
    await run.bench("7", "asyncep", run.sizes.experts, **names)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the checks; ``limit`` is its time in seconds without the engines' starts."""

    about: str
    limit: float
    play: Callable[[Run], Awaitable[None]]


STAGES = {
    "0": Stage("the environment and the kernels", 100, _check_kernels),
    "1": Stage("both engines start, and answer alike", 60, _start),
    "2": Stage("streamed prompts change no answer, and leave no KV", 90, _compare),
    "3": Stage("handoffs, against their bound", 130, _hand_off),
    "4": Stage("chains of agents and a stranger on one GPU", 220, _share),
    "5": Stage("the plugin without streams, against stock SGLang", 60, _idle),
    "6": Stage("forwards, against the modelled GPU", 60, _forwards),
    "7": Stage("experts in host memory", 150, _experts),
}


async def play(run: Run, names: Sequence[str]) -> int:
    """Play stages in turn. Return the number of problems, which stand in the results."""
    for name in names:
        stage, begun = STAGES[name], time.perf_counter()
        if run.left < 20:
            run.found[f"{name} problem"] = "no time was left"
            continue
        print(f"\n== stage {name}: {stage.about} ({run.left:.0f} s left)", flush=True)
        limit = min(stage.limit, run.left)
        try:
            with anyio.move_on_after(limit) as run.stage:
                await stage.play(run)
            if run.stage.cancelled_caught:
                run.found[f"{name} problem"] = f"it took longer than {limit:.0f} s, and was ended"
        except Exception:
            run.found[f"{name} problem"] = traceback.format_exc()[-3000:]
        run.found[f"{name} seconds"] = round(time.perf_counter() - begun, 1)
        print(json.dumps(run.found.get(name), default=str)[:1500], flush=True)
        print(run.found.get(f"{name} problem", ""), flush=True)
        run.write()
    return sum(name.endswith("problem") for name in run.found)


def _make_models(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the models' folders: tiny models on a CPU, else configurations without weights."""
    cache: Path = options.out / "models"
    if options.cpu:
        cache.mkdir(parents=True, exist_ok=True)
        words = [random_words(options.cache)]
        one, two = (
            tiny_model(shape, words, options.cache / "models") for shape in ("test", "experts")
        )
        return one, two
    dense, experts = options.models / "qwen3-8b", options.models / "qwen3-30b-a3b"
    if options.has_room:
        return dense, experts
    config = json.loads((experts / "config.json").read_text())
    config["num_hidden_layers"] //= 2
    half = cache / "qwen3-30b-a3b-half"
    half.mkdir(parents=True, exist_ok=True)
    (half / "config.json").write_text(json.dumps(config))
    return dense, half


def _gpu_memory() -> int:
    """Return the bytes of the GPU's memory, 0 without a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(found.stdout.split()[0]) * 2**20


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for results.json and the engines' logs")
    add("--budget", type=float, default=500, help="seconds for everything (%(default)s)")
    add("--stages", default=",".join(STAGES), help="in this order (%(default)s)")
    add(
        "--start-limit", type=float, default=150, help="seconds for an engine's start (%(default)s)"
    )
    add("--ways", default=0, type=int, help="begin with this way of starting engines, 0 to 3")
    add("--models", type=Path, default=Path(".gpu/models"), help="folders with a config.json")
    add("--expected", type=Path, default=Path(".gpu/expected.json"), help="modelled times")
    add("--offload", type=int, default=24, help="--cpu-offload-gb of stage 7 (%(default)s)")
    add("--cpu", action="store_true", help="tiny models on this CPU, to try everything")
    add("--cache", type=Path, default=Path(".cache"), help="where tiny models are kept")
    options = parser.parse_args(arguments)
    # A smaller GPU holds half of the layers with experts, and two engines of the dense model.
    options.has_room = _gpu_memory() >= 100 * 10**9
    unknown = [name for name in options.stages.split(",") if name not in STAGES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; stages are {', '.join(STAGES)}")
    return options


async def _run(options: argparse.Namespace) -> int:
    begun = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = stages.CPU_SIZES if options.cpu else stages.GPU_SIZES
    ways = CPU_WAYS if options.cpu else GPU_WAYS[options.ways :]
    apart, limit = 0.0 if options.cpu else 8.0, options.start_limit
    async with gpu_engines(ways, options.out, apart=apart, limit=limit) as engines:
        run = Run(options, engines, _make_models(options), sizes, begun)
        problems = await play(run, options.stages.split(","))
        run.write()
    print(f"{problems} problems; results: {options.out / 'results.json'}", flush=True)
    return min(problems, 1)


if __name__ == "__main__":
    raise SystemExit(anyio.run(_run, _parse(None)))
