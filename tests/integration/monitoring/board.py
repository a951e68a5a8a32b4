"""The Grafana board: what it asks, and of which metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[3] / "docs" / "grafana" / "flashmoa.json"


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel. ``promql`` as the board has it, with Grafana's variables."""

    panel: str
    legend: str
    promql: str

    def filled_in(self, interval: str) -> str:
        """As Grafana sends it for all engines."""
        return self.promql.replace("$__rate_interval", interval).replace("$instance", ".+")


def queries() -> list[Query]:
    return list(_queries())


def metric_names() -> set[str]:
    """Of all queries, and of the board's variables; as regular expressions, since a name is not
    the same in each format of ``/metrics``: OpenMetrics has no colons in it."""
    return set(re.findall(r"\b(?:flashmoa|sglang)\[:_\]\w+", BOARD.read_text()))


def _queries() -> Iterator[Query]:
    board: dict[str, Any] = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["legendFormat"], target["expr"])
