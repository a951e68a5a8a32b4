"""Run layers of agents that write while those before them do (``StaircaseLayers``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio

from flashmoa import Text
from flashmoa.moa.agents import Model
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.chunks import ChunkedText, GrowingPrompt, Steps
from flashmoa.moa.incremental_writer import IncrementalWriter
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.layers import AgentLayers
from flashmoa.moa.prompts import AggregationPrompt, Messages, add_role
from flashmoa.moa.results import AgentAnswer
from flashmoa.moa.settings import Quorum
from flashmoa.moa.waiting import wait_for_several, wait_for_text


class StaircaseLayers:
    """Runs layers of agents that each read the layer before, chunk by chunk, while it writes.

    Agents are named ``LAYER.PLACE``, from 1, and the requests of a writer ``LAYER.PLACE.ROUND``.

    Args:
        models: the models of the first layer. Each of them reads only the question.
        inquiry: what all agents of the question share.
        quorum: how many agents of a layer suffice after some time; ``None``: all are waited for.
    """

    def __init__(
        self,
        inquiry: Inquiry,
        question: Messages,
        models: Sequence[Model],
        steps: Steps,
        *,
        quorum: Quorum | None = None,
    ) -> None:
        self._inquiry = inquiry
        self._question = question
        self._steps = steps
        self._quorum = quorum
        self._is_cancelled = False
        self._quorums: list[anyio.CancelScope] = []
        self._first = AgentLayers(inquiry)
        self._first_calls = [self._first.ask(0, model, question) for model in models]
        # The answers of every layer but the last, cut into the chunks that the next layer reads.
        self._chunked: list[list[ChunkedText]] = []
        self._writers: list[list[IncrementalWriter]] = []
        # Agents that were left out because the others sufficed.
        self._left_out: set[Text] = set()
        # Agents of the last layer that were asked because those before them had failed.
        self._more: list[AgentCall] = []

    @property
    def answers(self) -> list[list[Text]]:
        """Return the agents' answers by layer."""
        later = [[writer.answer for writer in layer] for layer in self._writers]
        return [[*self._first_calls], *later]

    def add(
        self,
        prompts: Sequence[AggregationPrompt],
        models: Sequence[Model],
        *,
        is_last: bool = False,
    ) -> list[IncrementalWriter]:
        """Add a layer of agents that read the last layer so far while it writes.

        Args:
            prompts: a prompt for each model. All prompts give answers the same titles.
            is_last: whether it is the agent that writes the question's answer.
        """
        flow = self._inquiry.flow
        sources: list[ChunkedText] = []
        for number, answer in enumerate(self.answers[-1], 1):
            title = "" if self._steps.order == "contiguous" else prompts[0].title(number)
            sources.append(ChunkedText(flow, answer, title, self._steps.schedule))
            flow.start_soon(sources[-1].cut)
        if self._quorum is not None:
            read = self._writers[-1] if self._writers else self._first_calls
            flow.start_soon(partial(self._keep_quorum, self._quorum, read))
        writers: list[IncrementalWriter] = []
        layer = len(self._writers) + 2
        for place, (prompt, model) in enumerate(zip(prompts, models, strict=True), 1):
            growing = GrowingPrompt(prompt, self._question, sources, self._steps)
            name = f"{layer}.{place}"
            writers.append(IncrementalWriter(name, model, growing, self._inquiry, is_last=is_last))
            flow.start_soon(writers[-1].run)
        self._chunked.append(sources)
        self._writers.append(writers)
        return writers

    async def _keep_quorum(
        self, quorum: Quorum, agents: Sequence[AgentCall | IncrementalWriter]
    ) -> None:
        """Leave out agents of a layer once its quorum suffices.

        When the time is over and enough of them have begun, those that have not are left out. When
        enough of them are complete, the others end where they are.
        """
        texts = [agent if isinstance(agent, AgentCall) else agent.answer for agent in agents]
        scope = anyio.CancelScope()
        self._quorums.append(scope)
        with scope:
            await wait_for_several([agent.asked.wait for agent in agents], 1)
            await anyio.sleep(quorum.seconds)
            await wait_for_several([partial(wait_for_text, text) for text in texts], quorum.answers)
            for agent, text in zip(agents, texts, strict=True):
                if not text.is_over and not text.written:
                    self._left_out.add(text)
                    agent.cancel()
            await wait_for_several([text.complete for text in texts], quorum.answers)
            for agent, text in zip(agents, texts, strict=True):
                if not text.is_over:
                    self._left_out.add(text)
                    agent.cancel()

    def ask_another(
        self, prompt: AggregationPrompt, model: Model, answers: Sequence[AgentAnswer], written: str
    ) -> AgentCall:
        """Ask another agent of the last layer, which reads whole answers.

        Args:
            written: text of its answer that is written already.
        """
        slots = [prompt.title(number) + one.text for number, one in enumerate(answers, 1)]
        number, place = len(self._writers) + 1, len(self._writers[-1]) + len(self._more) + 1
        call = AgentCall(f"{number}.{place}", model, self._inquiry, is_last=True)
        messages = add_role(prompt.messages(self._question, slots), model.role)
        self._inquiry.flow.start_soon(partial(call.run, messages, continues=written))
        self._more.append(call)
        return call

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self._is_cancelled = True
        for scope in self._quorums:
            scope.cancel()
        self._first.cancel()
        for writer in (writer for layer in self._writers for writer in layer):
            writer.cancel()
        for call in self._more:
            call.cancel()

    async def wait(self, layers: int | None = None) -> None:
        """Wait for all agents, or for those of that many first layers.

        Raises: UpstreamCancelled after :meth:`cancel`, unless all had finished before.
        """
        for answer in (answer for layer in self.answers[:layers] for answer in layer):
            try:
                await answer
            except Exception:
                if self._is_cancelled:
                    raise

    def records(self) -> list[list[AgentAnswer]]:
        """Return what every agent wrote so far, and when, by layer and place."""
        records = [*self._first.records()]
        for number, layer in enumerate(self._writers, 1):
            records.append([writer.record(number, place) for place, writer in enumerate(layer)])
        for number, layer in enumerate(records):
            for record, text in zip(layer, self.answers[number], strict=True):
                self._set_status(record, text, number)
        for call in self._more:
            model = call.model
            records[-1].append(AgentAnswer(len(records) - 1, len(records[-1]), model.model))
            call.describe(records[-1][-1])
        return records

    def _set_status(self, record: AgentAnswer, text: Text, number: int) -> None:
        if text in self._left_out and not text.written:
            record.status, record.problem = "left out", ""
            return
        if not record.problem and text.is_over and not text.written.strip():
            record.status, record.problem = "failed", "it answered nothing"
        if number < len(self._chunked):
            # An agent that wrote a chunk was read, whatever came after it.
            source = self._chunked[number][record.place]
            record.problem = source.problem or record.problem
            record.status = "failed" if source.failed else "used"
