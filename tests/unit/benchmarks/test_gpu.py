"""Test what the checks on one GPU do without one: starts, comparisons, the kit's own kernels."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import ANY, AsyncMock, Mock, call

import anyio
import pytest
import torch
from flashmoa_bench.gpu import engines, forwards
from flashmoa_bench.gpu.__main__ import STAGES, Run, play
from flashmoa_bench.gpu.engines import Wanted, Way, gpu_engines
from flashmoa_bench.gpu.kernels import error_of, rotated
from flashmoa_bench.gpu.stages import CPU_SIZES
from flashmoa_sglang.http.calibration import read_costs

from flashmoa.engine.local import LocalEngine
from flashmoa.errors import EngineError
from tests.conftest import ROOT

WAYS = (Way("best", ()), Way("modest", ("--slow",)))


def load(name: str) -> ModuleType:
    """Return a module of the kit, which is in no package."""
    spec = spec_from_file_location(f"gpu_{name}", ROOT / "benchmarks" / "gpu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_run(folder: Path, started: Any = None) -> Run:
    options: Any = SimpleNamespace(budget=100, out=folder, cpu=True, offload=1)
    return Run(options, started, (folder, folder), CPU_SIZES, time.perf_counter())


@pytest.fixture
def shims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that Python imports at an engine's start, which no import finds here."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return load("shims/sitecustomize")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Fake engines; some fail to start. Return the tries so far as (engine, way)."""
    tried: list[tuple[str, str]] = []
    fails = {("plugin", "best"), ("broken", "best"), ("broken", "modest")}

    async def launch(name: str, _wanted: Wanted, way: Way, _logs: Path) -> Any:
        async def prepare(_limit: float, *, measures: bool) -> dict[str, Any]:
            if (name, way.name) in fails:
                raise EngineError("it ended")
            return {"measures": measures}

        async def stop() -> None:
            tried.append((name, "stopped"))

        tried.append((name, way.name))
        client = SimpleNamespace(url="http://engine")
        engine = SimpleNamespace(tail=lambda _lines: "the end of its log")
        return SimpleNamespace(client=client, engine=engine, prepare=prepare, stop=stop)

    monkeypatch.setattr(engines, "_Running", SimpleNamespace(launch=launch))
    return tried


async def test_a_failed_engine_starts_in_the_next_way(
    launches: list[tuple[str, str]], tmp_path: Path
) -> None:
    async with gpu_engines(WAYS, tmp_path) as started:
        await started.use({"plugin": Wanted(tmp_path, True)})
        assert launches == [("plugin", "best"), ("plugin", "stopped"), ("plugin", "modest")]
        first, second = started.starts
        assert first.problem is not None and "the end of its log" in first.problem
        assert second.problem is None and second.settings == {"measures": True}
        # Other engines skip the way that failed, and running engines stay.
        await started.use({"plugin": Wanted(tmp_path, True), "stock": Wanted(tmp_path, False)})
        assert launches[3:] == [("stock", "modest")]
        await started.use({"stock": Wanted(tmp_path, False)})
        assert launches[4:] == [("plugin", "stopped")]
    assert launches[5:] == [("stock", "stopped")]


async def test_an_engine_that_fails_always_stays_off(
    launches: list[tuple[str, str]], tmp_path: Path
) -> None:
    async with gpu_engines(WAYS, tmp_path) as started:
        both = {"stock": Wanted(tmp_path, False), "broken": Wanted(tmp_path, True)}
        with pytest.raises(EngineError, match="no way to start broken"):
            await started.use(both)
        assert "stock" in started
        del launches[:]
        with pytest.raises(EngineError, match="no way to start broken"):
            await started.use(both)
        assert launches == []


