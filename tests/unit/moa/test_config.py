"""The file of ``flashmoa moa serve`` becomes systems with its settings; errors name the key."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa import (
    AggregationPrompt,
    ChairPrompt,
    Council,
    Debate,
    Limits,
    MixtureOfAgents,
    Quorum,
    ReviewPrompt,
    Staircase,
    Steps,
)
from flashmoa.moa.config import ConfigError, ServedSystem, read_file, read_tables
from flashmoa.moa.run import System

ROOT = Path(__file__).parents[3]
MODELS = """
[models.small]
engine = "http://a"
temperature = 0.5
max_tokens = 7
"""
SEVERAL = f"""{MODELS}
[systems.careful]
layers = [
    {{models = [{{use = "small", repeat = 2}}, "small"]}},
    {{models = ["small", {{use = "small", temperature = 0.2}}], instruction = "Doubt:"}},
    {{models = ["small"]}},
]
topology = "3x2x1"
fallback = {{models = ["small"]}}

[systems.quick]
kind = "staircase"
layers = [{{models = ["small", "small"]}}, {{models = ["small"]}}]
"""
MIXTURE = """
instruction = "Weigh:"
heading = "\\n{number}) "
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
min_answers = 1
diagonal = true

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


def read(folder: Path, text: str) -> list[ServedSystem]:
    path = folder / "moa.toml"
    path.write_text(text)
    return read_file(path)


def build(folder: Path, text: str) -> System:
    [served] = read(folder, text)
    return served.system


def test_all_settings_of_a_mixture_are_read(tmp_path: Path) -> None:
    [served] = read(tmp_path, MIXTURE)
    mixture = served.system
    assert isinstance(mixture, MixtureOfAgents)
    assert mixture.limits == Limits(30, attempts=3)
    assert mixture.quorums == [Quorum(1, 10), Quorum(2, 20)]
    assert [model.model for model in mixture.fallback.models] == ["other"]
    assert not mixture.fallback.best_answer
    assert mixture.early_exit is not None
    assert [*served.engine_names] == ["http://a", "http://b", "http://c", "http://e"]
    assert mixture.early_exit.diagonal and mixture.early_exit.min_answers == 1
    assert mixture.prompts == [
        AggregationPrompt(instruction="Judge:", heading="\n{number}) ", closing="\nEnd."),
        AggregationPrompt(instruction="Weigh:", heading="\n{number}) "),
    ]
    proposer = mixture.layers[0][0]
    assert proposer.role == "You doubt."
    assert proposer.limits == Limits(stall_seconds=5)
    assert proposer.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 64, "seed": 7}


def test_agents_take_turns_at_their_models_engines(tmp_path: Path) -> None:
    [layer, *_] = build(tmp_path, MIXTURE).layers
    urls = [[engine.url for engine in (agent.engine, *agent.backups)] for agent in layer]
    assert urls == [["http://a", "http://b"], ["http://b", "http://a"], ["http://a", "http://b"]]


def test_a_council_is_built(tmp_path: Path) -> None:
    members = '{models = [{engine = "http://a", repeat = 2}]}'
    chairman = '{models = [{engine = "http://b"}], instruction = "Decide:"}'
    quorum = "quorum = {answers = 2, seconds = 9}"
    text = f'kind = "council"\n{quorum}\nlayers = [{members}, {chairman}]'
    council = build(tmp_path, text)
    assert isinstance(council, Council) and council.quorums == [Quorum(2, 9), None]
    assert council.prompts == [ReviewPrompt(), ChairPrompt(instruction="Decide:")]
    urls = [[model.engine.url for model in layer] for layer in council.layers]
    assert urls == [["http://a"] * 2, ["http://a", "http://a", "http://b"], ["http://b"]]
    judged = build(tmp_path, f'judge = {{engine = "http://c"}}\n{text}')
    assert judged.layers[1][-1].engine.url == "http://c"


