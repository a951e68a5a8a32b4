"""Metrics of prompt streams on SGLang's own ``/metrics``, with ``--enable-metrics``.

The HTTP process keeps them, because it has the streams; schedulers send it their counts. Without
``--enable-metrics`` every function here does nothing.
"""

from __future__ import annotations

from typing import Any

_COUNTERS = {
    "stream_tokens_buffered": "Tokens received by prompt streams.",
    "stream_tokens_prefilled": "Tokens of prompt streams computed before their request came.",
    "stream_increments": "Prefills of prompt streams.",
    "duplicate_tokens_avoided": "Tokens that several requests share and one of them computed.",
    "streams_gave_way": "Prompt streams whose KV became evictable because others needed room.",
    "tool_calls_held": "Answers with tool calls whose agent's next prompt was held meanwhile.",
    "final_late_tokens": "Prompt tokens that requests with a prompt stream computed themselves.",
}
_LABELLED = {
    "finals": ("status", "Requests with a prompt stream, by the status of its use."),
    "streams_ended": ("ending", "Prompt streams that have ended, by how they ended."),
}
# The metrics of this process by name; empty without --enable-metrics.
_metrics: dict[str, Any] = {}
_labels: dict[str, str] = {}


def start(server_args: Any) -> None:
    """Create the metrics, if the server shows any."""
    if not server_args.enable_metrics or _metrics:
        return
    # This import reads PROMETHEUS_MULTIPROC_DIR, which SGLang sets at start.
    from prometheus_client import Counter, Gauge

    extra_labels = server_args.extra_metric_labels or {}
    _labels.update({"model_name": server_args.served_model_name, **extra_labels})
    names = list(_labels)
    for name, text in _COUNTERS.items():
        _metrics[name] = Counter(f"flashmoa:{name}_total", text, names)
    for name, (label, text) in _LABELLED.items():
        _metrics[name] = Counter(f"flashmoa:{name}_total", text, [*dict.fromkeys([*names, label])])
    _metrics["streams_open"] = Gauge(
        "flashmoa:streams_open",
        "Prompt streams that are open.",
        names,
        multiprocess_mode="mostrecent",
    )
    # Zeros are shown from the start, to distinguish them from something that is not measured.
    set_open(0)
    for name in _COUNTERS:
        count(name, 0)


def count(name: str, amount: int = 1, **labels: str) -> None:
    """Add to a counter of ``_COUNTERS`` or ``_LABELLED``; a negative amount counts as zero."""
    if _metrics:
        # A counter raises at a negative amount, and the exception would end the server.
        _metrics[name].labels(**{**_labels, **labels}).inc(max(amount, 0))


def set_open(streams: int) -> None:
    if _metrics:
        _metrics["streams_open"].labels(**_labels).set(streams)
