"""The list of what the plugin uses inside SGLang is what its source says."""

from __future__ import annotations

import ast
import re
from difflib import unified_diff
from pathlib import Path

import pytest
from flashmoa_sglang import internals, plugin, releases
from flashmoa_sglang.internals import used_names
from flashmoa_sglang.internals.used_names import Use

from tests.unit.plugin.used_names import features, names
from tests.unit.plugin.used_names.derive import uses, walks
from tests.unit.plugin.used_names.listed import text
from tests.unit.plugin.used_names.walk import Walk


def test_the_list_is_up_to_date() -> None:
    shipped, derived = (one.splitlines() for one in (used_names.LIST.read_text("utf-8"), text()))
    changed = "\n".join(unified_diff(shipped, derived, "shipped", "derived", n=0, lineterm=""))
    assert shipped == derived, f"run `make names`, which changes the list:\n{changed}"


@pytest.mark.parametrize("release", releases.TESTED)
def test_the_list_is_read_as_it_was_written(
    release: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text(text(), "utf-8")
    monkeypatch.setattr(used_names, "LIST", tmp_path / "list")
    for feature in (internals.EVERYBODY, *internals.FEATURES):
        listed = list(used_names.used(release, feature))
        derived = {use for where, use in uses(release) if features.feature(where) == feature}
        assert len(listed) == len({*listed}) and {*listed} <= derived
        # A name that is called is not listed once more for being mentioned.
        left_out = derived - {*listed}
        assert {(use.owner, use.name) for use in left_out} <= {
            (use.owner, use.name) for use in listed
        }
        assert all(use == Use(use.owner, use.name) for use in left_out)


@pytest.mark.parametrize("release", releases.TESTED)
def test_all_that_the_plugin_does_to_objects_of_sglang_is_understood(release: str) -> None:
    """What fails here needs a line in ``used_names/names.py`` that says what it is."""
    assert [one for walk in walks(release) for one in walk.unclear] == []


def test_names_declare_only_what_the_plugin_has() -> None:
    walked = [walk for release in releases.TESTED for walk in walks(release)]
    functions = {where for walk in walked for where in walk.functions}
    told = {where for where, _ in names.BY_STRING}
    told |= {where for some in names.NOT_NEEDED.values() for where, _ in some}
    assert told <= functions
    defined = {re.split("[:.]", where)[-1] for where in functions}
    returned = {name.removesuffix("{}") for name in names.NAMES if name.endswith("{}")}
    assert returned <= defined
    plugin_folder = Path(plugin.__file__).parent
    assert all((plugin_folder / file).is_file() for file in names.IN_FILE)


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("scheduler.new_thing", "Scheduler.new_thing"),
        ("scheduler.new_thing = 1", "Scheduler.new_thing"),
        ("getattr(scheduler, 'new_thing', None)", "Scheduler.new_thing"),
        ("mine, other = scheduler.tree_cache, 1; mine.new_thing()", "RadixCache.new_thing"),
        ("[each.new_thing for each in scheduler.waiting_queue]", "Req.new_thing"),
        ("for one in ('new', 'thing'): getattr(scheduler, one)", "Scheduler.thing"),
        ("from sglang.srt.managers.io_struct import NewThing", "io_struct.NewThing"),
        ("import sglang.srt.new_thing", "new_thing."),
    ],
)
def test_a_new_line_of_the_plugin_is_a_new_use(line: str, used: str) -> None:
    walk = Walk("new.py", ast.parse(f"def new(scheduler: Any) -> None:\n    {line}\n"))
    found = {
        f"{owner.rpartition('.')[2].rpartition(':')[2]}.{use.name}"
        for _, use in walk.uses
        for owner in use.owner.split("&")
    }
    assert used in found and not walk.unclear


@pytest.mark.parametrize(
    "line",
    [
        "scheduler.inner_object.new_thing",
        "something.new_thing",
        "getattr(scheduler, something)",
        "alias = scheduler.inner_object; alias.new_thing()",
    ],
)
def test_a_use_that_cannot_be_followed_is_reported(line: str) -> None:
    source = f"def new(scheduler: Any, something: Any) -> None:\n    {line}\n"
    assert len(Walk("new.py", ast.parse(source)).unclear) == 1
