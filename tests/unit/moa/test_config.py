"""A TOML file becomes a mixture, a staircase or a debate with all of its settings."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from flashmoa.moa import (
    Budget,
    Debate,
    Limits,
    MixtureOfAgents,
    Quorum,
    Staircase,
    Steps,
)
from flashmoa.moa.config import ConfigError
from flashmoa.moa.run import System
from flashmoa.moa.serve.config_file import read_file

pytestmark = pytest.mark.anyio

MIXTURE = """
instruction = "Weigh:"
heading = "\\n{number}) "
budget = {tokens = 9000, reserve = 1000}
quorum = {answers = 2, seconds = 20}

[limits]
first_token_seconds = 30
attempts = 3

[fallback]
models = [{engine = "http://c", model = "other"}]
best_answer = false

[early_exit]
embedder = "http://e"
model = "embedding"
algorithm = "published"

[[layers]]
quorum = {answers = 1, seconds = 10}
[[layers.models]]
engines = ["http://a", "http://b"]
repeat = 3
role = "You doubt."
limits = {stall_seconds = 5}
temperature = 0.5
top_p = 0.9
max_tokens = 64
seed = 7

[[layers]]
models = [{engine = "http://a", repeat = 2}]
instruction = "Judge:"
closing = "\\nEnd."

[[layers]]
models = [{engine = "http://a"}]
"""


async def build(tmp_path: Path, text: str) -> System:
    path = tmp_path / "moa.toml"
    path.write_text(text)
    async with AsyncExitStack() as stack:
        [config] = read_file(path)
        return await config.build(stack)


async def test_all_settings_of_a_mixture_are_read(tmp_path: Path) -> None:
    mixture = await build(tmp_path, MIXTURE)
    assert isinstance(mixture, MixtureOfAgents)
    assert mixture.budget == Budget(9000, reserve=1000)
    assert mixture.limits == Limits(30, attempts=3)
    assert mixture.quorums == [Quorum(1, 10), Quorum(2, 20)]
    assert [model.model for model in mixture.fallback.models] == ["other"]
    assert not mixture.fallback.best_answer
    assert mixture.early_exit is not None
    assert mixture.early_exit.diagonal and mixture.early_exit.min_answers == 1
    first, second = mixture.prompts
    assert (first.instruction, first.heading, first.closing) == ("Judge:", "\n{number}) ", "\nEnd.")
    assert (second.instruction, second.closing) == ("Weigh:", "")
    proposer = mixture.layers[0][0]
    assert proposer.role == "You doubt."
    assert proposer.limits == Limits(stall_seconds=5)
    assert proposer.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 64, "seed": 7}


async def test_agents_take_turns_at_the_engines_of_their_model(tmp_path: Path) -> None:
    mixture = await build(tmp_path, MIXTURE)
    assert isinstance(mixture, MixtureOfAgents)
    urls = [
        [engine.url for engine in (agent.engine, *agent.backups)] for agent in mixture.layers[0]
    ]
    assert urls == [["http://a", "http://b"], ["http://b", "http://a"], ["http://a", "http://b"]]


async def test_staircase_and_debate_are_built(tmp_path: Path) -> None:
    layers = '[[layers]]\nmodels = [{engine = "http://a", repeat = 2}]\n'
    last = '[[layers]]\nmodels = [{engine = "http://a"}]\n'
    steps = '[staircase]\norder = "contiguous"\nfirst = 4\nlargest = 32\n'
    staircase = await build(tmp_path, f'kind = "staircase"\n{steps}{layers}{last}')
    assert isinstance(staircase, Staircase)
    assert staircase.steps == Steps(4, 2.0, 32, "contiguous")
    assert [len(layer) for layer in staircase.layers] == [2, 1]
    assert staircase.prompt(1, 0).layout == "question-first"
    debate = await build(
        tmp_path, f"kind = \"debate\"\n[debate]\nrounds = 3\nballot = '\\((\\d+)\\)'\n{layers}"
    )
    assert isinstance(debate, Debate) and debate.rounds == 3 and debate.steps is None
    assert debate.extract is not None
    assert [debate.extract(text) for text in ("(1) and (23).", "4")] == ["23", None]
    debate = await build(tmp_path, f'kind = "debate"\n{steps}{layers}{last}')
    assert isinstance(debate, Debate) and debate.steps is not None
    assert debate.extract is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('kind = "staircase"\ntopology = "2-1"\n@2\n@1', "topology is set, but a staircase has"),
        ("@2", "a mixture needs at least two"),
        ('kind = "debate"\n@2', "this debate needs two layers"),
        ("@2\n@2", "the last layer has 2 agents; it must have one"),
        ("budget = {tokens = 10, reserve = 10}\n@2\n@1", "reserve is 10; it must be less"),
        ("quorum = {answers = 0, seconds = 1}\n@2\n@1", "a quorum needs at least 1 answer"),
        ("limits = {stall_seconds = 0}\n@2\n@1", "stall_seconds is 0.0; it must be positive"),
        (
            "limits = {patience = 1}\n@2\n@1",
            "limits has no key 'patience': use one of answer_seconds",
        ),
        ('[[layers]]\nmodels = [{model = "m"}]', "a model needs engine = 'URL'"),
        # What serving would refuse is refused when the file is read, so by check.
        (
            'kind = "debate"\ndebate = {rounds = 0}\n@2\n@1',
            "debate.rounds: .* greater than or equal",
        ),
        ('kind = "debate"\n@1\n@1', "the first layer has 1 agent; a debate needs"),
        ('kind = "staircase"\nstaircase = {first = 0}\n@2\n@1', "first is 0; a chunk needs"),
        ("early_exit = {embedder = 'http://e', tau = 7}\n@3\n@1", "tau is 7.0; it must be above 0"),
        # Keys that would change nothing.
        (
            'early_exit = {embedder = "http://e", algorithm = "published", tau = 0.5}\n@3\n@1',
            "tau is set, but algorithm = 'published' has its own",
        ),
        (
            "early_exit = {embedder = 'http://e', threshold = 0.5}\n@3\n@1",
            "threshold is set, but rule = 'sample'",
        ),
        (
            'early_exit = {embedder = "http://e", rule = "threshold", seed = 1}\n@3\n@1',
            "seed is set, but rule = 'threshold' draws",
        ),
        (
            "early_exit = {embedder = 'http://e', min_answers = 3}\n@3\n@1",
            "needs 3 complete answers, but at most 3",
        ),
        (
            'kind = "debate"\nlayout = "answers-first"\ndebate = {ballot = \'x\'}\n@2',
            "layout is about a prompt with answers, but this debate ends with a vote",
        ),
        ('@2\nheading = "x"\n@1', "heading is about a prompt .* the first layer read none"),
        (
            'kind = "debate"\ndebate = {memory = "last"}\nstaircase = {first = 4}\n@2\n@1',
            "debate.memory is set, but with a staircase",
        ),
    ],
)
async def test_parts_that_do_not_fit_are_named(tmp_path: Path, text: str, problem: str) -> None:
    for count in "123":
        layer = f'[[layers]]\nmodels = [{{engine = "http://a", repeat = {count}}}]'
        text = text.replace(f"@{count}", layer)
    with pytest.raises(ConfigError, match=problem):
        await build(tmp_path, text)
