"""Figures of prompt streams on SGLang's own ``/metrics``, with ``--enable-metrics``.

Kept in the HTTP process, where streams live; what schedulers count reaches it in messages.
Without ``--enable-metrics`` each call here returns at once.
"""

from __future__ import annotations

from typing import Any

_COUNTERS = {
    "stream_tokens_buffered": "Tokens received by prompt streams.",
    "stream_tokens_prefilled": "Tokens of prompt streams computed before their request came.",
    "stream_increments": "Prefills of prompt streams.",
    "duplicate_tokens_avoided": "Tokens that several requests share and one of them computed.",
    "streams_gave_way": "Prompt streams whose KV became evictable because others needed room.",
    "final_late_tokens": "Prompt tokens that requests with a prompt stream computed themselves.",
}
_LABELLED = {
    "finals": ("status", "Requests with a prompt stream, by what came of it."),
    "streams_ended": ("ending", "Prompt streams that are over, by how they ended."),
}
# Of this process, by name; empty where metrics are not shown.
_metrics: dict[str, Any] = {}
_labels: dict[str, str] = {}


def start(server_args: Any) -> None:
    """Begin to count, where the server shows metrics."""
    if not server_args.enable_metrics or _metrics:
        return
    # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR: importing reads it.
    from prometheus_client import Counter, Gauge

    more = server_args.extra_metric_labels or {}
    _labels.update({"model_name": server_args.served_model_name, **more})
    names = list(_labels)
    for name, text in _COUNTERS.items():
        _metrics[name] = Counter(f"flashmoa:{name}_total", text, names)
    for name, (label, text) in _LABELLED.items():
        _metrics[name] = Counter(f"flashmoa:{name}_total", text, [*names, label])
    _metrics["streams_open"] = Gauge(
        "flashmoa:streams_open",
        "Prompt streams that are open.",
        names,
        multiprocess_mode="mostrecent",
    )
    # Shown as zero from the start, so that what has not happened can be told from what is not
    # measured.
    set_open(0)
    for name in _COUNTERS:
        count(name, 0)


def count(name: str, amount: int = 1, **labels: str) -> None:
    """Add to a counter of ``_COUNTERS`` or ``_LABELLED``; a negative amount counts as zero."""
    if _metrics:
        # A counter refuses what is negative, and the exception would end the server.
        _metrics[name].labels(**_labels, **labels).inc(max(amount, 0))


def set_open(streams: int) -> None:
    """Show how many streams are open."""
    if _metrics:
        _metrics["streams_open"].labels(**_labels).set(streams)
