"""What workflows and their neighbours gain and lose, in virtual time on four modelled GPUs."""

import json
from collections.abc import Generator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from flashmoa_bench.modelled_gpu.gpu import Forward, Prefills
from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.sglang.options import Options

from tests.conftest import ROOT
from tests.unit.plugin.scheduler.virtual_time import engine, workloads
from tests.unit.plugin.scheduler.virtual_time.engine import Setting, tables
from tests.unit.plugin.scheduler.virtual_time.workloads import best_of_stock, linked, play

RESULTS = ROOT / "docs" / "results" / "modelled"
A100_32B = ("a100_sxm", "Qwen/Qwen3-32B")
H200_32B = ("h200_sxm", "Qwen/Qwen3-32B")
H200_8B = ("h200_sxm", "Qwen/Qwen3-8B")
L40S_8B = ("l40s", "Qwen/Qwen3-8B")
# A mixture of experts: a few more tokens in a step read many more weights.
H100_EXPERTS = ("h100_sxm", "Qwen/Qwen3-30B-A3B")
CPU = ("cpu", "")
# Three kinds of chains, each with three agents: short, longer and long.
KINDS = (
    (((640, 80),), ((1040, 40),), ((680, 80),)),
    (((1440, 160),), ((2080, 80),), ((2640, 120),)),
    (((2080, 320),), ((4160, 160),), ((2720, 240),)),
)


@pytest.fixture(autouse=True, scope="module")
def without_sglang(fake_release: None) -> Generator[None]:
    with engine.overlapping_release():
        yield


def chains(row: str, apart: float = 0.5) -> workloads.Workflows:
    """Read ``COUNT:PROMPT/ANSWER:PROMPT/ANSWER``, as ``flashmoa bench shared-engine`` does."""
    count, *agents = row.split(":")
    layers: Any = [[tuple(map(int, agent.split("/")))] for agent in agents]
    return workloads.Workflows(int(count), [layers], apart)


@pytest.mark.parametrize(
    ("file", "gpu"),
    [("shared-engine-a100-roomy.json", A100_32B), ("shared-engine-h200.json", H200_8B)],
)
def test_stock_engines_take_as_long_as_recorded(file: str, gpu: tuple[str, str]) -> None:
    recorded: dict[str, Any] = json.loads((RESULTS / file).read_text("utf-8"))
    apart, compared = recorded["settings"]["apart"], []
    for row in recorded["results"]["rows"]:
        way, *forms = row["way"].split()
        if way != "stock":
            continue
        chunk = int(forms[1]) if len(forms) > 1 else 8192
        setting = Setting(plugin=False, chunk=chunk, mixed="mixed" in forms)
        figures = play(*gpu, chains(row["chains"], apart), setting)
        compared.append(figures.latency / row["seconds"])
    assert len(compared) > 10
    assert 0.99 < median(compared) < 1.01
    assert min(compared) > 0.96 and max(compared) < 1.04


@pytest.mark.parametrize("setting", [Setting(plugin=False), linked()])
def test_an_answer_takes_a_prefill_and_its_decodes(setting: Setting) -> None:
    times = tables(*A100_32B)
    seconds = times.seconds(Forward(Prefills.of([(0, 1000)])))
    seconds += sum(times.seconds(Forward(decodes=1, context=1000 + n)) for n in range(1, 101))
    figures = play(*A100_32B, chains("1:1000/101"), setting)
    assert figures.latency == pytest.approx(
        engine.TO_SCHEDULER + seconds + engine.TO_CLIENT, rel=1e-3
    )


