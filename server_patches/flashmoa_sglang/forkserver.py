"""Starts several engines from one import of SGLang: CPU only.

Importing SGLang takes most of an engine's start-up, twice. ``python -m
flashmoa_sglang.forkserver`` imports it once, prints ``ready``, and then forks an engine for
each line of JSON on standard input, ``{"args": [...], "env": {...}, "cores": [0], "log":
PATH}``, answering each with the engine's process id. Each engine leads its own process
group. It ends, and its engines with it, when standard input does.

Forking is safe because nothing here has started a thread that matters or touched a GPU; on
a GPU machine use ``flashmoa_sglang.serve``.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import signal
import sys
from typing import Any

from flashmoa_sglang.serve import die_with_parent, serve


def import_sglang() -> None:
    """Import what an HTTP process, a scheduler and a detokenizer import."""
    gc.disable()  # Collecting while thousands of modules load costs seconds.
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.layers.attention.torch_native_backend
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    import flashmoa_sglang.cpu.attention  # noqa: F401
    from flashmoa_sglang import plugin

    # Here, so that no engine has to.
    plugin.verify_what_is_known()
    gc.freeze()
    gc.enable()


def fork_instead_of_spawning() -> None:
    """Make SGLang fork its processes: what has been imported need not be imported again."""
    import torch.multiprocessing

    multiprocessing.set_start_method("fork", force=True)

    def keep(*_args: Any, **_kwargs: Any) -> None:
        return None

    multiprocessing.set_start_method = keep  # type: ignore[assignment]
    torch.multiprocessing.set_start_method = keep


def fork_engine(order: dict[str, Any]) -> int:
    """Fork an engine; return its process id once it leads a process group of that name."""
    ready, leads = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(ready)
        os.close(leads)
        run_engine(order)
    os.close(leads)
    os.read(ready, 1)  # Its end of the pipe is closed, whatever has become of it.
    os.close(ready)
    return pid


def run_engine(order: dict[str, Any]) -> None:
    """Become an engine in the forked process; do not return."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order.get("env", {}))
    if order.get("cores"):
        os.sched_setaffinity(0, order["cores"])
        _use_threads(len(order["cores"]))
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    random.seed(os.urandom(8))
    code = 1
    try:
        serve(order["args"])
        code = 0
    except SystemExit as stop:
        print(stop.code, file=sys.stderr, flush=True)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(code)


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)


def main() -> None:
    import_sglang()
    fork_instead_of_spawning()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(fork_engine(order), flush=True)


if __name__ == "__main__":
    main()
