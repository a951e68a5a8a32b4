"""Read the Grafana board: its queries, and the metrics they use."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[3] / "docs" / "grafana" / "flashmoa.json"


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel; ``promql`` is the board's query, with Grafana's variables."""

    panel: str
    legend: str
    promql: str

    def fill_in(self, interval: str) -> str:
        """Return the query as Grafana sends it for all engines."""
        return self.promql.replace("$__rate_interval", interval).replace("$instance", ".+")


def queries() -> list[Query]:
    board: dict[str, Any] = json.loads(BOARD.read_text())
    return [
        Query(panel["title"], target["legendFormat"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def metric_names() -> set[str]:
    """Return the metrics of all queries and of the board's variables, as regular expressions.

    They are expressions since OpenMetrics, one of the formats of ``/metrics``, allows no colon.
    """
    return set(re.findall(r"\b(?:flashmoa|sglang)\[:_\]\w+", BOARD.read_text()))
