"""Where a file of scores that was not finished goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashmoa.errors import FlashMoAError
from flashmoa.scoring.lines import BadLine, Line, is_record_of

# How every line that is written begins.
_BEGINNING = b'{"line": '
# Bytes read at a time, from the end.
_BLOCK = 256 * 1024


class NotResumable(FlashMoAError):
    """Raised when the existing file of scores is not what this input would give."""


def resume(source: Path, out: Path, errors: Path) -> int:
    """Make ``out`` and ``errors`` end with the last line of ``source`` that is done.

    Returns: its number from 1; 0 where there is none. Raises: NotResumable, OSError.
    """
    with source.open("rb"):
        pass  # What cannot be read is not to leave empty files behind.
    last = _last_record(out)
    if last is None:
        errors.write_bytes(b"")
        return 0
    number: int = last["line"]
    if not _is_of(source, number, last):
        raise NotResumable(
            f"{out} is there and does not have the scores of {source}; give another --out, or "
            "--overwrite"
        )
    _cut_report(errors, number)
    return number


def _last_record(out: Path) -> dict[str, Any] | None:
    """The last whole line of a file, which then ends there. Raises: NotResumable."""
    if not out.exists():
        return None
    with out.open("r+b") as file:
        size = file.seek(0, 2)
        tail, start = b"", size
        while start and tail.count(b"\n") < 2:
            start = max(0, start - _BLOCK)
            file.seek(start)
            tail = file.read(size - start)
        whole, torn = tail[: tail.rfind(b"\n") + 1], tail[tail.rfind(b"\n") + 1 :]
        last = _record(whole.splitlines()[-1]) if whole else None
        if (whole and last is None) or not torn.startswith(_BEGINNING[: len(torn)]):
            raise NotResumable(
                f"{out} is there and no file of scores; give another --out, or --overwrite"
            )
        file.truncate(start + len(whole))
    return last


def _record(text: bytes) -> dict[str, Any] | None:
    try:
        fields: Any = json.loads(text)
        return fields if isinstance(fields["line"], int) else None
    except (ValueError, LookupError, TypeError):
        return None


def _is_of(source: Path, number: int, written: dict[str, Any]) -> bool:
    with source.open("rb") as file:
        for at, text in enumerate(file, start=1):
            if at == number:
                try:
                    return is_record_of(written, Line.read(text))
                except BadLine:
                    return False
    return False


def _cut_report(errors: Path, number: int) -> None:
    """Leave out what is told of lines behind ``number``: they come again."""
    errors.touch()
    with errors.open("r+b") as file:
        kept = 0
        for text in file:
            told = _record(text) if text.endswith(b"\n") else None
            if told is None or told["line"] > number:
                break
            kept += len(text)
        file.truncate(kept)
