"""A folder is made completely or not at all, also if several processes make it at once."""

from pathlib import Path

import pytest
from flashmoa_cpu.whole_folder import whole_folder


def test_the_first_of_two_makers_wins(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    with whole_folder(out) as slow:
        slow.mkdir()
        (slow / "who").write_text("slow")
        with whole_folder(out) as fast:
            assert fast != slow
            fast.mkdir()
            (fast / "who").write_text("fast")
    assert (out / "who").read_text() == "fast"
    assert [*out.parent.iterdir()] == [out]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no disk"), whole_folder(tmp_path / "tiny") as folder:
        folder.mkdir()
        raise ValueError("no disk")
    assert not [*tmp_path.iterdir()]
    # A file in its place is the caller's mistake.
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError), whole_folder(tmp_path / "file") as folder:
        folder.mkdir()
