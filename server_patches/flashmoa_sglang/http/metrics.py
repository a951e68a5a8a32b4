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


class _Meters:
    """The metrics of this process, all with the same labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR: importing reads it.
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._labels = labels
        self._counters: dict[str, Any] = {
            name: Counter(f"flashmoa:{name}_total", text, names) for name, text in _COUNTERS.items()
        }
        self._counters |= {
            name: Counter(f"flashmoa:{name}_total", text, [*names, label])
            for name, (label, text) in _LABELLED.items()
        }
        self._open: Any = Gauge(
            "flashmoa:streams_open",
            "Prompt streams that are open.",
            names,
            multiprocess_mode="mostrecent",
        )
        # Shown as zero from the start, so that what has not happened can be told from what is
        # not measured.
        self._open.labels(**labels).set(0)
        for name in _COUNTERS:
            self.count(name, 0)

    def count(self, name: str, amount: int, **more: str) -> None:
        # A counter refuses what is negative, and the exception would end the server.
        self._counters[name].labels(**self._labels, **more).inc(max(amount, 0))

    def set_open(self, streams: int) -> None:
        self._open.labels(**self._labels).set(streams)


_meters: _Meters | None = None


def start(server_args: Any) -> None:
    """Begin to count, where the server shows metrics."""
    global _meters
    if server_args.enable_metrics and _meters is None:
        more = server_args.extra_metric_labels or {}
        _meters = _Meters({"model_name": server_args.served_model_name, **more})


def streams_open(streams: int) -> None:
    if _meters is not None:
        _meters.set_open(streams)


def buffered(tokens: int) -> None:
    """A stream's certain tokens grew."""
    if _meters is not None and tokens > 0:
        _meters.count("stream_tokens_buffered", tokens)


def prefilled(tokens: int) -> None:
    """An increment was prefilled; ``tokens`` had to be computed for it."""
    if _meters is not None:
        _meters.count("stream_increments", 1)
        _meters.count("stream_tokens_prefilled", tokens)


def final(status: str, late_tokens: int) -> None:
    """A request that named a stream had its prompt computed."""
    if _meters is not None:
        _meters.count("finals", 1, status=status)
        _meters.count("final_late_tokens", late_tokens)


def ended(ending: str) -> None:
    """A stream is over."""
    if _meters is not None:
        _meters.count("streams_ended", 1, ending=ending)


def duplicates_avoided(tokens: int) -> None:
    """A scheduler computed once what several requests share: ``tokens`` fewer than without."""
    if _meters is not None:
        _meters.count("duplicate_tokens_avoided", tokens)


def gave_way(streams: int) -> None:
    """A scheduler gave up the locks of so many streams."""
    if _meters is not None:
        _meters.count("streams_gave_way", streams)
