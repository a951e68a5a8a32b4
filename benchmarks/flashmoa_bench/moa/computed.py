"""Compute a mixture's latency from tables of forward times; no engine runs.

Each model has a GPU of its own, which runs one forward after another. Answers that are written
together get a token each in a forward, whose time depends on their number and contexts. So this
shows for long answers, which take hours on modelled engines, what trees and early exit save. HTTP
and scheduling take no time here, KV pools have room for everything, and prompts have no words
besides the question and the answers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from flashmoa.moa import EarlyExit, Topology
from flashmoa.moa.early_exit import compute_quality
from flashmoa_bench.moa.rig import QuestionScript, Seconds
from flashmoa_bench.modelled_gpu.gpu import Forward, Prefills

# Tokens in a forward: SGLang's chunked prefill, and text ahead of its reader beside answers.
_CHUNK = 8192
_AHEAD = 256
# Decode steps that are computed with one context, if nothing else changes.
_STEPS = 16


# By size, a GPU's seconds for a forward.
Gpus = Mapping[str, Callable[[Forward], float]]


@dataclass(slots=True)
class Prompt:
    """The prompt of agents that read the same answers with the same model.

    Attributes:
        length: number of tokens; ``None`` until all answers are complete.
        sent: the time at which the last answer in it was complete.
        computed: number of tokens whose KV the engine has.
    """

    reads: Sequence[Answer]
    question: int
    readers: list[Answer] = field(default_factory=list["Answer"])
    length: int | None = None
    sent: float = 0.0
    computed: int = 0

    def ahead(self) -> int:
        """Return the number of known tokens that are not computed yet.

        Complete answers are in the prompt, and one answer that is still being written.
        """
        written = [one.written for one in self.reads if not one.is_complete]
        complete = sum(one.tokens for one in self.reads if one.is_complete)
        return self.question + complete + max(written, default=0) - self.computed


@dataclass(slots=True, eq=False)
class Answer:
    """An agent's answer; times in seconds."""

    name: str
    size: str
    tokens: int
    written: int = 0
    first: float = 0.0
    end: float = 0.0
    is_left_out: bool = False

    @property
    def is_complete(self) -> bool:
        return self.written == self.tokens


class Engine:
    """A model on a GPU: first runs prefills, alone, and then writes a token of every answer."""

    def __init__(self, seconds: Callable[[Forward], float]) -> None:
        self.now = 0.0
        self.prefills: list[Prompt] = []
        # Prompts whose text is computed ahead.
        self.growing: list[Prompt] = []
        self._writing: dict[Answer, int] = {}
        self._seconds = seconds

    def is_idle(self) -> bool:
        return not (self.prefills or self._writing or self._next_ahead()[1])

    def leave_out(self, answer: Answer) -> None:
        self._writing.pop(answer, None)

    def step(self) -> list[Answer]:
        """Run the next forwards; return the answers that end with them."""
        prompt, ahead = self._next_ahead()
        if not (prompt or self._writing):
            self.now = max(self.now, self.prefills[0].sent)
        if self.prefills and self.prefills[0].sent <= self.now:
            self._prefill()
            return []
        prefills, steps = Prefills(), _STEPS
        if prompt is not None:
            ahead = min(ahead, _AHEAD if self._writing else _CHUNK)
            prefills, steps = Prefills.of([(prompt.computed, ahead)]), 1
            prompt.computed += ahead
        left = [answer.tokens - answer.written for answer in self._writing]
        steps = min([steps, *left])
        contexts = [tokens + answer.written for answer, tokens in self._writing.items()]
        context = round(fmean(contexts)) + steps // 2 + 1 if contexts else 0
        self.now += steps * self._seconds(Forward(prefills, len(contexts), context))
        for answer in self._writing:
            answer.written += steps
        ended = [answer for answer in self._writing if answer.is_complete]
        for answer in ended:
            answer.end = self.now
            del self._writing[answer]
        return ended

    def _next_ahead(self) -> tuple[Prompt | None, int]:
        """Return a prompt with enough text for an increment, and the number of its tokens."""
        for prompt in self.growing:
            if (ahead := prompt.ahead()) >= _AHEAD:
                return prompt, ahead
        return None, 0

    def _prefill(self) -> None:
        prompt = self.prefills[0]
        assert prompt.length is not None
        # The last token's logits are needed in any case.
        cached = min(prompt.computed, prompt.length - 1)
        new = min(_CHUNK, prompt.length - cached)
        self.now += self._seconds(Forward(Prefills.of([(cached, new)])))
        prompt.computed = cached + new
        if prompt.computed < prompt.length:
            return
        self.prefills.pop(0)
        for answer in prompt.readers:
            if not answer.is_left_out:
                self._writing[answer] = prompt.length
                answer.first = self.now


@dataclass(slots=True)
class Cluster:
    """Answers that have the same readers, and their complete answers so far."""

    answers: Sequence[Answer]
    prompts: dict[str, Prompt]
    complete: list[Answer] = field(default_factory=list[Answer])
    is_read: bool = False