def test_time_is_virtual_and_the_same_each_time() -> None:
    workload = chains("4:1200/150:2000/60", apart=0.07)
    first, second = (play(*H200_8B, workload, linked()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("gpu", "workload", "most"),
    [
        (A100_32B, chains("8:1200/150:2000/60"), 0.91),
        (A100_32B, chains("8:1200/300:8000/100"), 0.92),
        (A100_32B, chains("16:1200/300:4000/200"), 0.92),
        (H200_32B, chains("6:1200/200:6000/60"), 0.95),
        (H200_8B, chains("8:1200/300:8000/100", 0.07), 0.98),
        (L40S_8B, chains("8:1200/150:2000/60"), 0.97),
    ],
)
def test_linked_chains_beat_the_best_stock_engine(
    gpu: tuple[str, str], workload: workloads.Workload, most: float
) -> None:
    """Nobody says how long answers will be; to be told changes nothing."""
    untold, told = (play(*gpu, workload, linked(told=told)) for told in (False, True))
    assert untold == told
    assert untold.latency < most * best_of_stock(*gpu, workload).latency
    # An agent begins soon after the one before.
    assert untold.gap < 0.25


# On the fastest, prompts come in blocks of 512 tokens. Blocks of 256 would be best for this
# workload, but let short requests wait behind long prompts: `tools`, p90 320 ms for 82.
@pytest.mark.parametrize(
    ("gpu", "most"), [(A100_32B, 0.97), (H200_32B, 0.97), (H200_8B, 1.04), (L40S_8B, 0.96)]
)
def test_links_help_an_overloaded_engine(gpu: tuple[str, str], most: float) -> None:
    workload = chains("24:1200/150:4000/100", apart=0.02 if gpu == H200_8B else 0.1)
    figures = play(*gpu, workload, linked(told=False))
    assert figures.latency < most * best_of_stock(*gpu, workload).latency


@pytest.mark.parametrize(
    ("gpu", "decodes"),
    [
        *((H200_8B, decodes) for decodes in (128, 192, 256)),
        *((A100_32B, decodes) for decodes in (128, 248, 256)),
        *((H100_EXPERTS, decodes) for decodes in (1, 16, 64)),
        *((CPU, decodes) for decodes in (1, 8, 128)),
    ],
)
@pytest.mark.parametrize("measured", [True, False])
def test_streams_get_time_beside_any_decodes(
    gpu: tuple[str, str], decodes: int, *, measured: bool
) -> None:
    setting = linked(told=False, running=decodes)
    if not measured:
        setting = replace(setting, costs=UNMEASURED)
    with_text, without = (
        play(*gpu, workloads.Beside(decodes, text), setting) for text in (4000, 0)
    )
    token = engine.measured_costs(tables(*gpu)).per_token_at_best
    assert with_text.prefilled > min(3900, 0.04 * without.latency / token)
    if measured:
        assert with_text.latency < 1.15 * without.latency


@pytest.mark.parametrize("row", ["8:1200/300:8000/100", "16:1200/300:4000/200"])
def test_links_harm_little_if_mixing_costs_much(row: str) -> None:
    figures = play(*H100_EXPERTS, chains(row, 0.1), linked(told=False))
    assert figures.latency < 1.05 * best_of_stock(*H100_EXPERTS, chains(row, 0.1)).latency


@pytest.mark.parametrize("gpu", [A100_32B, H200_32B, L40S_8B])
def test_a_reader_begins_soon_after_the_last(gpu: tuple[str, str]) -> None:
    answers = (200, 250, 150, 300, 350, 180)
    layers = [(1000, answer) for answer in answers], [(500 + sum(answers), 200)]
    workload = workloads.Workflows(4, [layers], 2.0)
    figures, stock = play(*gpu, workload, linked(told=False)), best_of_stock(*gpu, workload)
    assert figures.latency < stock.latency
    assert figures.gap < 0.4 * stock.gap


@pytest.mark.parametrize(("gpu", "p99"), [(A100_32B, 1.01), (H200_32B, 0.65), (L40S_8B, 0.98)])
def test_strangers_tokens_come_as_evenly(gpu: tuple[str, str], p99: float) -> None:
    """A median step may be a third longer, because tokens ride in it."""
    figures, stock = (
        play(*gpu, workloads.Strangers(), linked(told=False)),
        best_of_stock(*gpu, workloads.Strangers()),
    )
    assert figures.p99 < p99 * stock.p99
    assert median(figures.between) < 1.36 * median(stock.between)
    assert figures.latency < stock.latency


def test_shortest_job_first_shortens_workflows() -> None:
    workload = workloads.Workflows(12, KINDS, 0.0)
    for gpu in (H200_32B, H200_8B):
        first, shortest = (
            play(*gpu, workload, linked(order, running=4)).latency for order in ("sglang", "sjf")
        )
        assert shortest < 0.93 * first
        assert first < 1.03 * best_of_stock(*gpu, workload, running=4).latency


def test_fixed_sizes_are_nearly_as_good() -> None:
    workload = chains("8:1200/300:8000/100")
    guessed = replace(linked(told=False), costs=UNMEASURED)
    for gpu in (A100_32B, H200_32B, H200_8B):
        figures = play(*gpu, workload, guessed)
        assert figures.latency < 1.05 * play(*gpu, workload, linked(told=False)).latency


@pytest.mark.parametrize(("gpu", "times"), [(A100_32B, 1.2), (H200_32B, 1.4)])
def test_others_tokens_come_within_the_limit(gpu: tuple[str, str], times: float) -> None:
    limit = times * tables(*gpu).seconds(Forward(decodes=8, context=2000))
    options = Options(intra_turn="off", itl_ms=f"{1000 * limit:.1f}")
    limited = play(*gpu, workloads.Strangers(), replace(linked(), options=options))
    unlimited = play(*gpu, workloads.Strangers(), linked())
    assert max(limited.between) <= limit < max(unlimited.between)


def test_a_limit_makes_no_queue_grow() -> None:
    """Blocks within this limit would make prompts three times slower than stock SGLang."""
    limit = 1.1 * tables(*A100_32B).seconds(Forward(decodes=8, context=1500))
    options = Options(intra_turn="off", itl_ms=f"{1000 * limit:.1f}")
    workload = chains("16:1200/300:4000/200")
    limited = play(*A100_32B, workload, replace(linked(), options=options))
    assert limited.latency < 1.1 * best_of_stock(*A100_32B, workload).latency


def test_unmixed_readers_begin_sooner() -> None:
    """With EAGLE, for instance: decodes wait for forwards of streams now and then."""
    workload = chains("8:1200/300:8000/100")
    stock = play(*H200_32B, workload, Setting(plugin=False))
    figures = play(*H200_32B, workload, replace(linked(), no_rides="EAGLE"))
    assert figures.latency < 1.03 * stock.latency and figures.gap < 0.4 * stock.gap
