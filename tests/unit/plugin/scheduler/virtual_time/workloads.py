"""Clients of an engine in virtual time, and the figures that they measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median

from flashmoa_sglang.sglang.options import Options

from tests.unit.plugin.scheduler.virtual_time.clock import Clock, Event, Process
from tests.unit.plugin.scheduler.virtual_time.engine import Answer, Engine, Setting, tables

# A client appends new tokens every 10 ms.
PERIOD = 0.01
STOCK = tuple(
    Setting(plugin=False, chunk=chunk, mixed=mixed)
    for chunk, mixed in ((8192, False), (8192, True), (256, True), (512, True), (1024, True))
)


@dataclass
class Figures:
    """What a workload measures, in seconds.

    Attributes:
        latencies: of each workflow, from its start to its last token.
        gaps: from the last token that an agent's prompt waits for to the agent's first token.
        between: between two tokens of requests that belong to no workflow.
        prefilled: tokens of a stream that were prefilled beside decodes.
    """

    latencies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    prefilled: int = 0

    @property
    def latency(self) -> float:
        return mean(self.latencies)

    @property
    def gap(self) -> float:
        return median(self.gaps)

    @property
    def p99(self) -> float:
        """The 99th percentile of the seconds between two tokens."""
        return sorted(self.between)[int(0.99 * len(self.between))]


Workload = Callable[[Clock, Engine, Figures, bool], None]


def play(gpu: str, model: str, workload: Workload, setting: Setting | None = None) -> Figures:
    """Run a workload on an engine of its own: linked if it has the plugin."""
    clock, figures = Clock(), Figures()
    setting = setting or Setting()
    engine = Engine(clock, tables(gpu, model), setting)
    workload(clock, engine, figures, setting.plugin)
    clock.run()
    return figures


def best_of_stock(gpu: str, model: str, workload: Workload, *, running: int = 64) -> Figures:
    """Return the figures of stock SGLang with the chunks that suit a workload best."""
    settings = (replace(setting, max_running=running) for setting in STOCK)
    return min((play(gpu, model, workload, one) for one in settings), key=lambda f: f.latency)


def linked(schedule: str = "sglang", *, told: bool = True, running: int = 64) -> Setting:
    options = Options(intra_turn="off", schedule=schedule)
    return Setting(options=options, told=told, max_running=running)


def feed(
    engine: Engine, stream: str, texts: Sequence[Answer], lengths: Sequence[int], stop: Event
) -> Process:
    """Append texts to a stream while they are written: the next one once one is complete."""
    for text, length in zip(texts, lengths, strict=True):
        sent = 0
        while sent < length:
            yield PERIOD
            if stop.has_happened:
                return
            if len(text.tokens) > sent:
                engine.append(stream, text.tokens[sent:])
                sent = len(text.tokens)


def _written(number: int, tokens: int) -> range:
    """Return tokens that no other answer has."""
    return range(10_000 + 10_000 * number, 10_000 + 10_000 * number + tokens)


@dataclass(frozen=True)
class Workflows:
    """Agents in layers: a prompt ends with all answers of the previous layer.

    Args:
        kinds: workflows, which take turns. A layer's agents are (prompt, answer), in tokens.
        apart: seconds between two workflows.
    """

    count: int
    kinds: Sequence[Sequence[Sequence[tuple[int, int]]]]
    apart: float = 0.5

    def __call__(self, clock: Clock, engine: Engine, figures: Figures, links: bool) -> None:
        def run(number: int) -> Process:
            yield number * self.apart
            layers = self.kinds[number % len(self.kinds)]
            started, ended = clock.now, None
            stream, stop = None, Event()
            for position, layer in enumerate(layers):
                stop.happen()
                first = 100 * number + 10 * position
                answers = [
                    engine.ask(prompt, output, stream, _written(first + place, output))
                    for place, (prompt, output) in enumerate(layer)
                ]
                if links and position + 1 < len(layers):
                    stream, stop = f"{number}-{position + 1}", Event()
                    ((prompt, output),) = layers[position + 1]
                    lengths = [length for _, length in layer]
                    engine.open(stream, prompt - sum(lengths), output)
                    clock.start(feed(engine, stream, answers, lengths, stop))
                for answer in answers:
                    yield answer.over
                if ended is not None:
                    figures.gaps.append(answers[0].times[0] - ended)
                ended = clock.now
            figures.latencies.append(clock.now - started)

        for number in range(self.count):
            clock.start(run(number))


@dataclass(frozen=True)
class Beside:
    """Requests that decode together, and a stream that gets its text while they do."""

    decodes: int
    text: int
    prompt: int = 100
    output: int = 400

    def __call__(self, clock: Clock, engine: Engine, figures: Figures, _links: bool) -> None:
        engine.open("reader", 0, 0)
        answers = [engine.ask(self.prompt, self.output) for _ in range(self.decodes)]

        def read() -> Process:
            while not all(answer.tokens for answer in answers):
                yield PERIOD
            began = clock.now
            engine.append("reader", range(self.text))
            yield answers[0].over
            figures.latencies.append(clock.now - began)
            figures.prefilled = engine.prefilled("reader")

        clock.start(read())


@dataclass(frozen=True)
class Strangers:
    """Requests of no workflow, one after the other, beside pipelines that others feed.

    Args:
        pipelines: number of pipelines; ``together`` pipelines run at a time.
        tokens: number of tokens that each is fed, ``pace`` in a second.
    """

    pipelines: int = 32
    together: int = 8
    tokens: int = 200
    pace: float = 50.0
    known: int = 2000

    def __call__(self, clock: Clock, engine: Engine, figures: Figures, links: bool) -> None:
        def strangers() -> Process:
            while len(figures.latencies) < self.pipelines:
                answer = engine.ask(32, 128)
                yield answer.over
                figures.between += [later - time for time, later in pairwise(answer.times)]

        def pipeline(number: int) -> Process:
            yield number * self.tokens / self.pace / self.together
            started = clock.now
            stream, stop, text = (str(number) if links else None), Event(), Answer()
            if stream is not None:
                engine.open(stream, self.known, 32)
                clock.start(feed(engine, stream, [text], [self.tokens], stop))
            for token in _written(number, self.tokens):
                yield 1 / self.pace
                text.tokens.append(token)
            stop.happen()
            last = clock.now
            answer = engine.ask(self.known + self.tokens + 10, 32, stream)
            yield answer.over
            figures.gaps.append(answer.times[0] - last)
            figures.latencies.append(clock.now - started)

        clock.start(strangers())
        for number in range(self.pipelines):
            clock.start(pipeline(number))
