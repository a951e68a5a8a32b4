"""Read the queries of the Grafana board, and the metrics that they use."""

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
    """A line of a panel; ``promql`` is the board's query, with Grafana's variables."""

    panel: str
    legend: str
    promql: str

    def filled_in(self, interval: str) -> str:
        """Return the query as Grafana sends it for all engines."""
        return self.promql.replace("$__rate_interval", interval).replace("$instance", ".+")


def queries() -> list[Query]:
    return list(_queries())


def metric_names() -> set[str]:
    """Return the metrics of all queries and of the board's variables, as regular expressions.

    A name differs between the formats of ``/metrics``: OpenMetrics allows no colon in it.
    """
    return set(re.findall(r"\b(?:flashmoa|sglang)\[:_\]\w+", BOARD.read_text()))


def _queries() -> Iterator[Query]:
    board: dict[str, Any] = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["legendFormat"], target["expr"])
