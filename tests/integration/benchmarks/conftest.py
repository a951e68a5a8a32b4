"""Run a benchmark from its command line to its JSON, on running engines."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from flashmoa.cli import bench
from flashmoa.engine.local import LocalEngine


class Bench:
    """Runs benchmarks on the session's engines, each in a separate event loop."""

    def __init__(self, stock: str, plugin: str, other: str, folder: Path) -> None:
        self._urls = {"stock": stock, "flashmoa": plugin, "streaming": plugin, "sjf": plugin}
        self._urls |= {"fcfs": stock, "flashmoa-2": other, "writer": other}
        self._urls |= {"small": plugin, "medium": plugin, "large": plugin}
        self._urls |= {f"stock-{size}": stock for size in ("small", "medium", "large")}
        self._urls |= {f"sjf-{size}": plugin for size in ("small", "large")}
        self._urls |= {"stock-mixed": stock, "engine-1": plugin, "engine-2": other}
        self._json = folder / "results.json"

    async def run(
        self, name: str, roles: list[str], *arguments: str, rounds: bool = True
    ) -> dict[str, Any]:
        """Run a benchmark, once if it has rounds, and return its results."""
        urls = [part for role in roles for part in (f"--{role}-url", self._urls[role])]
        repeats = ["--repeats", "1"] if rounds else []
        command = [name, *repeats, "--json", str(self._json), *urls, *arguments]
        assert await anyio.to_thread.run_sync(bench, command) == 0
        document = json.loads(self._json.read_text())
        assert document["bench"] == name.replace("-", "_")
        assert document["machine"]["cpu"] and document["versions"]["flashmoa"]
        assert any(engine["plugin"] for engine in document["engines"].values())
        return document["results"]


@pytest.fixture
def benches(
    plain_engine: LocalEngine, downstream: LocalEngine, engine: LocalEngine, tmp_path: Path
) -> Bench:
    return Bench(plain_engine.url, downstream.url, engine.url, tmp_path)
