"""``KvReports``: asks the schedulers about their KV pools."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from flashmoa_sglang.messages import KvQuery, KvReport, handle
from flashmoa_sglang.releases import RELEASE

_TIMEOUT = 5.0


class KvReports:
    """Collects the reports of all schedulers.

    Args:
        tokenizer_manager: SGLang's ``TokenizerManager``.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        self._queries = itertools.count()
        self._waiting: dict[int, asyncio.Queue[KvReport]] = {}
        handle(tokenizer_manager._result_dispatcher, KvReport, self._receive)

    async def ask(self, ranks: int) -> list[KvReport]:
        """Return the reports of the data-parallel ranks, fewer if some take seconds."""
        query = next(self._queries)
        received = self._waiting[query] = asyncio.Queue[KvReport]()
        reports: list[KvReport] = []
        try:
            self._manager.auto_create_handle_loop()
            RELEASE.to_scheduler(self._manager, KvQuery(query))
            async with asyncio.timeout(_TIMEOUT):
                while len(reports) < ranks:
                    reports.append(await received.get())
        except TimeoutError:
            pass  # A scheduler in a long forward answers late. The other reports are returned.
        finally:
            del self._waiting[query]
        return sorted(reports, key=lambda report: report.dp_rank)

    def _receive(self, report: KvReport) -> None:
        if (waiting := self._waiting.get(report.query)) is not None:
            waiting.put_nowait(report)
