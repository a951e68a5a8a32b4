"""Test the plugin's metrics beside an operator's own labels."""

from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from flashmoa_sglang.http import metrics


@pytest.mark.parametrize("label", ["status", "ending", "team"])
def test_an_operators_label_may_have_any_name(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        kind = partial(getattr(prometheus_client, name), registry=registry)
        monkeypatch.setattr(prometheus_client, name, kind)
    monkeypatch.setattr(metrics, "_metrics", {})
    monkeypatch.setattr(metrics, "_labels", {})
    labels = {label: "own"}
    arguments = SimpleNamespace(
        enable_metrics=True, served_model_name="m", extra_metric_labels=labels
    )
    metrics.start(arguments)
    metrics.count("finals", status="open")
    metrics.count("streams_ended", ending="used")
    metrics.set_open(3)

    def value(name: str, **own: str) -> float | None:
        return registry.get_sample_value(f"flashmoa:{name}", {"model_name": "m", **labels, **own})

    assert value("finals_total", status="open") == value("streams_ended_total", ending="used") == 1
    assert value("streams_open") == 3