@pytest.mark.parametrize("measures", [True, False])
async def test_an_engine_is_asked_after_it_measured(
    measures: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first request of a client ends the measurement, so ours must come later."""
    fakes, costs = Mock(), SimpleNamespace(model_dump=lambda: "costs")
    fakes.wait_for_costs = AsyncMock(return_value=SimpleNamespace(costs=costs))
    fakes.ask, fakes.start = AsyncMock(), AsyncMock()
    fakes.read_server = AsyncMock(return_value={"version": "0.5.12.post1"})
    for name in ("wait_for_costs", "ask", "read_server"):
        monkeypatch.setattr(engines, name, getattr(fakes, name))
    engine = LocalEngine(1, 1, tmp_path / "engine.log")
    monkeypatch.setattr(engine, "wait_until_ready", fakes.start)
    process: Any = None
    running = engines._Running(process, engine)
    found = await running.prepare(7, measures=measures)
    await running.client.close()
    first, *done = fakes.mock_calls
    assert first == call.start(7)
    measured = ["wait_for_costs"] if measures else []
    assert [each[0] for each in done[:-1]] == [*measured, "ask"]
    assert found == {"version": "0.5.12.post1", "costs": "costs" if measures else None}


async def test_engines_without_streams_measure_no_costs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    names = ("stock", "plugin", "mixed", "resident", "h2d", "offload")
    assert [name for name in names if run._wanted(name).measures] == ["plugin"]
    arguments = run._wanted("h2d").arguments
    costs, saturation = read_costs(arguments[arguments.index("--flashmoa-costs") + 1])
    assert costs.prefill(8) > 0 and saturation is None


async def play_stages(
    folder: Path, patch: pytest.MonkeyPatch, *stages: tuple[float, Callable[[Run], Any]]
) -> tuple[int, dict[str, Any]]:
    """Play stages, each with a limit in seconds and an action; return the status and findings."""
    for number, (limit, action) in enumerate(stages):
        stage = SimpleNamespace(about="", limit=limit, play=action)
        patch.setitem(STAGES, str(number), stage)
    async with gpu_engines(WAYS, folder) as started:
        run = make_run(folder, started)
        return await play(run, [str(number) for number in range(len(stages))]), run.found


async def hang(_run: Run) -> None:
    await anyio.sleep_forever()


async def test_a_failed_or_slow_stage_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def find(run: Run) -> None:
        run.found["2"] = {"is": "found"}

    stages = (9, AsyncMock(side_effect=EngineError("no engine"))), (0.05, hang), (9, find)
    status, found = await play_stages(tmp_path, monkeypatch, *stages)
    assert status == 2
    assert "no engine" in found["0 problem"] and "ended" in found["1 problem"]
    assert found["2"] == {"is": "found"} and (tmp_path / "results.json").exists()


@pytest.mark.usefixtures("launches")
async def test_starts_do_not_count_against_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def start(_engines: object, _wanted: object) -> None:
        await anyio.sleep(0.8)

    async def use_and_find(run: Run) -> None:
        await run.use("stock")
        run.found["0"] = "found"
        await hang(run)

    monkeypatch.setattr(engines.GpuEngines, "use", start)
    status, found = await play_stages(tmp_path, monkeypatch, (0.5, use_and_find))
    assert status == 1
    assert found["0"] == "found" and "ended" in found["0 problem"]


def test_times_are_compared_with_the_same_gpus() -> None:
    def times(prefill: float, decode: float) -> dict[str, Any]:
        return {"prefills": {"1": prefill}, "decodes": {"1x8": decode}}

    expected = {"h100_sxm": times(9.0, 9.0), "h200_sxm": times(1.0, 3.0)}
    found = forwards.errors(expected, times(2.0, 2.0), "NVIDIA H200")
    assert found["modelled_gpu"] == "h200_sxm"
    assert found["error"] == times(-0.5, 0.5)
    assert found["median_error"] == {"prefills": 0.5, "decodes": 0.5}


def test_modelled_times_of_all_sizes_are_known() -> None:
    for times in forwards.expected_times().values():
        assert len(times["prefills"]) == len(forwards.PREFILLS)
        ordered = [times["prefills"][str(tokens)] for tokens in forwards.PREFILLS]
        assert ordered == sorted(ordered) and 0 < ordered[0] < ordered[-1] < 2
        assert all(0 < seconds < 1 for seconds in times["decodes"].values())


def test_torch_replaces_compiled_kernels(
    shims: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = SimpleNamespace()
    shims.replace_clamp(module)
    lengths = torch.tensor([0, 1, 9])
    assert module.clamp_position_cuda(lengths).tolist() == [0, 0, 8]
    shims.replace_resolve(module)
    ids = torch.tensor([5, -2, 0])
    module.resolve_future_token_ids_cuda(ids, torch.tensor([0, 11, 22]))
    assert ids.tolist() == [5, 22, 0]

    def rotary_embedding(
        positions: Any, query: Any, key: Any, size: int, table: Any, is_neox: bool
    ) -> None:
        assert size == query.shape[-1] and table.dtype == query.dtype and is_neox
        for heads in (query, key):
            heads.copy_(rotated(heads, table, positions))

    def silu_and_mul(rows: Any, out: Any) -> None:
        gate, up = rows.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    kernels = SimpleNamespace(rotary_embedding=rotary_embedding, silu_and_mul=silu_and_mul)
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    shims.replace_activation(module)
    rows = torch.randn(3, 8)
    right = torch.nn.functional.silu(rows[:, :4]) * rows[:, 4:]
    assert torch.equal(module.silu_and_mul(rows), right)
    assert torch.equal(module.run_activation("silu", rows), right)

    shims.replace_rope(module)
    positions, table = torch.tensor([3, 1]), torch.randn(8, 4)
    query, key, value = torch.randn(2, 2, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    turned = rotated(key, table, positions)
    keys, values = torch.zeros(5, 1, 4), torch.zeros(5, 1, 4)
    places = torch.tensor([4, 2])
    fused = SimpleNamespace(k_buffer=keys, v_buffer=values, cache_loc=places, value=value)
    module.apply_rope_with_cos_sin_cache_inplace(
        query, key, table, positions, is_neox=True, fused_args=fused
    )
    assert error_of(key, turned) < 1e-6 and torch.equal(keys[places], key)
    assert torch.equal(values[places], value) and keys[0].abs().sum() == 0


def test_dummy_weights_are_equal_and_matter(
    shims: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU makes even weights in host memory; a core would take minutes, and make others."""
    module: Any = SimpleNamespace()
    shims.replace_weights(module)

    def make() -> Mapping[str, Any]:
        model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "up": torch.nn.Linear(4, 9)})
        module.initialize_dummy_weights(model)
        return model.state_dict()

    one, two = make(), make()
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())
    assert torch.equal(one["norm.weight"], torch.ones(4))
    assert not torch.equal(one["up.weight"][:1, :4].flatten(), one["up.bias"][:4])
    places: list[str] = []

    def noting(make: Any) -> Any:
        def made(*arguments: Any, device: torch.device) -> Any:
            places.append(device.type)
            return make(*arguments)

        return made

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Generator", noting(torch.Generator))
    monkeypatch.setattr(torch, "empty_like", noting(torch.empty_like))
    for weights in (one, make()):
        assert 0.01 < weights["up.weight"].abs().max() <= shims.WEIGHTS
    assert places == ["cuda"] * 4


