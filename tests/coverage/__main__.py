"""Count the linked calls of agent frameworks, for each way to compose agents.

    python -m tests.coverage [FRAMEWORK ...] [--at-once N] [--json FILE]

starts an engine with a tiny model on this CPU, runs each program of `tests/coverage` twice linked
and once unlinked, and prints a table. It runs in a clone after `make setup`. Most frameworks need
`make .venvs/frameworks/.ready .venvs/frameworks-openai2/.ready`, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio import CapacityLimiter, create_task_group

from flashmoa.engine.local import local_engines, tiny_model, wait_for_costs

_ROOT = Path(__file__).parents[2]
_GUIDE = _ROOT / "examples" / "guides" / "nepal.md"
# Each framework's module here, its name, and the environment that it runs in.
FRAMEWORKS = {
    "autogen": ("AutoGen", ".venv"),
    "agent_framework": ("Agent Framework", ".venv"),
    "adk": ("Google ADK", ".venvs/frameworks"),
    "langgraph": ("LangGraph", ".venvs/frameworks"),
    "agents_sdk": ("OpenAI Agents SDK", ".venvs/frameworks"),
    "pydantic_ai": ("Pydantic AI", ".venvs/frameworks"),
    "crewai": ("CrewAI", ".venvs/frameworks-openai2"),
    "smolagents": ("smolagents", ".venvs/frameworks"),
    "dspy": ("DSPy", ".venvs/frameworks"),
    "llama_index": ("LlamaIndex", ".venvs/frameworks-openai2"),
}
Row = dict[str, Any]


async def measure(framework: str, url: str) -> list[Row]:
    """Return the rows of a framework."""
    python = _ROOT / FRAMEWORKS[framework][1] / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is missing; run `make {python.parents[1]}/.ready`")
    paths = (_ROOT, _ROOT / "server_patches", _ROOT / "benchmarks")
    done = await anyio.run_process(
        [str(python), "-m", "tests.coverage.measure", framework, url],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stderr=subprocess.STDOUT,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise SystemExit(f"{framework} failed:\n{output[-3000:]}")
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"composition')]
    return [{"framework": FRAMEWORKS[framework][0], **row} for row in rows]


async def measure_all(frameworks: list[str], at_once: int) -> list[Row]:
    """Start an engine, and return the rows of all frameworks in their order."""
    model = tiny_model("test", [_GUIDE], _ROOT / ".cache" / "models")
    found: dict[str, list[Row]] = {}
    async with local_engines() as engines:
        arguments = ["--max-total-tokens", "60000", "--enable-cache-report"]
        arguments += ["--tool-call-parser", "qwen25"]
        engine = await engines.start(model, core=1, arguments=arguments)
        await wait_for_costs(engine.url)
        limiter = CapacityLimiter(at_once)

        async def run(framework: str) -> None:
            async with limiter:
                found[framework] = await measure(framework, engine.url)
            print(f"{framework}: {len(found[framework])} programs", flush=True)

        async with create_task_group() as group:
            for framework in frameworks:
                group.start_soon(run, framework)
    return [row for framework in frameworks for row in found[framework]]


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    columns = ("first run", "second run", "streamed")
    names = ["framework", "agents", *columns, *(f"{name}, tools" for name in columns), "why not"]
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    keys = dict.fromkeys((row["framework"], row["composition"]) for row in rows)
    for key in keys:
        cells, reasons = [*key], Counter[str]()
        for tools in (False, True):
            row = find_row(rows, *key, tools)
            if row is None or "error" in row:
                cells += ["failed" if row else ""] * len(columns)
                continue
            first, second = row["first"], row["second"]
            cells += [f"{run['linked']} of {run['linkable']}" for run in (first, second)]
            cells.append(f"{second['streamed']} of {second['reading']}")
            reasons.update(second["reasons"])
        yield f"| {' | '.join(cells)} | {describe(reasons)} |"


def find_row(rows: list[Row], framework: str, composition: str, tools: bool) -> Row | None:
    key = (framework, composition, tools)
    found = (row for row in rows if (row["framework"], row["composition"], row["tools"]) == key)
    return next(found, None)


def describe(reasons: Mapping[str, int]) -> str:
    """Return the reasons, without the texts before calls of tools, which nobody reads."""
    shown = {text: count for text, count in reasons.items() if not text.endswith("it calls tools")}
    return "; ".join(f"{text} ({count})" for text, count in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(FRAMEWORKS))
    parser.add_argument("--at-once", type=int, default=1, help="frameworks that run at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows")
    arguments = parser.parse_args()
    for name in arguments.frameworks:
        if name not in FRAMEWORKS:
            parser.error(f"{name!r} is no framework here; these are: {', '.join(FRAMEWORKS)}")
    rows = anyio.run(measure_all, arguments.frameworks or [*FRAMEWORKS], arguments.at_once)
    print("\n".join(table(rows)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
