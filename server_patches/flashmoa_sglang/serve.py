"""Starts SGLang with the plugin: ``python -m flashmoa_sglang.serve --model-path PATH ...``.

There are two differences to ``python -m sglang.launch_server``. This process and all its children
are prepared before they import SGLang. If the plugin does not work, the start fails, while SGLang
would only write a line into its log.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from flashmoa_sglang.sglang import torchvision_ops
from flashmoa_sglang.sglang.options import lacks_accelerator
from flashmoa_sglang.sglang.releases import RELEASE, installed, too_old

# This runs at import, because the processes that SGLang spawns import this module before SGLang.
if lacks_accelerator():
    torchvision_ops.allow_mismatched_build()
RELEASE.prepare_import()


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run a scheduler process.

    SGLang pickles a reference to this function, so that its children import this module first.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process as run

    run(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Run the detokenizer process, through this module for the same reason."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    run(*args, **kwargs)


def serve(argv: list[str]) -> None:
    """Run a server until it is stopped.

    Args: argv: SGLang's arguments, without the program's name.
    """
    from sglang.srt.plugins import load_plugins

    from flashmoa_sglang.sglang import hooks

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(RELEASE.server_arguments(argv))
    for name in ("smg_grpc_mode", "grpc_mode", "use_ray", "encoder_only"):
        if getattr(arguments, name, False):
            flag = name.replace("_", "-")
            raise SystemExit(f"--{flag} starts another server than this one; use `sglang serve`.")
    if not is_stock():
        hooks.verify(arguments)
    launch_server(
        arguments,
        run_scheduler_process_func=run_scheduler_process,
        run_detokenizer_process_func=run_detokenizer_process,
    )


def is_stock() -> bool:
    """Return whether ``SGLANG_PLUGINS``, the names of plugins to load, leaves this one out."""
    names = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    return bool(names) and "flashmoa" not in names


def main() -> None:
    if problem := too_old(installed()):
        raise SystemExit(f"flashmoa-sglang cannot run: {problem}")
    if not is_stock():
        from flashmoa_sglang.sglang import hooks

        # Importing SGLang takes long, so a problem is reported before that.
        hooks.verify()
    from sglang.srt.utils import kill_process_tree

    try:
        serve(sys.argv[1:])
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
