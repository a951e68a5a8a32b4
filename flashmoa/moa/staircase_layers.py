"""Run layers of agents that write while those before them do (``StaircaseLayers``).

The answers of a layer are cut into chunks while they are written. In each round, the prompts of the
next layer grow by the next chunk of every answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from flashmoa import Text, UpstreamCancelled, Workflow
from flashmoa.moa.agents import Model, common_refusal
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.layers import AgentLayers, fill_slots
from flashmoa.moa.prompts import AggregationPrompt, Messages, add_role, staircase_messages
from flashmoa.moa.results import AgentAnswer, MixtureFailed
from flashmoa.moa.settings import CHARACTERS_PER_TOKEN, Quorum, Steps
from flashmoa.moa.staircase_writer import StaircaseWriter
from flashmoa.moa.waiting import wait_for_several, wait_for_text

logger = logging.getLogger(__name__)


class ChunkedText:
    """Cuts a text into chunks, one for each round of a staircase. Each chunk is a separate text.

    Args:
        title: text before each chunk.

    Attributes:
        problem: why the text ended before it was complete; empty if it did not.
    """

    def __init__(self, flow: Workflow, source: Text, title: str, steps: Steps) -> None:
        self.source = source
        self.problem = ""
        self.error: Exception | None = None
        self._flow = flow
        self._title = title
        self._steps = steps
        self._chunks: list[Text] = []
        # The number of chunks; None until the text has ended.
        self._count: int | None = None

    @property
    def failed(self) -> bool:
        """Return whether the text ended without any chunk."""
        return self._count == 0

    def chunk(self, number: int) -> Text:
        """Return the chunk of a round, from 0; it is empty after the text's end."""
        while len(self._chunks) <= number:
            text = self._flow.text(f"{self.source.name} chunk {len(self._chunks) + 1}")
            if self._count is not None:
                text.close()
            self._chunks.append(text)
        return self._chunks[number]

    def ends_before(self, number: int) -> bool:
        """Return whether the text has ended and has no chunk for that round or a later one."""
        return self._count is not None and self._count <= number

    async def cut(self) -> None:
        """Fill the chunks as the text is written, until it ends or fails."""
        number, left, sizes = -1, 0, self._steps.sizes()
        try:
            async for piece in self.source:
                while piece:
                    if left == 0:
                        number, left = number + 1, next(sizes) * CHARACTERS_PER_TOKEN
                        self.chunk(number).write(self._title)
                    part, piece = piece[:left], piece[left:]
                    left -= len(part)
                    self.chunk(number).write(part)
                    if left == 0:
                        self.chunk(number).close()
        except UpstreamCancelled:
            pass  # Readers get the chunks that were written.
        except Exception as error:
            self.error, self.problem = error, str(error) or type(error).__name__
            text = "%s ends early: %s. Its readers continue with what it has written."
            logger.warning(text, self.source.name, self.problem.removesuffix("."))
        self._count = number + 1
        if self.failed and not self.problem:
            self.problem = "it answered nothing"
        for text in self._chunks:
            text.close()


@dataclass(frozen=True, slots=True)
class GrowingPrompt:
    """The prompt of an agent on a staircase: each round adds the next chunk of every source."""

    prompt: AggregationPrompt
    question: Messages
    sources: Sequence[ChunkedText]
    steps: Steps

    def messages(self, number: int) -> Messages:
        """Return the messages of a round, from 0."""
        rounds = [
            [f"{source.chunk(round_)}" for source in self.sources] for round_ in range(number + 1)
        ]
        return staircase_messages(self.steps.order, self.prompt, self.question, rounds)

    def is_last_round(self, number: int) -> bool:
        """Return whether it is certain that no chunks follow those of a round, from 0."""
        return all(source.ends_before(number + 1) for source in self.sources)

    def raise_if_all_failed(self) -> None:
        """Raise MixtureFailed if no source has written anything."""
        if all(chunked.failed for chunked in self.sources):
            problems = (f"{chunked.source.name}: {chunked.problem}" for chunked in self.sources)
            failure = MixtureFailed(f"no agent answered; {'; '.join(problems)}")
            raise failure from common_refusal([chunked.error for chunked in self.sources])


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
        self._writers: list[list[StaircaseWriter]] = []
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
    ) -> list[StaircaseWriter]:
        """Add a layer of agents that read the last layer so far while it writes.

        Args:
            prompts: a prompt for each model. All prompts give answers the same titles.
            is_last: whether it is the agent that writes the question's answer.
        """
        flow = self._inquiry.flow
        sources: list[ChunkedText] = []
        for number, answer in enumerate(self.answers[-1], 1):
            title = "" if self._steps.order == "contiguous" else prompts[0].title(number)
            sources.append(ChunkedText(flow, answer, title, self._steps))
            flow.start_soon(sources[-1].cut)
        self.keep_quorum()
        writers: list[StaircaseWriter] = []
        layer = len(self._writers) + 2
        for place, (prompt, model) in enumerate(zip(prompts, models, strict=True), 1):
            growing = GrowingPrompt(prompt, self._question, sources, self._steps)
            name = f"{layer}.{place}"
            writers.append(StaircaseWriter(name, model, growing, self._inquiry, is_last=is_last))
            flow.start_soon(writers[-1].run)
        self._chunked.append(sources)
        self._writers.append(writers)
        return writers

    def keep_quorum(self) -> None:
        """Keep the quorum of the last layer so far; a layer that is added does so itself."""
        if self._quorum is not None:
            agents = self._writers[-1] if self._writers else self._first_calls
            self._inquiry.flow.start_soon(partial(self._keep_quorum, self._quorum, agents))

    async def _keep_quorum(
        self, quorum: Quorum, agents: Sequence[AgentCall | StaircaseWriter]
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

    async def ask_another(
        self, prompt: AggregationPrompt, model: Model, answers: Sequence[AgentAnswer], written: str
    ) -> AgentCall:
        """Ask another agent of the last layer, which reads whole answers.

        Args:
            written: text of its answer that is written already.
        """
        slots = await fill_slots(model, prompt, self._question, answers)
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
        is_read_in_chunks = number < len(self._chunked)
        if text in self._left_out and not (text.written and is_read_in_chunks):
            record.status, record.problem = "left out", ""
            return
        if not record.problem and text.is_over and not text.written.strip():
            record.status, record.problem = "failed", "it answered nothing"
        if is_read_in_chunks:
            # An agent that wrote a chunk was read, whatever came after it.
            source = self._chunked[number][record.place]
            record.problem = source.problem or record.problem
            record.status = "failed" if source.failed else "used"
