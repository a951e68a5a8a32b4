"""What the plugin's HTTP side needs of the running SGLang server, and nothing more."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flashmoa_sglang import kv_free
from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.http import metrics
from flashmoa_sglang.http.errors import EngineBusy, EngineFailed, MalformedRequest
from flashmoa_sglang.http.stream import Prefilled, Terms
from flashmoa_sglang.http.token_buffer import canonical
from flashmoa_sglang.messages import (
    ForwardTime,
    Happened,
    KvQuery,
    KvReport,
    MeasuredCosts,
    ReleaseStream,
    RequestMark,
    RoomAgain,
    handle,
    unsent,
)
from flashmoa_sglang.releases import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashmoa_sglang.saturation import Saturation

_KV_REPORT_TIMEOUT = 5.0
_RID_PREFIX = "flashmoa-"
_OURS = "flashmoa_ours"
_DEFAULT_TERMS = Terms()


class Engine:
    """The tokenizer manager of this process.

    Args:
        tokenizer_manager: SGLang's ``TokenizerManager``.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        # ``None`` with --skip-tokenizer-init, and where the tokenizer cannot be used.
        self.tokenizer = canonical(tokenizer_manager.tokenizer)
        self._prefills = 0
        self._queries = itertools.count()
        self._reports: dict[int, tuple[list[KvReport], asyncio.Event]] = {}
        self._forwards: dict[str, ForwardTime] = {}
        self.keeps_kv = not kv_free.is_on()
        self.costs = UNMEASURED
        self.saturation: Saturation | None = None
        # Tokens of a forward for which prefills wait; ``None``: for none.
        self.waits_for: int | None = None
        self._handle(KvReport, self._on_report)
        self._handle(ForwardTime, lambda report: self._forwards.update({report.rid: report}))
        self._handle(Happened, _count)

    @cached_property
    def _arguments(self) -> Any:
        """SGLang's, as it resolved them."""
        return RELEASE.resolved(self._manager.server_args)

    @property
    def context_length(self) -> int:
        return self._manager.model_config.context_len

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt SGLang takes: bounded by the context and by the KV pool."""
        # SGLang asks for less than either of these; the schedulers tell the second at start.
        bounds = [self.context_length - self._manager.num_reserved_tokens]
        if self._manager.max_req_input_len is not None:
            bounds.append(self._manager.max_req_input_len)
        return min(bounds) - 1

    @property
    def vocabulary(self) -> int:
        return self._manager.model_config.vocab_size

    @property
    def page_size(self) -> int:
        return self._arguments.page_size or 1

    @property
    def largest_forward(self) -> int:
        """Prompt tokens that surely go in one forward, beside what others may have cached."""
        arguments = self._arguments
        chunk = arguments.chunked_prefill_size or 0
        longest = self._manager.max_req_input_len or self.context_length
        return min(chunk if chunk > 0 else arguments.max_prefill_tokens, longest // 2)

    async def most_tokens(self) -> int:
        """Return the tokens of a forward of as many prompts as it takes."""
        arguments = self._arguments
        chunk = arguments.chunked_prefill_size or 0
        bounds = [chunk, arguments.max_prefill_tokens, *(rank.total for rank in await self.kv())]
        return min(bound for bound in bounds if bound and bound > 0)

    @property
    def steps_together(self) -> bool:
        """Whether schedulers let prefills wait for nothing, as other ranks would wait, too."""
        return RELEASE.steps_together(self._arguments)

    @property
    def draining(self) -> bool:
        return self._manager.gracefully_exit

    @property
    def model(self) -> dict[str, str]:
        return {"path": self._manager.model_path, "name": self._manager.served_model_name}

    @property
    def role(self) -> str:
        """What it is in a PD pair: ``prefill``, ``decode``, or ``null`` where there is none."""
        return self._arguments.disaggregation_mode

    @property
    def data_parallel_ranks(self) -> int:
        """Schedulers with KV of their own; SGLang sends each request to any of them."""
        return RELEASE.data_parallel_ranks(self._arguments)

    def when_room(self, told: Callable[[tuple[str, ...]], None]) -> None:
        """Call ``told`` with the streams that may ask again, after they were refused for room."""
        self._handle(RoomAgain, lambda news: told(news.streams))

    def _handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        handle(self._manager._result_dispatcher, kind, handler)

    def in_flight(self) -> dict[str, int]:
        """Return what this process is busy with; idle, the same each time where nothing leaks."""
        return {"requests": len(self._manager.rid_to_state), "tasks": len(asyncio.all_tasks())}

    def others_active(self) -> bool:
        """Return whether ordinary requests are in flight beside our own prefills."""
        return len(self._manager.rid_to_state) > self._prefills

    async def prefill(
        self,
        input_ids: Sequence[int],
        *,
        stream: str | None = None,
        rid: str | None = None,
        terms: Terms = _DEFAULT_TERMS,
        http_request: Any = None,
    ) -> Prefilled:
        """Compute the KV of ``input_ids`` and leave it in the radix tree; sample nothing.

        Raises:
            Superseded: a longer request of the same stream took this one's place.
            NoRoom: requests need the KV pool; only increments of streams are refused so.
            EngineFailed: SGLang refused or aborted the prefill.
        """
        started = time.perf_counter()
        meta = await self._generate(
            list(input_ids),
            RequestMark(stream),
            rid=rid,
            terms=terms,
            http_request=http_request,
        )
        return Prefilled.read(meta, time.perf_counter() - started)

    async def _generate(
        self,
        input_ids: list[int],
        mark: RequestMark,
        *,
        new_tokens: int = 0,
        rid: str | None = None,
        terms: Terms = _DEFAULT_TERMS,
        http_request: Any = None,
    ) -> dict[str, Any]:
        """Run a request of the plugin's own; return the ``meta_info`` of its answer."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        work = GenerateReqInput(
            input_ids=input_ids,
            sampling_params={
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
                "custom_params": mark.to_custom_params(),
            },
            rid=rid or new_rid(),
            priority=terms.priority,
            routed_dp_rank=terms.dp_rank,
            # Increments would count every prompt token many times over.
            log_metrics=mark.stream is None and not mark.timed,
            **terms.namespace(),
            **(unsent() if self.role == "prefill" else {}),
        )
        setattr(work, _OURS, True)
        self._prefills += 1
        try:
            return await self._run(work, http_request)
        finally:
            self._prefills -= 1

    async def _run(self, work: Any, http_request: Any) -> dict[str, Any]:
        from fastapi import HTTPException

        try:
            async with aclosing(self._manager.generate_request(work, http_request)) as outputs:
                async for output in outputs:
                    return output["meta_info"]
        except ValueError as error:
            raise MalformedRequest(f"SGLang refuses this prefill: {error}") from error
        except HTTPException as error:
            if error.status_code != EngineBusy.status:
                raise EngineFailed(f"SGLang could not run the prefill: {error.detail}") from error
            raise EngineBusy(f"SGLang cannot take this prefill now: {error.detail}") from error
        raise EngineFailed("SGLang ended the prefill without an answer; see its log")

    async def time_forward(self, input_ids: Sequence[int]) -> ForwardTime:
        """Run one forward with these tokens; return its time as the scheduler sees it."""
        rid = new_rid()
        mark = RequestMark(timed=True)
        try:
            meta = await self._generate(list(input_ids), mark, rid=rid)
            Prefilled.read(meta)  # It may have been aborted.
            return self._forwards[rid]
        finally:
            self._forwards.pop(rid, None)

    async def time_answer(self, tokens: int) -> float:
        """Return the seconds of one request for so many tokens, waiting included."""
        started = time.perf_counter()
        # Of one token, so that nothing of the prompt can be in the cache.
        await self._generate([0], RequestMark(), new_tokens=tokens)
        return time.perf_counter() - started

    def use_costs(self, costs: Costs, waits_for: int | None) -> None:
        """Use these costs for decisions from now on, here and in every scheduler.

        ``waits_for``: tokens of a forward for which prefills wait; ``None``: for none.
        """
        self.costs, self.waits_for = costs, waits_for
        message = MeasuredCosts(costs.points, costs.decode_step, waits_for)
        RELEASE.to_scheduler(self._manager, message)

    def abort(self, rid: str) -> None:
        """Stop a prefill that is queued or running; unknown ids are ignored."""
        self._manager.abort_request(rid)

    def release(self, stream: str) -> None:
        """Give a stream's KV back to the cache, in every scheduler."""
        RELEASE.to_scheduler(self._manager, ReleaseStream(stream))

    async def kv(self) -> list[KvReport]:
        """Ask how the KV pool of each data-parallel rank stands, in tokens."""
        query = next(self._queries)
        reports: list[KvReport] = []
        complete = asyncio.Event()
        self._reports[query] = (reports, complete)
        try:
            self._manager.auto_create_handle_loop()
            RELEASE.to_scheduler(self._manager, KvQuery(query))
            await asyncio.wait_for(complete.wait(), _KV_REPORT_TIMEOUT)
        except TimeoutError:
            pass  # A scheduler in a long forward answers late; report what came.
        finally:
            del self._reports[query]
        return sorted(reports, key=lambda report: report.dp_rank)

    def _on_report(self, report: KvReport) -> None:
        waiting = self._reports.get(report.query)
        if waiting is None:
            return
        reports, complete = waiting
        reports.append(report)
        if len(reports) >= self.data_parallel_ranks:
            complete.set()


def is_ours(obj: Any) -> bool:
    """Return whether the plugin made this ``GenerateReqInput``; no client's body can say so."""
    return getattr(obj, _OURS, False)


def new_rid() -> str:
    """Make a request id. SGLang aborts by prefix of it, so none may be a prefix of another."""
    return f"{_RID_PREFIX}{uuid.uuid4().hex}"


def _count(happened: Happened) -> None:
    metrics.count("duplicate_tokens_avoided", happened.duplicates_avoided)
    metrics.count("streams_gave_way", happened.gave_way)
