"""Run every query of the Grafana board on a real Prometheus that scrapes a real engine.

    .venv/bin/python -m tests.integration.monitoring.run docs/results/cpu/grafana.json

Starts an engine on the CPU and keeps it under load (linked calls, some with the same prompt, and
more than its KV pool holds) while Prometheus scrapes it. Needs ``prometheus`` on the PATH.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import anyio
import httpx
from rich.console import Console
from rich.table import Table

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import local_engines
from flashmoa.engine.tiny_models import tiny_model
from tests.integration.monitoring.board import Query, queries

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "examples" / "guides" / "nepal.md"
POOL_TOKENS = 5000
LOAD_SECONDS = 40.0
# Grafana's rate interval is four scrape intervals.
SCRAPE, RATE = "1s", "4s"


def main(out: str | None = None) -> int:
    if shutil.which("prometheus") is None:
        print("prometheus is not on the PATH; on Debian: apt-get install prometheus")
        return 2
    rows = anyio.run(_run_queries)
    _show(rows)
    if out is not None:
        kept = {"command": f"python -m tests.integration.monitoring.run {out}", "queries": rows}
        Path(out).write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(row["samples"] == 0 for row in rows))


async def _run_queries() -> list[dict[str, Any]]:
    model = tiny_model("test", [GUIDE], ROOT / ".cache" / "models")
    arguments = ["--enable-metrics", "--max-total-tokens", str(POOL_TOKENS)]
    async with local_engines() as engines:
        engine = await engines.start(model, core=0, arguments=arguments)
        async with _prometheus(engine.url) as http, EngineClient(engine.url) as client:
            begin = time.time()
            await _load(client)
            return [await _ask(http, query, begin, time.time()) for query in queries()]


async def _load(client: EngineClient) -> None:
    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(_chains, client, number, time.monotonic() + LOAD_SECONDS)


async def _chains(client: EngineClient, number: int, until: float) -> None:
    """Run a writer and two reviewers in a loop; both reviewers have the same, streamed prompt."""
    guide, more = GUIDE.read_text(), {"model": "tiny", "ignore_eos": True, "temperature": 0}
    turn = 0
    while time.monotonic() < until:
        turn += 1
        async with Workflow(client) as flow:
            task = f"{number}.{turn}: {guide[turn % 50 :][:1500]} Plan."
            draft = flow.ask([{"role": "user", "content": task}], max_tokens=60, **more)
            review = [{"role": "user", "content": f"{task} Shorten: {draft}"}]
            answers = [flow.ask(review, max_tokens=10, **more) for _ in range(2)]
            for answer in answers:
                await answer


@asynccontextmanager
async def _prometheus(engine: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Start a Prometheus that scrapes the engine; yield a client of its HTTP API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        scrape = {
            "job_name": "sglang",
            "scrape_interval": SCRAPE,
            "static_configs": [{"targets": [engine.removeprefix("http://")]}],
        }
        # Prometheus reads YAML, of which JSON is a part.
        config = Path(folder) / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ]
        process = await anyio.open_process(command, stdout=DEVNULL, stderr=DEVNULL)
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as http:
                await _wait_until_ready(http)
                yield http
        finally:
            process.terminate()
            await process.wait()


async def _wait_until_ready(http: httpx.AsyncClient) -> None:
    with anyio.fail_after(30):
        while True:
            try:
                if (await http.get("/-/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await anyio.sleep(0.1)


async def _ask(http: httpx.AsyncClient, query: Query, begin: float, end: float) -> dict[str, Any]:
    """Run a query over the whole run; return its numeric samples' number, mean and maximum."""
    parameters = {"query": query.fill_in(RATE), "start": begin, "end": end, "step": SCRAPE}
    answer = (await http.get("/api/v1/query_range", params=parameters)).json()
    if answer["status"] != "success":
        raise RuntimeError(f"{query.panel}: {answer['error']}")
    series = answer["data"]["result"]
    values = [float(value) for entry in series for _, value in entry["values"]]
    numbers = [value for value in values if not math.isnan(value)]
    return {
        "panel": query.panel,
        "legend": query.legend,
        "query": parameters["query"],
        "series": [entry["metric"] for entry in series],
        "samples": len(numbers),
        "highest": max(numbers, default=None),
        "mean": sum(numbers) / len(numbers) if numbers else None,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("panel", "line", "samples", "mean", "highest")
    for row in rows:
        figures = [f"{row[n]:.3g}" if row[n] is not None else "-" for n in ("mean", "highest")]
        table.add_row(row["panel"], row["legend"], str(row["samples"]), *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