def test_the_shims_patch_imported_modules(
    shims: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "compiled_kernel.py").write_text("def can_use_it(size):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    shims.PATCHES["compiled_kernel"] = shims.switch_off
    import compiled_kernel

    assert compiled_kernel.can_use_it(8) is False
    # SGLang imports this name of a missing package. Nothing else of the package is found.
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    from flashinfer.prefill import cudnn_batch_prefill_with_kv_cache

    assert cudnn_batch_prefill_with_kv_cache is None
    with pytest.raises(ImportError):
        import flashinfer.gemm  # noqa: F401
    for name in [name for name in sys.modules if name.startswith("flashinfer")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def prepare() -> ModuleType:
    return load("prepare")


def test_a_kit_that_is_too_large_is_refused(prepare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").write_bytes(b"0" * 60)
    own = tmp_path.parent / "tracked"
    own.write_bytes(b"0" * 40)
    assert "together 100 of 100" in prepare.check_sizes(tmp_path, [own], 100)
    with pytest.raises(SystemExit, match="too large"):
        prepare.check_sizes(tmp_path, [own], 99)


def test_the_kit_has_entry_points_and_models(prepare: ModuleType, tmp_path: Path) -> None:
    prepare.write_metadata(tmp_path)
    (file,) = tmp_path.glob("flashmoa_sglang-*.dist-info/entry_points.txt")
    assert file.read_text().splitlines() == [
        "[sglang.srt.plugins]",
        "flashmoa = flashmoa_sglang.sglang.hooks:register",
        "[sglang.srt.platforms]",
        "flashmoa_cpu = flashmoa_cpu.platform:activate",
    ]
    prepare.write_models(tmp_path)
    assert "Qwen3MoeForCausalLM" in (tmp_path / "qwen3-30b-a3b" / "config.json").read_text()


def test_only_hopper_kernels_are_taken(prepare: ModuleType) -> None:
    needed: Callable[[str], bool] = prepare.is_needed
    assert needed("sgl_kernel/sm90/common_ops.abi3.so") and needed("sgl_kernel/moe.py")
    assert not needed("sgl_kernel/sm100/common_ops.abi3.so")
    assert not needed("sgl_kernel/flash_ops.abi3.so")


def test_only_a_changed_kit_is_installed_again(tmp_path: Path) -> None:
    kit, log = tmp_path / "benchmarks" / "gpu", tmp_path / "log"
    kit.mkdir(parents=True)
    (kit / "run.sh").write_text((ROOT / "benchmarks" / "gpu" / "run.sh").read_text())
    for folder in ("site", "wheels", "programs"):
        (tmp_path / ".gpu" / folder).mkdir(parents=True)
    (tmp_path / ".gpu" / "site" / "a.py").write_text("")
    for name in ("timeout", "python3", "nvidia-smi"):
        program = tmp_path / ".gpu" / "programs" / name
        program.write_text(f'#!/bin/sh\nif [ "$*" != -V ]; then echo "{name} $*"; fi >> {log}\n')
        program.chmod(0o755)
    path = f"{tmp_path / '.gpu' / 'programs'}:{os.environ['PATH']}"
    environment = {"PATH": path, "SITE": str(tmp_path / "installed")}
    (tmp_path / "installed").mkdir()

    def run(*arguments: str) -> tuple[int, str]:
        """Return how often packages were installed, and how the program was started."""
        log.write_text("")
        command = ["bash", str(kit / "run.sh"), *arguments]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        lines = log.read_text().splitlines()
        return sum("pip install" in line for line in lines), lines[-1]

    wheel = tmp_path / ".gpu" / "wheels" / "one.whl"
    wheel.write_text("1")
    installed, started = run("--budget", "100.5", "--stages", "2")
    assert installed == 1 and started.startswith("timeout --kill-after 5 115 ")
    assert started.endswith("--budget 100.5 --stages 2")
    assert run("--budget=30")[0] == 0 and " 45 " in run("--budget=30")[1]
    wheel.write_text("2")
    assert run() == (1, ANY)
