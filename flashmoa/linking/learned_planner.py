"""Plan the links of one run of a program from its earlier runs (:class:`LearnedLinkPlanner`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flashmoa.engine import EngineClient
from flashmoa.linking.learned_prompts import Messages, end_at
from flashmoa.linking.learned_runs import LearnedRun, Program, RecordedCall, RecordedRequest
from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.observed_call import CallObserver, CallRequest, CallResult
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.planned_links import Forecast, Turn
from flashmoa.linking.planner import LinkPlanner
from flashmoa.observe import Listener

# What is known beforehand of a call two steps away is prefilled while others write. A call further
# away would hold its KV for long, and is less likely to come.
_STEPS = 2


class LearnedLinkPlanner(LinkPlanner):
    """Plans the links of one run of a program; its agents are the run's calls, by their keys.

    Args:
        find_engine: returns a client of the engine that a request was sent to.
    """

    def __init__(
        self,
        program: Program,
        listener: Listener,
        find_engine: Callable[[RecordedRequest], EngineClient],
    ) -> None:
        super().__init__(listener)
        # All runs of a program report a reason once, and expect answers as long as in earlier runs.
        self._reported_declines = program.reported_declines
        self.output_lengths = program.output_lengths
        self._learned = LearnedRun(program)
        self._find_engine = find_engine
        self._placeholders = Placeholders(self._learned.example)
        self._is_running = True

    @property
    def is_running(self) -> bool:
        return self._is_running

    def observe(self, name: str, request: RecordedRequest, hold_reason: str | None) -> LearnedCall:
        """Note that a request is about to be sent. Return its observer.

        Args:
            name: the name of the agent that sends it.
            hold_reason: see :class:`CallRequest`.
        """
        recorded = self._learned.begin(name, request)
        known = recorded.key in self._learned.example
        engine_request = CallRequest(request.url, request.model, hold_reason)
        call = self.begin(recorded.key, engine_request, rewrite_reason=None, linkable=known)
        return LearnedCall(call, recorded)

    async def close(self, *, learn: bool) -> None:
        """End the run and every link, and wait until the engines have their KV back.

        Args:
            learn: whether the run has ended well, so that later ones are likely to be like it.
        """
        self._is_running = False
        if learn:
            self._learned.finish()
        self.end_all("unused")
        await self.host.close()

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        return [Turn(key) for key in self._learned.upcoming(_STEPS)]

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what a call of the example will send in this run."""
        earlier = self._learned.example[turn.agent]
        engine = self._find_engine(earlier.request)
        written = self._learned.texts()
        messages = self._predict(turn.agent, written)

        def holds() -> bool:
            return self._predict(turn.agent, written) == messages

        variants = [messages]
        if earlier.differed is not None:
            variants = [end_at(messages, earlier.differed, other) for other in ("0", "1")]
        return Forecast(
            turn,
            engine,
            self._placeholders,
            [partial(_render, engine, earlier.request, each) for each in variants],
            namespace=earlier.request.namespace,
            holds=holds,
        )

    def _predict(self, key: str, written: Mapping[str, str]) -> Messages:
        """Return the messages of a call, with placeholders for all texts but those given."""
        placeholders = {each: self._placeholders.padded(each) for each in self._learned.example}
        return self._learned.predict(key, {**placeholders, **written})


class LearnedCall(CallObserver):
    """Records the answer to a request, in addition to what a linked call does."""

    def __init__(self, call: LinkedCall, recorded: RecordedCall) -> None:
        self._call = call
        self._recorded = recorded
        self.prompt_stream_id = call.prompt_stream_id
        self.expected_output_tokens = call.expected_output_tokens

    def on_prompt(self, body: Mapping[str, Any]) -> None:
        self._call.on_prompt(body)

    def on_text(self, text: str) -> None:
        self._call.on_text(text)

    def on_finish(self, result: CallResult) -> None:
        self._recorded.is_complete = True
        self._recorded.answer = result.text if result.is_forwarded else None
        self._call.on_finish(result)

    def on_failure(self, error: BaseException) -> None:
        self._recorded.has_failed = True
        self._call.on_failure(error)

    def release_stream(self) -> None:
        self._call.release_stream()


async def _render(engine: EngineClient, request: RecordedRequest, messages: Messages) -> str:
    return await engine.render(messages, tools=request.tools, template_args=request.template_args)
