"""Starts several engines on a CPU from one import of SGLang.

An engine spends most of its start importing SGLang, in two processes. ``python -m
flashmoa_cpu.forkserver`` imports it once, prints ``ready``, and then forks an engine for each
line of JSON on standard input: ``{"args": [...], "env": {...}, "cores": [0], "log": PATH}``. For
each it prints the engine's process id. Every engine leads its own process group. When standard
input ends, the server and all its engines end.

Forking is safe because this process has neither used a GPU nor started a thread that a fork would
miss. On a machine with a GPU use ``flashmoa_sglang.serve``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
from typing import Any

from flashmoa_sglang.serve import serve


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
    from flashmoa_sglang.sglang import hooks as plugin

    import flashmoa_cpu.attention  # noqa: F401

    # The forked engines inherit the result and need not verify again.
    plugin.verify()
    gc.freeze()
    gc.enable()


def fork_instead_of_spawning() -> None:
    """Make SGLang fork its processes, so that they need not import it again."""
    import torch.multiprocessing

    multiprocessing.set_start_method("fork", force=True)

    def ignore(*_args: Any, **_kwargs: Any) -> None:
        return None

    # SGLang would set the start method to "spawn".
    multiprocessing.set_start_method = ignore  # type: ignore[assignment]
    torch.multiprocessing.set_start_method = ignore


def fork_engine(order: dict[str, Any]) -> int:
    """Fork an engine. Return its process id once it leads its own process group."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read_end)
        os.close(write_end)
        run_engine(order)
    os.close(write_end)
    # This returns when the child has closed its write end, after setsid or because it has ended.
    os.read(read_end, 1)
    os.close(read_end)
    return pid


def run_engine(order: dict[str, Any]) -> None:
    """Turn the forked process into an engine; do not return."""
    # The kernel kills this process when its parent ends in any way (prctl(2)). SGLang's other
    # processes end with this one.
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order.get("env", {}))
    if cores := order.get("cores"):
        import torch

        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
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
