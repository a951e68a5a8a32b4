"""List the benchmarks, and run the benchmark that ``flashmoa bench NAME`` names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from flashmoa.errors import EngineError

# Titles of the list, by the folder of the benchmarks' modules.
_GROUPS = {
    "link": "Links between agents",
    "workflows": "Whole teams",
    "moa": "Mixtures of agents, staircases and debates",
    "prefill": "Scores, and other work without decoding",
    "routing": "Several engines",
}
# Modules below ``flashmoa_bench``, whose ``main`` runs the benchmark, and the subject.
BENCHMARKS = {
    "handoff": ("link.handoff", "how soon an agent answers after the agent whose text it reads"),
    "ablation": ("link.ablation", "what streamed texts and shared prefixes gain, each alone"),
    "without_plugin": ("link.without_plugin", "links without the plugin, and what the plugin adds"),
    "shared_engine": ("link.shared_engine", "chains of agents that share one engine"),
    "tools": ("link.tools", "how soon an agent answers when its tools have run"),
    "coding_agents": ("link.coding_agents", "recorded coding agents that need twice the KV pool"),
    "schedule": ("workflows.schedule", "links together with shortest-job-first"),
    "chunk": ("link.chunk", "what prefilling a prompt in pieces costs"),
    "interference": ("link.interference", "what the plugin and its links cost other requests"),
    "workflows": ("workflows.benchmark", "chain, mapreduce and slides, technique by technique"),
    "moa_accuracy": ("moa.accuracy", "right answers of mixtures and of single real models"),
    "moa_judge": ("moa.judging", "answers of mixtures, compared in pairs by a model"),
    "moa_latency": ("moa.latency", "time of mixtures of three models, technique by technique"),
    "staircases": ("moa.staircases", "first token and rate of staircases and debates"),
    "prefill_only": ("prefill.benchmark", "probabilities of given answers, against one token"),
    "score_lists": ("prefill.lists", "a list in one request: stock /v1/score, ours, embeddings"),
    "score_accuracy": ("prefill.accuracy", "a real model's answers by probabilities, and decoded"),
    "asyncep": ("prefill.asyncep", "mixture-of-experts models with experts in host memory"),
    "router_measured": ("routing.measured", "flashmoa router and others, before modelled engines"),
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
        benchmark = import_module(f"flashmoa_bench.{BENCHMARKS[name][0]}")
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
    """Return the messages of all EngineErrors in ``error``, each once.

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
    lines = ["usage: flashmoa bench NAME [options]"]
    for group, title in _GROUPS.items():
        lines.append(f"\n{title}:")
        for name, (module, about) in BENCHMARKS.items():
            if module.startswith(f"{group}."):
                lines.append(f"  {name.replace('_', '-'):15}  {about}")
    lines.append("\nflashmoa bench NAME --help lists its options; docs/benchmarks.md explains the")
    return "\n".join([*lines, "figures and names their papers.\n"])