class ComputedMixture:
    """A question's answers in virtual time.

    Args:
        sizes: the size of each agent's model, by layer.
        gpus: a GPU's seconds for a forward, by size.
        overlaps: whether answers are prefilled for their readers while they are written.
        early_exit: decides when a cluster's answers suffice; its embedder is not asked.
        embedding: seconds of the embedding model, by tokens.
    """

    def __init__(  # noqa: PLR0913
        self,
        script: QuestionScript,
        topology: str,
        sizes: Sequence[Sequence[str]],
        gpus: Gpus,
        *,
        overlaps: bool = False,
        early_exit: EarlyExit | None = None,
        embedding: Seconds = lambda _: 0.0,
    ) -> None:
        self._script, self._early_exit, self._embedding = script, early_exit, embedding
        self._rng = random.Random(early_exit.seed if early_exit is not None else 0)
        self._engines = {size: Engine(seconds) for size, seconds in gpus.items()}
        self.layers = [
            [self._answer(f"{layer}.{place}", size) for place, size in enumerate(row, 1)]
            for layer, row in enumerate(sizes, 1)
        ]
        self._clusters = [
            self._cluster([], self.layers[0]),
            *(
                self._cluster(
                    [self.layers[layer - 1][place] for place in reads],
                    [
                        one
                        for one, each in zip(self.layers[layer], rows, strict=True)
                        if each == reads
                    ],
                )
                for layer, rows in enumerate(Topology.parse(topology).layers)
                if layer
                for reads in dict.fromkeys(rows)
            ),
        ]
        if overlaps:
            for cluster in self._clusters:
                for size, prompt in cluster.prompts.items():
                    self._engines[size].growing.append(prompt)

    @property
    def final(self) -> Answer:
        return self.layers[-1][0]

    def run(self) -> None:
        """Write all answers."""
        self._read(self._clusters[0])
        while not self.final.end:
            working = [engine for engine in self._engines.values() if not engine.is_idle()]
            engine = min(working, key=lambda engine: engine.now)
            ended = engine.step()
            for answer in ended:
                self._end(answer)
            # An idle engine stands at the present.
            for other in self._engines.values():
                if other.is_idle():
                    other.now = max(other.now, engine.now)

    def decoding_seconds(self) -> float:
        """Return the decode time of the answers on the critical path."""
        answer, seconds = self.final, self.final.end - self.final.first
        while complete := self._read_by(answer).complete:
            answer = complete[-1]
            seconds += answer.end - answer.first
        return seconds

    def begun(self, answer: Answer) -> float:
        """Return when all answers that an agent reads were complete."""
        return max((one.end for one in self._read_by(answer).complete), default=0.0)

    def left_out(self) -> Counter[str]:
        """Return the number of agents that were left out, by layer and size."""
        return Counter(
            f"{layer} {one.size}"
            for layer, row in enumerate(self.layers, 1)
            for one in row
            if one.is_left_out
        )

    def _read_by(self, answer: Answer) -> Cluster:
        return next(
            each
            for each in self._clusters
            if any(answer in prompt.readers for prompt in each.prompts.values())
        )

    def _answer(self, name: str, size: str) -> Answer:
        return Answer(name, size, self._script.agents[name].tokens)

    def _cluster(self, answers: Sequence[Answer], readers: Sequence[Answer]) -> Cluster:
        prompts: dict[str, Prompt] = {}
        for reader in readers:
            prompt = prompts.setdefault(reader.size, Prompt(answers, self._script.prompt))
            prompt.readers.append(reader)
        return Cluster(answers, prompts)

    def _end(self, answer: Answer) -> None:
        for cluster in self._clusters:
            if answer in cluster.answers and not cluster.is_read:
                cluster.complete.append(answer)
                if len(cluster.complete) == len(cluster.answers):
                    self._read(cluster)
                elif self._suffice(cluster):
                    deciding = self._embedding(sum(one.tokens for one in cluster.complete))
                    self._leave_out(cluster)
                    self._read(cluster, deciding)

    def _suffice(self, cluster: Cluster) -> bool:
        policy, complete = self._early_exit, cluster.complete
        if policy is None or not policy.applies_to(len(cluster.answers)):
            return False
        if len(complete) < policy.min_answers:
            return False
        confidences = [self._script.agents[one.name].confidence for one in complete]
        rows = [
            [1.0 if one is other else self._script.similarity(one.name, other.name)
             for other in complete]
            for one in complete
        ]  # fmt: skip
        quality = compute_quality(confidences, rows, tau=policy.tau, diagonal=policy.diagonal)
        return policy.suffices(quality, self._rng)

    def _leave_out(self, cluster: Cluster) -> None:
        for answer in cluster.answers:
            if not answer.is_complete:
                answer.is_left_out = True
                self._engines[answer.size].leave_out(answer)

    def _read(self, cluster: Cluster, deciding: float = 0.0) -> None:
        """Send a cluster's prompts."""
        cluster.is_read = True
        # Engines are up to some steps ahead of each other.
        ready = max((one.end for one in cluster.complete), default=0.0) + deciding
        for size, prompt in cluster.prompts.items():
            engine = self._engines[size]
            prompt.sent = ready
            prompt.length = prompt.question + sum(one.tokens for one in cluster.complete)
            # The text of an answer that is left out does not count.
            prompt.computed = min(prompt.computed, prompt.length)
            if prompt in engine.growing:
                engine.growing.remove(prompt)
            engine.prefills.append(prompt)
