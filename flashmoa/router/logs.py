"""What routers keep out of logs: whoever knows a prompt stream's id can use it."""

from __future__ import annotations

import logging

from flashmoa.router.paths import STREAMS

# Both write a line for each request, with its path.
_LOGGERS = ("httpx", "uvicorn.access")


def hide_streams() -> None:
    """Keep requests about one prompt stream out of the logs of HTTP clients and servers."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_names_no_stream)


def _names_no_stream(record: logging.LogRecord) -> bool:
    return f"{STREAMS}/" not in record.getMessage()
