"""The ``flashmoa`` command."""

from __future__ import annotations

import sys

from flashmoa.cli import bench, serve, trace

_COMMANDS = {"serve": serve.main, "bench": bench.main, "trace": trace.main}
_USAGE = """\
usage: flashmoa serve --model-path PATH [any SGLang argument]
       flashmoa bench NAME [options]
       flashmoa trace FILE [--perfetto FILE]

  serve   start an SGLang server with FlashMoA's plugin, on a GPU or on the CPU
  bench   measure it against stock SGLang; flashmoa bench --help lists what
  trace   show a run that link(team, trace=FILE) has written down
"""


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] not in _COMMANDS:
        print(f"flashmoa: there is no command {arguments[0]!r}\n{_USAGE}", file=sys.stderr, end="")
        raise SystemExit(2)
    raise SystemExit(_COMMANDS[arguments[0]](arguments[1:]))