def test_staircase_and_debate_are_built(tmp_path: Path) -> None:
    layers = '[[layers]]\nmodels = [{engine = "http://a", repeat = 2}]\n'
    last = '[[layers]]\nmodels = [{engine = "http://a"}]\n'
    steps = '[staircase]\norder = "contiguous"\nfirst = 4\nlargest = 32\n'
    staircase = build(tmp_path, f'kind = "staircase"\n{steps}{layers}{last}')
    assert isinstance(staircase, Staircase)
    assert staircase.steps == Steps(4, 2.0, 32, "contiguous")
    assert [len(layer) for layer in staircase.layers] == [2, 1]
    assert staircase.prompts == [AggregationPrompt()]
    debate = build(tmp_path, f'kind = "debate"\n[debate]\nrounds = 3\n{layers}{last}')
    assert isinstance(debate, Debate) and debate.steps is None
    assert [len(layer) for layer in debate.layers] == [2, 2, 2, 1]
    debate = build(tmp_path, f'kind = "debate"\n{steps}{layers}{last}')
    assert isinstance(debate, Debate) and debate.steps is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('kind = "staircase"\ntopology = "2-1"\n@2\n@1', "no key 'topology': it is one of another"),
        ("@2", "give at least two layers"),
        ('kind = "debate"\n@2', r"its layers have \[2\] agents; this debate needs two layers"),
        ('kind = "staircase"\n@2\n@2', "this staircase needs two layers, and one agent in the sec"),
        ("@2\n@2", "and the last must have one agent"),
        ("quorum = {answers = 0, seconds = 1}\n@2\n@1", "quorum.answers: Input should be gr"),
        ("limits = {stall_seconds = 0}\n@2\n@1", "limits.stall_seconds: Input should be"),
        ("limits = {patience = 1}\n@2\n@1", "no key 'patience': see the keys in"),
        ('[[layers]]\nmodels = [{model = "m"}]', "a model needs engine = 'URL'"),
        ('kind = "debate"\ndebate = {rounds = 0}\n@2\n@1', "at least one round; rounds is 0"),
        ('kind = "debate"\n@1\n@1', "a debate needs at least two debaters; there are 1"),
        ('kind = "council"\n@1\n@1', "at least two members; there are 1"),
        ('kind = "council"\njudge = {engine = "http://j", repeat = 2}\n@2\n@1', "has one judge"),
        ('kind = "staircase"\nstaircase = {first = 0}\n@2\n@1', "staircase.first: Input should be"),
        ("early_exit = {embedder = 'http://e', tau = 7}\n@3\n@1", "early_exit.tau: Input should"),
        ("early_exit = {tau = 0.5}\n@3\n@1", "early_exit.embedder: Field required"),
        ("early_exit = {embedder = 'e'}\n@3\n@1", "early_exit.embedder: 'e' is not an engine's"),
        ("early_exit = {api_key = 5}\n@3\n@1", "early_exit.api_key: Input should be a valid str"),
        ("early_exit = {api_key = 'é'}\n@3\n@1", "early_exit.api_key: String should match"),
        ("layers = 3", "layers: Input should be a valid list"),
        ("nmae = 'x'", "the file has no key 'nmae': did you mean 'name'"),
        ("", "layers: Field required"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(tmp_path: Path, text: str, problem: str) -> None:
    for count in "123":
        layer = f'[[layers]]\nmodels = [{{engine = "http://a", repeat = {count}}}]'
        text = text.replace(f"@{count}", layer)
    with pytest.raises(ConfigError, match=problem):
        build(tmp_path, text)


def test_a_file_serves_several_systems(tmp_path: Path) -> None:
    careful, quick = read(tmp_path, SEVERAL)
    assert (careful.name, quick.name) == ("careful", "quick")
    assert isinstance(careful.system, MixtureOfAgents) and isinstance(quick.system, Staircase)
    assert [len(layer) for layer in careful.system.layers] == [3, 2, 1]
    assert [model.sampling for model in careful.system.layers[1]] == [
        {"temperature": 0.5, "max_tokens": 7},
        {"temperature": 0.2, "max_tokens": 7},
    ]
    assert careful.system.prompts[0].instruction == "Doubt:"
    assert careful.system.fallback.models[0].engine.url == "http://a"
    assert careful.engine_names == {"http://a": "engine 1"}


def test_a_file_with_one_system_needs_no_table(tmp_path: Path) -> None:
    layers = 'layers = [{models = ["small"]}, {models = [{use = "small", seed = 1}]}]'
    [served] = read(tmp_path, f'name = "alone"\n{layers}\n{MODELS}')
    assert served.name == "alone"
    assert served.system.layers[1][0].sampling["seed"] == 1


def test_an_agent_may_name_its_models_engine(tmp_path: Path) -> None:
    agent = '{use = "small", engine = "http://b/v1"}'
    layers = f"layers = [{{models = [{agent}]}}, {{models = [{agent}]}}]"
    [served] = read(tmp_path, f"{layers}\n{MODELS.replace('engine', '# engine')}")
    assert [*served.engine_names] == ["http://b"]


def test_an_agent_replaces_keys_by_their_alternatives(tmp_path: Path) -> None:
    agent = '{use = "small", engines = ["http://b", "http://c"], max_completion_tokens = 2000}'
    layers = f"layers = [{{models = [{agent}]}}, {{models = [{agent}]}}]"
    [served] = read(tmp_path, f"{layers}\n{MODELS}")
    model = served.system.layers[0][0]
    assert (model.engine.url, model.backups[0].url) == ("http://b", "http://c")
    assert model.max_tokens == 2000


@pytest.mark.parametrize(("name", "value"), [("lora_path", "x"), ("models", ["x"])])
def test_unknown_parameters_have_their_own_table(tmp_path: Path, name: str, value: object) -> None:
    extra = f"max_tokens = 7\nextra_body = {{{name} = {value!r}}}"
    [careful, _] = read(tmp_path, SEVERAL.replace("max_tokens = 7", extra))
    assert careful.system.layers[0][0].sampling[name] == value


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("temperature = 0.5", "temprature = 0.5",
         r"toml: models.small has no key 'temprature': did you mean 'temperature'\?$"),
        ("temperature = 0.5", "temperature = 5",
         r"toml: models.small.temperature: Input should be less than or equal to 2$"),
        ("temperature = 0.5", "limits = {attempts = 0}",
         r"toml: models.small.limits.attempts: Input should be greater than or equal to 1$"),
        ('"http://a"', '"a:1"',
         r"toml: models.small.engine: 'a:1' is not an engine's URL; give \S+$"),
        ("temperature = 0.5", "engines = ['http://b']",
         r"toml: models.small: a model has engine = 'URL' or engines = .*, not both$"),
        ("temperature = 0.5", 'use = "small"', r"toml: models.small has no key 'use'"),
        ('{use = "small", temperature = 0.2}', '{use = "small", temprature = 0.2}',
         r"toml: systems.careful.layers.1.models.1 has no key 'temprature'"),
        ("[models.small]", "[models.other]\nsed = 1\n[models.small]",
         r"toml: models.other has no key 'sed': did you mean 'seed'\?$"),
        ('topology = "3x2x1"', 'topolgy = "3x2x1"',
         r"systems.careful has no key 'topolgy': did you mean 'topology'"),
        ('topology = "3x2x1"', "limits = {stall_second = 3}",
         r"systems.careful.limits has no key 'stall_second': did you mean 'stall_seconds'"),
        ('instruction = "Doubt:"', 'instructions = "Doubt:"',
         r"systems.careful.layers.1 has no key 'instructions': did you mean 'instruction'"),
        ('"small"]}]', '"smal"]}]',
         r"systems.quick.layers.1.models.0: there is no model 'smal': did you mean 'small'"),
        ('kind = "staircase"', 'kind = "stairs"', r"systems.quick.kind is 'stairs'; use one of"),
        ("[systems.quick]", "[system.quick]", r"system: a file with \[systems.NAME\] has no"),
        ("repeat = 2", "models = []", r"layers.0.models.0 has no key 'models'"),
        ('kind = "staircase"', 'kind = "mixture"\ndebate = {rounds = 3}',
         r"systems.quick has no key 'debate': it is one of another table, or of another kind"),
        ('kind = "staircase"', 'kind = "debate"\ndebate = {memory = "some"}',
         r"systems.quick.debate.memory: Input should be 'all' or 'last'"),
        ("[models.small]", "[models]", r"models must consist of tables \[models.NAME\]"),
        ("[models.small]", "[models.small", "is not valid TOML"),
        ("[systems.quick]", "[systems.quick]\nname = 'fast'", "systems.quick has its name already"),
        ('layers = [{models = ["small", "small"]}',
         'layers = [{instruction = "Write:", models = ["small", "small"]}',
         "systems.quick: the first layer reads no answers; give instruction to a later layer"),
        ('"small"]}, {models', '"small"]}, {quorum = {answers = 1, seconds = 1}, models',
         "systems.quick: nobody reads the last layer's answers; give quorum to an earlier one"),
    ],
)  # fmt: skip
def test_an_error_names_the_key_and_its_table(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    assert old in SEVERAL
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, SEVERAL.replace(old, new))


tables = st.sampled_from(["models", "layers", "systems", "use", "engine", "limits", "quorum", "x"])
toml_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tables, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["models", "layers", "systems", "kind", "debate", "early_exit", "x"])


@given(file=st.dictionaries(names, toml_values))
def test_any_file_is_read_or_refused(file: dict[str, object]) -> None:
    try:
        configs = read_tables(file)
    except ConfigError as error:
        assert str(error)
    else:
        assert configs


def test_examples_of_the_documentation_are_valid() -> None:
    page = (ROOT / "docs" / "mixture-of-agents.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    served = [one for text in examples for one in read_tables(tomllib.loads(text))]
    assert {type(one.system) for one in served} == {MixtureOfAgents, Staircase, Debate, Council}
