"""The options of ``flashmoa bench moa-latency`` and ``flashmoa bench staircases``."""

from __future__ import annotations

import argparse

from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.moa.rig import SERVINGS, make_roles
from flashmoa_bench.moa.script import ScriptOptions
from flashmoa_bench.recorded import SIZES, load_recorded


def make_latency_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of ``flashmoa bench moa_latency``."""
    parser = make_rig_parser("moa_latency", doc)
    group = parser.add_argument_group("ways")
    group.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help="all-to-all, tree, 'tree + overlap', undecided, full, 'as published', and those of "
        "the sweeps below; by default all",
    )
    group.add_argument(
        "--second-layer",
        choices=("mixed", *SIZES),
        default="mixed",
        help="models of the second layer: all sizes in turn, or one",
    )
    group.add_argument(
        "--root", choices=SIZES, default="large", help="model of the last aggregator"
    )
    for name, about in (("threshold", "thresholds of Q"), ("tau", "wanted similarities")):
        group.add_argument(
            f"--{name}s",
            type=float,
            nargs="+",
            default=[],
            metavar="Q",
            help=f"further ways '{name} Q': early exit with these {about}",
        )
    group.add_argument(
        "--widths",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="further ways 'width N': N small proposers and a small aggregator on stock SGLang",
    )
    group.add_argument(
        "--computed",
        nargs="*",
        choices=tuple(SERVINGS),
        metavar="SERVING",
        help="ask no engines: add up the cost tables of --device, for --serving or for each of "
        f"these ({', '.join(SERVINGS)})",
    )
    _add_early_exit(parser)
    return parser


def _add_early_exit(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("early exit")
    group.add_argument("--tau", type=float, default=0.7, help="wanted similarity")
    group.add_argument(
        "--min-answers", type=positive, default=2, help="answers before a cluster may be left"
    )
    group.add_argument(
        "--threshold", type=float, metavar="Q", help="leave if Q is at least this, not by chance"
    )
    group.add_argument(
        "--confidence", type=float, default=0.85, help="mean of the drawn confidences"
    )
    group.add_argument(
        "--embedding-model",
        default="Qwen/Qwen3-VL-4B-Instruct",
        metavar="NAME",
        help="whose prefill of an answer an embedding takes, on another such GPU (default: "
        "Qwen/Qwen3-VL-4B-Instruct, which has the shape of Qwen3-Embedding-4B)",
    )


def make_rig_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of the rig, of questions and of answers."""
    parser = make_parser(name, doc, make_roles("single", plugin=True, stock=True), repeats=False)
    group = parser.add_argument_group("the rig")
    servings = "; ".join(f"{serving}: {about}" for serving, about in SERVINGS.items())
    group.add_argument("--serving", choices=tuple(SERVINGS), default="single", help=servings)
    for size in SIZES:
        group.add_argument(
            f"--{size}-model", default="default", metavar="NAME", help="name at its engines"
        )
    group.add_argument(
        "--layout", choices=("question-first", "answers-first"), default="question-first"
    )
    group = parser.add_argument_group("questions and answers")
    group.add_argument(
        "--answers",
        choices=tuple(load_recorded()),
        default="alpaca_eval",
        help="recorded answers whose lengths and similarities are taken",
    )
    group.add_argument(
        "--questions",
        type=positive,
        default=4,
        metavar="N",
        help="of the recorded ones, spread evenly from short answers to long",
    )
    group.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    group.add_argument(
        "--longest", type=positive, default=1024, metavar="N", help="most tokens of an answer"
    )
    group.add_argument(
        "--equal", type=positive, metavar="N", help="tokens of every answer, as a control"
    )
    group.add_argument(
        "--question-tokens",
        type=positive,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="tokens of questions, drawn evenly; by default as recorded",
    )
    group.add_argument(
        "--later-tokens",
        type=positive,
        metavar="N",
        help="tokens of every answer after the first layer's",
    )
    group.add_argument(
        "--last-tokens", type=positive, metavar="N", help="tokens of the last agent's answer"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only what is not in the --json file, which is written after each answer",
    )
    return parser


def make_script_options(arguments: argparse.Namespace) -> ScriptOptions:
    """Return how the questions' scripts are made, by the command line."""
    return ScriptOptions(
        scale=arguments.scale,
        longest=arguments.longest,
        equal=arguments.equal,
        prompt=tuple(arguments.question_tokens) if arguments.question_tokens else None,
        later=arguments.later_tokens,
        last=arguments.last_tokens,
        confidence=getattr(arguments, "confidence", ScriptOptions().confidence),
        seed=arguments.seed,
    )
