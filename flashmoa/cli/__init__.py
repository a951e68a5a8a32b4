"""The ``flashmoa`` command."""

from __future__ import annotations

import sys

from flashmoa.cli import serve

_USAGE = """\
usage: flashmoa serve --model-path PATH [any SGLang argument]

  serve   start an SGLang server with FlashMoA's plugin, on a GPU or on the CPU
"""


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] != "serve":
        print(f"flashmoa: there is no command {arguments[0]!r}\n{_USAGE}", file=sys.stderr, end="")
        raise SystemExit(2)
    raise SystemExit(serve.main(arguments[1:]))
