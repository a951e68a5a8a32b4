"""List the benchmarks, and run the one that ``flashmoa bench NAME`` asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from flashmoa.errors import EngineError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that ``flashmoa bench`` can run.

    Attributes:
        module: module name below ``flashmoa_bench``; its ``main(arguments)`` returns the exit
            status.
        about: one line that says what the benchmark measures.
    """

    module: str
    about: str


BENCHMARKS = {
    "device_check": Benchmark(
        "devices.check", "how far modelled GPUs can be trusted: against measurements on real ones"
    ),
    "handoff": Benchmark(
        "linking.handoff",
        "time from one agent's first token to the next agent's (FlashAgents §6.1)",
    ),
    "ablation": Benchmark(
        "linking.ablation", "what streaming and the intra-turn cache each contribute (Table 1)"
    ),
    "chunk": Benchmark("linking.chunk", "what prefilling in pieces costs (§6.5)"),
    "without_plugin": Benchmark(
        "linking.without_plugin", "links on engines without the plugin, and what the plugin adds"
    ),
    "shared_engine": Benchmark(
        "linking.shared_engine", "chains of agents on one engine, which costs others time"
    ),
    "client": Benchmark(
        "linking.client", "the event loop's time that links cost OpenAI's client for each token"
    ),
    "tools": Benchmark("linking.tools", "first tokens of agents whose tools have run"),
    "coding_agents": Benchmark(
        "linking.coding_agents", "recorded coding agents that need twice the KV pool"
    ),
    "schedule": Benchmark("linking.schedule", "streaming and shortest-job-first together (§6.6)"),
    "interference": Benchmark(
        "linking.interference", "what the plugin and its streams cost other requests"
    ),
    "workflows": Benchmark(
        "workflows.benchmark",
        "chain, mapreduce and slides: what each part of FlashMoA contributes (§6.2, 6.3)",
    ),
    "moa_accuracy": Benchmark(
        "moa.accuracy", "right answers of Mixture-of-Agents of real models, and of each alone"
    ),
    "moa_latency": Benchmark(
        "moa.latency",
        "Mixture-of-Agents of three models on GPUs: topologies, overlap, early exit, PD pairs",
    ),
    "staircases": Benchmark(
        "moa.staircases", "staircases and debates on GPUs: first token and tokens per second"
    ),
    "router_measured": Benchmark(
        "routing.measured", "routers before modelled engines (MoE-Prefill Table 2)"
    ),
    "prefill_only": Benchmark(
        "prefill.benchmark",
        "one generated token against scores (MoE-Prefill Table 2)",
    ),
    "score_lists": Benchmark(
        "prefill.lists", "one request with a list: stock SGLang's /v1/score, ours, and embeddings"
    ),
    "score_accuracy": Benchmark(
        "prefill.accuracy", "a real model's answers by prefills alone and decoded (§8.6)"
    ),
    "asyncep": Benchmark(
        "prefill.asyncep", "experts on the device and in host memory (MoE-Prefill §4)"
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, and return the exit status.

    A problem that the user can fix is printed as one line, without a traceback.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0 if arguments else 2
    name = arguments[0].replace("-", "_")
    if name not in BENCHMARKS:
        print(
            f"flashmoa bench: there is no benchmark {name!r}\n{_usage()}", file=sys.stderr, end=""
        )
        return 2
    try:
        benchmark = import_module(f"flashmoa_bench.{BENCHMARKS[name].module}")
        return int(benchmark.main(arguments[1:]))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        problem = f"{error}; `flashmoa doctor` checks what is installed"
    except OSError as error:
        if error.filename is None:
            raise
        problem = str(error)
    except (EngineError, ExceptionGroup) as error:
        problems = _engine_problems(error)
        if problems is None:
            raise
        problem = "; ".join(problems)
    print(f"flashmoa bench {name}: {problem}", file=sys.stderr)
    return 1


def _engine_problems(error: BaseException) -> list[str] | None:
    """Return the messages of all EngineErrors in ``error``, without repetitions.

    ``None`` if ``error`` is, or contains, an exception of another type.
    """
    if isinstance(error, EngineError):
        return [str(error)]
    messages: list[str] = []
    members: Sequence[BaseException] = getattr(error, "exceptions", ())
    for member in members:
        problems = _engine_problems(member)
        if problems is None:
            return None
        messages += [problem for problem in problems if problem not in messages]
    return messages or None


def _usage() -> str:
    lines = "".join(f"  {name:15}  {bench.about}\n" for name, bench in BENCHMARKS.items())
    return (
        "usage: flashmoa bench NAME [options]\n\n"
        f"{lines}\nflashmoa bench NAME --help lists its options; docs/benchmarks.md explains the "
        "figures.\n"
    )
