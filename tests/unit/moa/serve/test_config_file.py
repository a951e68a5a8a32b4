"""A file with one model or several, and errors that name the key and its table."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa.config import ConfigError, MixtureConfig
from flashmoa.moa.serve.config_file import read_file, read_tables

ROOT = Path(__file__).parents[4]
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


def read(folder: Path, text: str) -> list[MixtureConfig]:
    path = folder / "moa.toml"
    path.write_text(text)
    return read_file(path)


def test_models_of_a_file_are_those_of_its_tables(tmp_path: Path) -> None:
    careful, quick = read(tmp_path, SEVERAL)
    assert (careful.name, careful.kind) == ("careful", "mixture")
    assert (quick.name, quick.kind) == ("quick", "staircase")
    assert [model.repeat for model in careful.layers[0].models] == [2, 1]
    second = [model.sampling for model in careful.layers[1].models]
    assert second == [
        {"temperature": 0.5, "max_tokens": 7},
        {"temperature": 0.2, "max_tokens": 7},
    ]
    assert careful.layers[1].instruction == "Doubt:"
    assert careful.fallback.models[0].engine == "http://a"


def test_a_file_with_one_model_needs_no_table_for_it(tmp_path: Path) -> None:
    layers = 'layers = [{models = ["small"]}, {models = [{use = "small", seed = 1}]}]'
    [config] = read(tmp_path, f'name = "alone"\n{layers}\n{MODELS}')
    assert config.name == "alone"
    assert config.layers[1].models[0].sampling["seed"] == 1


def test_parameters_that_are_not_known_have_a_table_of_their_own(tmp_path: Path) -> None:
    text = SEVERAL.replace("max_tokens = 7", 'max_tokens = 7\nextra_body = {lora_path = "x"}')
    assert read(tmp_path, text)[0].layers[0].models[0].sampling["lora_path"] == "x"
    text = SEVERAL.replace("max_tokens = 7", 'max_tokens = 7\nextra_body = {models = ["x"]}')
    assert read(tmp_path, text)[0].layers[0].models[0].sampling["models"] == ["x"]


@pytest.mark.parametrize(
    ("topology", "quorum", "problem"),
    [
        ("4-2-1", "layer", "quorum of layer 0 (from 0) needs 3 answers, but at most 2"),
        ("4-2-1", "all", "quorum of layer 0, 1 (from 0) needs 3 answers, but at most 2"),
        ("4x2x1", "layer", None),
        ("4x2x1", "all", None),
    ],
)
def test_a_quorum_has_no_more_answers_than_are_read_together(
    tmp_path: Path, topology: str, quorum: str, problem: str | None
) -> None:
    """One quorum for all layers must be possible in one of them."""
    table = "quorum = {answers = 3, seconds = 1}"
    first = "models = [{use = 'small', repeat = 4}]" + (f", {table}" if quorum == "layer" else "")
    layers = f"layers = [{{{first}}}, {{models = ['small', 'small']}}, {{models = ['small']}}]"
    text = f"topology = '{topology}'\n{layers}\n{table if quorum == 'all' else ''}\n{MODELS}"
    if problem is None:
        assert read(tmp_path, text)
        return
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read(tmp_path, text)


def test_a_staircases_quorum_has_no_more_answers_than_proposers(tmp_path: Path) -> None:
    text = SEVERAL + "quorum = {answers = 3, seconds = 1}\n"
    with pytest.raises(ConfigError, match="needs 3 answers, but at most 2 are read"):
        read(tmp_path, text)


def test_a_quorum_of_a_layer_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    quorum = "quorum = {answers = 1, seconds = 1}"
    layers = f"layers = [{{models = ['small', 'small']}}, {{models = ['small'], {quorum}}}]"
    with pytest.raises(ConfigError, match="the last layer has a quorum"):
        read(tmp_path, f"{layers}\n{MODELS}")


def test_a_model_that_nobody_uses_is_checked_too(tmp_path: Path) -> None:
    unused = '[models.unused]\nengine = "http://a"\ntemprature = 1\n'
    problem = "models.unused has no key 'temprature': did you mean 'temperature'"
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, unused + SEVERAL)
    # Agents that use it may give the engine.
    assert read(tmp_path, "[models.half]\nmax_tokens = 3\n" + SEVERAL)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("temperature = 0.5", "temprature = 0.5",
         r"systems.careful.layers.0.models.0 has no key 'temprature': did you mean 'temperature'"),
        ("temperature = 0.5", "temperature = 5",
         r"systems.careful.layers.0.models.0.temperature: Input should be less than or equal"),
        ('topology = "3x2x1"', 'topolgy = "3x2x1"',
         r"systems.careful has no key 'topolgy': did you mean 'topology'"),
        ('topology = "3x2x1"', "limits = {stall_second = 3}",
         r"systems.careful.limits has no key 'stall_second': did you mean 'stall_seconds'"),
        ('topology = "3x2x1"', "quorum = {answers = 2, secs = 3}",
         r"systems.careful.quorum has no key 'secs': did you mean 'seconds'"),
        ('instruction = "Doubt:"', 'instructions = "Doubt:"',
         r"systems.careful.layers.1 has no key 'instructions': did you mean 'instruction'"),
        ('"small"]}]', '"smal"]}]',
         r"systems.quick.layers.1.models.0: there is no model 'smal': did you mean 'small'"),
        ('kind = "staircase"', 'kind = "stairs"', r"systems.quick.kind: Input should be 'mixture'"),
        ('kind = "staircase"', 'name = "x"', r"systems.quick.name: the table is called 'quick'"),
        ("[systems.quick]", "[system.quick]", r"system: a file with \[systems.NAME\] has no"),
        ("[models.small]", "[model.small]", r"model: a file with \[systems.NAME\] has no such key"),
        ("repeat = 2", "models = []", r"layers.0.models.0 has no key 'models'"),
        ('topology = "3x2x1"', 'topology = "3x2x1"\nbudget = {tokens = 0}',
         r"systems.careful.budget: Value error"),
        ('kind = "staircase"', 'kind = "mixture"\ndebate = {rounds = 3}',
         r"systems.quick: Value error, debate is set, but a mixture has none"),
        ('kind = "staircase"', 'kind = "debate"\ndebate = {ballot = "("}',
         r"systems.quick.debate.ballot: Value error, '\(' is not a regular expression"),
        ("[models.small]", "[models]", r"models must consist of tables \[models.NAME\]"),
        ("[models.small]", "[models.small", "is not valid TOML"),
    ],
)  # fmt: skip
def test_error_of_a_wrong_file_names_the_key_and_its_table(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    assert old in SEVERAL
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, SEVERAL.replace(old, new))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("layers = 3", "layers: Input should be a valid list"),
        ("[[layers]", "is not valid TOML"),
        ("nmae = 'x'", "the file has no key 'nmae': did you mean 'name'"),
        ("", "layers: Field required"),
    ],
)
def test_error_of_a_wrong_file_names_the_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text)


toml_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["models", "layers", "systems", "use", "engine", "limits", "quorum", "x"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(
    file=st.dictionaries(
        st.sampled_from(["models", "layers", "systems", "kind", "debate", "early_exit", "x"]),
        toml_values,
    )
)
def test_any_file_is_read_or_refused_with_a_sentence(file: dict[str, object]) -> None:
    try:
        configs = read_tables(file)
    except ConfigError as error:
        assert str(error)
    else:
        assert configs


def test_examples_of_the_documentation_are_valid() -> None:
    page = (ROOT / "docs" / "mixture-of-agents.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    configs = [config for text in examples for config in read_tables(tomllib.loads(text))]
    assert {config.kind for config in configs} == {"mixture", "staircase", "debate"}
