"""``Engine``: everything that the plugin's HTTP side needs of the running SGLang server."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.http.errors import DecodesOnly, EngineBusy, EngineFailed, MalformedRequest
from flashmoa_sglang.http.stream import Terms
from flashmoa_sglang.http.tokens.token_buffer import make_canonical
from flashmoa_sglang.messages import (
    STREAM_OPENED,
    CompareTexts,
    ForwardTimes,
    HearAnswers,
    KvQuery,
    KvReport,
    MeasuredCosts,
    ReleaseStream,
    RequestMark,
    Similarities,
    StreamTokens,
    handle,
    unsent,
)
from flashmoa_sglang.moe import kv_free
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence

    from flashmoa_sglang.moe.saturation import Saturation

_OURS = "flashmoa_ours"
_DEFAULT_TERMS = Terms()
# The sampling parameters that hold a grammar.
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Parameters of a request that generates nothing. --preferred-sampling-params may have a grammar or
# a least length, which are not for such requests.
PREFILL_ONLY = {"max_new_tokens": 0, "min_new_tokens": 0, **dict.fromkeys(GRAMMARS)}


class Engine:
    """Wraps SGLang's ``TokenizerManager`` of this process."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        # ``None`` with --skip-tokenizer-init, and if the tokenizer cannot be used.
        self.tokenizer = make_canonical(tokenizer_manager.tokenizer)
        # Number of requests that run only for the times of their forwards.
        self._timed = self._changes = 0
        # What the engine lacks at the moment, and without which it can run nothing: kinds of memory
        # that it has released, and "update" while its weights are updated.
        self.lacks = set[str]()
        self._queries = itertools.count()
        # The schedulers' answers to each query.
        self._reports: dict[int | None, asyncio.Queue[Any]] = {}
        self.costs = UNMEASURED
        self.saturation: Saturation | None = None
        # Prefills wait for a forward of this many tokens; ``None``: they do not wait.
        self.waits_for: int | None = None
        self.handle(KvReport, self._receive)
        self.handle(Similarities, self._receive)
        # Costs may be read from a file. A message without a handler would end SGLang's process.
        self.handle(ForwardTimes, lambda _: None)

    @cached_property
    def _arguments(self) -> Any:
        return RELEASE.resolve_arguments(self._manager.server_args)

    @property
    def context_length(self) -> int:
        return self._manager.model_config.context_len

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that SGLang takes, by the context and by the KV pool."""
        # A prompt must be shorter than each bound. Schedulers send the second bound at start.
        bounds = [self.context_length - self._manager.num_reserved_tokens]
        if self._manager.max_req_input_len is not None:
            bounds.append(self._manager.max_req_input_len)
        return min(bounds) - 1

    @property
    def hidden_size(self) -> int:
        return self._manager.model_config.hidden_size

    @property
    def vocabulary(self) -> int:
        return self._manager.model_config.vocab_size

    @property
    def has_radix_cache(self) -> bool:
        return not self._arguments.disable_radix_cache

    @property
    def max_unchunked_prompt(self) -> int:
        """Length of the longest prompt that is computed in one forward, even with a full cache."""
        arguments = self._arguments
        chunk = arguments.chunked_prefill_size or 0
        longest = self._manager.max_req_input_len or self.context_length
        return min(chunk if chunk > 0 else arguments.max_prefill_tokens, longest // 2)

    def largest_forward(self, ranks: Sequence[KvReport]) -> int:
        """Return the number of tokens in the largest forward of one of the ranks."""
        bounds = [self._arguments.chunked_prefill_size, self._arguments.max_prefill_tokens]
        bounds += [rank.total for rank in ranks]
        return min(bound for bound in bounds if bound and bound > 0)

    def streams_pieces(self, obj: Any) -> bool:
        """Return whether each output of a ``GenerateReqInput`` has only the new text."""
        return bool(obj.stream and self._arguments.incremental_streaming_output)

    @property
    def max_queued_requests(self) -> int | None:
        """Number of requests that may wait in a scheduler, if limited; SGLang refuses others."""
        return self._arguments.max_queued_requests

    @property
    def packs_items(self) -> bool:
        """Whether SGLang's /v1/score packs the items of a list into one prompt."""
        return self._arguments.enable_mis

    @property
    def warming_up(self) -> bool:
        return self._manager.server_status.value == "Starting"

    @property
    def draining(self) -> bool:
        return self._manager.gracefully_exit

    @property
    def model(self) -> dict[str, str]:
        return {"path": self._manager.model_path, "name": self._manager.served_model_name}

    @property
    def role(self) -> str | None:
        """The engine's role in a PD pair, ``prefill`` or ``decode``; ``None`` without a pair."""
        mode = self._arguments.disaggregation_mode
        return None if mode == "null" else mode

    def require_prefills(self) -> None:
        if self.role == "decode":
            raise DecodesOnly(
                "This engine decodes for a PD pair and prefills nothing; send the request to the "
                "pair's prefill engine."
            )

    def why_no_kv(self) -> str | None:
        """Return why this engine keeps no KV of prompts; ``None`` if it does."""
        if kv_free.is_on():
            return kv_free.KEEPS_NONE
        if not self.has_radix_cache:
            return "This engine keeps no KV of prompts (--disable-radix-cache)"
        # SGLang's loop lets the stages agree on the requests that may start, without increments.
        if self.role == "prefill" and self._arguments.pp_size > 1:
            return "This engine prefills for a PD pair in stages (--pp-size)"
        return None

    def require_kv(self) -> None:
        """Refuse a request if this engine keeps no KV of prompts."""
        self.require_prefills()
        if (reason := self.why_no_kv()) is not None:
            raise MalformedRequest(
                f"{reason}, so nothing can be prefilled ahead; send the whole request instead."
            )

    def own_priority(self, urgency: int) -> int | None:
        """Return SGLang's priority of a request; ``None`` if this engine has no priorities.

        Args: urgency: a larger number is more urgent, whatever the engine's order.
        """
        if not self._arguments.enable_priority_scheduling:
            return None
        return -urgency if self._arguments.schedule_low_priority_values_first else urgency

    @property
    def data_parallel_ranks(self) -> int:
        """Number of schedulers that share the requests, each with its own KV pool."""
        return RELEASE.data_parallel_ranks(self._arguments)

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        handle(self._manager._result_dispatcher, kind, handler)

    def in_flight(self) -> dict[str, int]:
        """Return the numbers of requests and tasks, which are constant in an idle process."""
        return {"requests": len(self._manager.rid_to_state), "tasks": len(asyncio.all_tasks())}

    @property
    def may_measure(self) -> bool:
        """Whether requests that measure the engine may begin."""
        is_free = not (self.warming_up or self.draining or self.others_active())
        return is_free and not (self._changes or self.lacks or self._manager.is_pause)

    @asynccontextmanager
    async def change(self) -> AsyncGenerator[None]:
        """Let the requests that measure the engine end, and begin none in the meantime."""
        self._changes += 1
        try:
            while self._timed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if self.costs is UNMEASURED:
                # A scheduler ends a forward one step after it has sent the result.
                for _ in range(2):
                    await self.kv()
            yield
        finally:
            self._changes -= 1

    def others_active(self) -> bool:
        """Return whether requests are in flight that do not measure the engine.

        SGLang's own health checks do not count.
        """
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

        rids = self._manager.rid_to_state
        return sum(not rid.startswith(HEALTH_CHECK_RID_PREFIX) for rid in rids) > self._timed

    async def open_stream(self, stream: str, terms: Terms) -> None:
        """Open a prompt stream in its scheduler. Raises: as :meth:`run`."""
        # SGLang requires a token. The stream's tokens follow in messages.
        try:
            mark = RequestMark(stream, opens=True, expected_output=terms.expected_output)
            await self.generate([0], mark, terms=terms)
        except EngineBusy as error:
            if STREAM_OPENED not in str(error):
                raise

    def send(self, message: StreamTokens | HearAnswers) -> None:
        """Send a message to every scheduler."""
        RELEASE.to_scheduler(self._manager, message)

    async def generate(  # noqa: PLR0913 - these are a request's fields
        self,
        input_ids: list[int],
        mark: RequestMark,
        *,
        new_tokens: int = 0,
        rid: str | None = None,
        terms: Terms = _DEFAULT_TERMS,
        http_request: Any = None,
        on_token: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Run one of the plugin's own requests. Return the ``meta_info`` of its answer.

        Without ``new_tokens``, the request computes its KV for the radix tree and samples nothing.

        Args: on_token: called with the ``meta_info`` whenever the answer has grown.
        Raises: as :meth:`run`, and EngineFailed if SGLang has aborted the request.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=input_ids,
            sampling_params={
                **PREFILL_ONLY,
                "max_new_tokens": new_tokens,
                "temperature": 0,  # Otherwise SGLang sorts the logits of the whole batch.
                "ignore_eos": True,
                "custom_params": mark.to_custom_params(),
            },
            rid=rid or new_rid(),
            stream=on_token is not None,
            priority=terms.priority,
            routed_dp_rank=terms.dp_rank,
            log_metrics=mark.stream is None and not mark.timed,
            **terms.namespace(),
            **(unsent() if self.role == "prefill" else {}),
        )
        self._timed += mark.timed
        meta: dict[str, Any] | None = None
        try:
            async with aclosing(self.run(request, http_request)) as outputs:
                async for output in outputs:
                    meta = output["meta_info"]
                    if on_token is not None:
                        on_token(output["meta_info"])
        finally:
            self._timed -= mark.timed
        if meta is None:
            raise EngineFailed("SGLang ended the prefill without an answer; see its log")
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            message = reason.get("message", "aborted")
            raise EngineFailed(
                f"SGLang has aborted the prefill: {message}. Send the whole request instead."
            )
        return meta

    async def run(self, request: Any, http_request: Any) -> AsyncGenerator[dict[str, Any]]:
        """Run one of the plugin's ``GenerateReqInput``, and yield SGLang's outputs.

        With ``stream``, a batch's outputs come one by one, each with its ``index``. Closing the
        generator aborts the request.

        Raises: MalformedRequest if SGLang refuses the request, EngineBusy if it takes no more
            requests at the moment, EngineFailed if it could not run the request.
        """
        from fastapi import HTTPException

        setattr(request, _OURS, True)
        try:
            async with aclosing(self._manager.generate_request(request, http_request)) as outputs:
                async for output in outputs:
                    yield output
        except (asyncio.CancelledError, GeneratorExit):  # SGLang 0.5.12 would go on with it.
            for rid in [request.rid] if isinstance(request.rid, str) else request.rid:
                self.abort(rid)
            raise
        except ValueError as error:
            raise MalformedRequest(f"SGLang refuses this prefill: {error}") from error
        except HTTPException as error:
            if error.status_code != EngineBusy.status:
                raise EngineFailed(f"SGLang could not run the prefill: {error.detail}") from error
            raise EngineBusy(f"SGLang cannot take this prefill now: {error.detail}") from error

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def use_costs(self, costs: Costs | None, waits_for: int | None) -> None:
        """Use these costs from now on, here and in every scheduler; see ``MeasuredCosts``."""
        self.costs, self.waits_for = costs or UNMEASURED, waits_for
        RELEASE.to_scheduler(self._manager, MeasuredCosts(costs, waits_for))

    def release(self, stream: str) -> None:
        """Release the KV of a stream, or of its request, in every scheduler; it can be evicted."""
        RELEASE.to_scheduler(self._manager, ReleaseStream(stream))

    async def kv(self) -> list[KvReport]:
        """Return the reports of the data-parallel ranks that answer within seconds."""
        reports: list[KvReport] = []
        with self._query() as (query, received):
            RELEASE.to_scheduler(self._manager, KvQuery(query))
            # A scheduler in a long forward answers late. The other reports are returned.
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    while len(reports) < self.data_parallel_ranks:
                        reports.append(await received.get())
        return sorted(reports, key=lambda report: report.dp_rank)

    async def compare(
        self, texts: list[str], terms: Terms, http_request: Any, within: float = 60
    ) -> Similarities:
        """Return the similarities of texts' token states, on an embedding engine with one rank.

        There are no similarities if the states of some tokens are missing.

        Args: within: the longest wait, in seconds, for the scheduler after the texts' prefill.

        Raises: as :meth:`run`.
        """
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        rids, mark = tuple(new_rid() for _ in texts), RequestMark(compared=True, own=True)
        request = EmbeddingReqInput(
            text=texts,
            rid=list(rids),
            sampling_params={"custom_params": mark.to_custom_params()},
            lora_path=terms.lora_path,
            priority=terms.priority,
        )
        try:
            async with aclosing(self.run(request, http_request)) as outputs:
                (answers,) = [cast("list[dict[str, Any]]", output) async for output in outputs]
            with self._query() as (query, received):
                RELEASE.to_scheduler(self._manager, CompareTexts(query, rids))
                # The texts are computed, so this takes at most another request's forward.
                try:
                    found: Similarities = await asyncio.wait_for(received.get(), within)
                except TimeoutError as error:
                    raise EngineFailed(
                        f"The scheduler did not compare the texts within {within} s; see "
                        "the engine's log."
                    ) from error
        except BaseException:
            RELEASE.to_scheduler(self._manager, CompareTexts(None, rids))
            raise
        lengths = tuple(answer["meta_info"]["prompt_tokens"] for answer in answers)
        return found if found.tokens == lengths else replace(found, rows=[])

    @contextmanager
    def _query(self) -> Generator[tuple[int, asyncio.Queue[Any]]]:
        """Make the number of a query, and a queue that gets the schedulers' answers to it."""
        query = next(self._queries)
        self._reports[query] = asyncio.Queue()
        self._manager.auto_create_handle_loop()
        try:
            yield query, self._reports[query]
        finally:
            del self._reports[query]

    def _receive(self, report: KvReport | Similarities) -> None:
        if (received := self._reports.get(report.query)) is not None:
            received.put_nowait(report)


def is_ours(obj: Any) -> bool:
    """Return whether the plugin made this ``GenerateReqInput``; clients cannot set that."""
    return getattr(obj, _OURS, False)


def new_rid() -> str:
    """Make a request id. No id is a prefix of another, because SGLang aborts by prefix."""
    return f"flashmoa-{uuid.uuid4().hex}"
