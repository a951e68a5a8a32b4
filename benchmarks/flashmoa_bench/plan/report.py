"""Print the answers of a plan (``show``)."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from flashmoa.observe import LinkDeclined, LinkWaits
from flashmoa.observe.timeline import draw, lanes
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.plan.result import PlanResult, Wait
from flashmoa_bench.plan.runs import WAYS, TeamRun

# A smaller share of the bound may be this machine's doing.
_MOSTLY_REACHED = 0.8


def show(result: PlanResult, console: Console) -> None:
    """Print the answers, tables of calls and engines, and a timeline of each way."""
    console.print(f"\n{result.describe_gpus()}", markup=False)
    console.print(
        f"Modelled, not measured on GPUs. Medians (ranges); rounds: {result.rounds}, "
        f"copies at once: {result.copies}.\n"
    )
    _print_answers(result, console)
    console.print(_make_wait_table(result))
    console.print(
        "TTFT: from the request to the first token, ~ where the answer comes in one piece; "
        "hideable: what of it links could hide at most\n"
    )
    console.print(_make_engine_table(result))
    for way, run in result.typical.items():
        console.print(f"\n{way} ({run.seconds:.2f} s)")
        console.print(
            draw(lanes(run.events), min(console.width, 110)), markup=False, highlight=False
        )
    for line in _notes(result.typical["linked"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_answers(result: PlanResult, console: Console) -> None:
    unlinked, saved, most = result.seconds["unlinked"], result.saved, result.bound
    decode = sum(wait.decode for wait in result.waits)
    reached = f", links reach {saved / most:.0%} of that" if most > 0 else ""
    spread = {way: f"{low:.2f} to {high:.2f}" for way, (low, high) in result.spread.items()}
    console.print(f"unlinked    {unlinked:7.2f} s   ({spread['unlinked']})")
    console.print(
        f"linked      {result.seconds['linked']:7.2f} s   ({spread['linked']}), saves "
        f"{saved:.2f} s, {saved / unlinked:.0%}"
    )
    console.print(f"the bound   {unlinked - most:7.2f} s   would save {most:.2f} s{reached}")
    console.print(f"decoding    {decode:7.2f} s   of the unlinked time; links do not change it")
    busiest = result.busiest
    console.print(
        f"busiest     {busiest.busy['unlinked']:7.0%}     {busiest.name} computes; near 100% it is "
        "the bottleneck",
        markup=False,
    )
    if saved < _MOSTLY_REACHED * most:
        console.print(
            "If a larger --slowdown brings linked nearer to the bound, this machine's clients and "
            "HTTP take the time that is missing, and not the GPUs."
        )
    if result.slowdown != 1:
        scale = result.slowdown
        console.print(
            f"These times are those of GPUs {scale:g} times slower. At their own speed: unlinked "
            f"{unlinked / scale:.2f} s, linked {result.seconds['linked'] / scale:.2f} s, saved "
            f"{saved / scale:.2f} s, at most {most / scale:.2f} s."
        )
    console.print()


def _make_wait_table(result: PlanResult) -> Table:
    table = make_table(
        "Calls that the end of the unlinked run waits for",
        *("agent", "engine", "prompt", "TTFT", "hideable", "TTFT linked", "decode"),
        left=("agent", "engine"),
        box=box.SIMPLE_HEAD,
    )
    for wait, linked in zip(result.waits, result.linked_waits, strict=True):
        table.add_row(
            wait.agent if wait.turn == 1 else f"{wait.agent} ({wait.turn})",
            wait.engine,
            str(wait.prompt_tokens),
            _first_token(wait),
            f"{wait.avoidable * 1000:.0f} ms",
            "-" if linked is None else _first_token(linked),
            f"{wait.decode:.2f} s",
        )
    return table


def _first_token(wait: Wait) -> str:
    return f"{'~' if wait.is_estimated else ''}{wait.prefill * 1000:.0f} ms"


def _make_engine_table(result: PlanResult) -> Table:
    table = make_table(
        "Share of the time in which the GPU computes",
        *("engine", "agents", *WAYS),
        left=("engine", "agents"),
        box=box.SIMPLE_HEAD,
    )
    for engine in result.engines:
        shares = [f"{engine.busy[way]:.0%}" for way in WAYS]
        table.add_row(engine.name, ", ".join(engine.agents) or "none", *shares)
    return table


def _notes(linked: TeamRun) -> list[str]:
    """Return why agents were not linked, or not fully."""
    lines: dict[str, None] = {}
    for event in linked.events:
        if isinstance(event, LinkDeclined):
            lines[f"{event.agent} is not linked: {event.reason}"] = None
        elif isinstance(event, LinkWaits):
            lines[f"the link to {event.agent} waits for {event.upstream}: {event.reason}"] = None
    return list(lines)
