"""``flashmoa bench NAME``: measures, and says on what."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from flashmoa.engine import EngineError

BENCHES = {
    "handoff": "one agent's tokens into the next one's prompt, at a set pace (FlashAgents §6.1)",
    "ablation": "what streaming and the intra-turn cache each contribute (Table 1)",
    "chunk": "what prefilling in pieces costs (§6.5)",
    "first_token": "streamed prompts of several lengths",
    "schedule": "streaming and shortest-job-first together (§6.6)",
    "neighbours": "what requests that use no stream notice of the plugin",
    "pressure": "streams where the KV pool is too small for them",
    "client": "what linking costs between two agents' calls",
    "workflows": "chain, mapreduce and slides, what each part of FlashMoA contributes (§6.2, 6.3)",
    "moa": "Mixture-of-Agents: accuracy and latency of its parts, and staircases (Faster-MoA §5)",
    "router": "routing policies on simulated engines (MoE-Prefill Table 2)",
    "routers": "running routers over the same engines, and the simulator beside them",
    "prefill_only": "MoE-Prefill's Table 2: one generated token against scores, then two engines",
    "asyncep": "experts on the device and in host memory (MoE-Prefill §4)",
    "pair": "two engines, the upstream agent really decoding",
}


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if arguments else 2
    name = arguments[0].replace("-", "_")
    if name not in BENCHES:
        print(f"flashmoa bench: there is no benchmark {name!r}\n{usage()}", file=sys.stderr, end="")
        return 2
    try:
        return int(import_module(f"flashmoa_bench.{name}").main(arguments[1:]))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        print(f"flashmoa bench {name}: {_missing(error)}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"flashmoa bench {name}: {error}", file=sys.stderr)
        return 1
    except (EngineError, ExceptionGroup) as error:
        problems = _problems(error)
        if problems is None:
            raise
        print(f"flashmoa bench {name}: {'; '.join(problems)}", file=sys.stderr)
        return 1


def _missing(error: ModuleNotFoundError) -> str:
    root = (error.name or "").partition(".")[0]
    if root.startswith("autogen") or root == "openai":
        return "it needs AutoGen: pip install 'flashmoa[autogen]'"
    return f"{error}; `flashmoa doctor` checks what is here"


def _problems(error: BaseException) -> list[str] | None:
    """What engines did wrong, or ``None`` where something else is among it."""
    if isinstance(error, EngineError):
        return [str(error)]
    found: list[str] = []
    members: Sequence[BaseException] = getattr(error, "exceptions", ())
    for member in members:
        problems = _problems(member)
        if problems is None:
            return None
        found += [problem for problem in problems if problem not in found]
    return found or None


def usage() -> str:
    names = "".join(f"  {name:12}  {about}\n" for name, about in BENCHES.items())
    return (
        "usage: flashmoa bench NAME [options]\n\n"
        f"{names}\nflashmoa bench NAME --help says more; docs/benchmarks.md, how to read it.\n"
    )
