"""Keep what a program's runs have taught between processes: :func:`load` and :func:`save`.

A program has one file in the user's folder. The file has the prompts and answers of the program's
last complete run, which the next run is predicted from, and the lengths of earlier answers. It has
neither headers nor keys of MCP servers, so that no API key is on the disk. Only the user may read
it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from flashmoa.link.learned_runs import (
    MAX_PROGRAMS,
    MAX_RECORDED_BYTES,
    NOT_REMEMBERED,
    LearnedRun,
    Message,
    Program,
    RecordedCall,
    RecordedRequest,
)

logger = logging.getLogger(__name__)

_SUFFIX = ".flashmoa-run.json"


@dataclass(slots=True)
class _StoredCall:
    """A call without its request's messages and fields, which are in tables of the file."""

    call: RecordedCall
    messages: list[int]
    fields: int


@dataclass(slots=True)
class _StoredProgram:
    """A program as its file has it. Calls often have messages in common: each is there once."""

    version: Literal[1] = 1
    name: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    fields: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    calls: list[_StoredCall] = field(default_factory=list[_StoredCall])
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    sent_back: set[str] = field(default_factory=set[str])


@cache
def _format() -> TypeAdapter[_StoredProgram]:
    return TypeAdapter(_StoredProgram)


class _Numbered:
    """Numbers JSON values; equal values have one number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}
        # A run has equal values once in memory, so that most are found without looking into them.
        self._by_id: dict[int, tuple[int, Any]] = {}

    def number(self, value: Any) -> int:
        if id(value) not in self._by_id:
            number = self._numbers.setdefault(json.dumps(value), len(self.values))
            if number == len(self.values):
                self.values.append(value)
            self._by_id[id(value)] = number, value
        return self._by_id[id(value)][0]


def prepare(folder: Path) -> None:
    """Make the folder if there is none. Raises: OSError if it cannot be made, or is a file."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def load(folder: Path, name: str, program: Program) -> None:
    """Let a program know what :func:`save` kept. A file that cannot be read is as no file."""
    path = _path(folder, name)
    try:
        stored = _format().validate_json(path.read_bytes())
        found = Program()
        found.recorded = {each.call.key: _restore(each, stored) for each in stored.calls}
        LearnedRun(found)
    except FileNotFoundError:
        return
    except Exception as error:  # Somebody may have written anything into the file.
        text = "%s is not used, and replaced after the next run: %s"
        logger.warning(text, path, str(error).partition("\n")[0])
        return
    program.recorded, program.sent_back = found.recorded, stored.sent_back
    program.output_lengths.restore(stored.lengths)


def save(folder: Path, name: str, program: Program) -> None:
    """Write what a program has learned, in place of its earlier file.

    A failure is logged: the run itself has ended well.
    """
    try:
        data = _format().dump_json(_store(name, program))
        if len(data) > MAX_RECORDED_BYTES:
            raise ValueError(f"they take over {MAX_RECORDED_BYTES // 1_000_000} MB")
        # The file has mode 600, and readers see the old or the new one.
        file, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=_SUFFIX)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(data)
            os.replace(temporary, _path(folder, name))
        except BaseException:
            os.unlink(temporary)
            raise
        _delete_oldest(folder)
    except Exception as error:  # Texts may have half a character, which JSON cannot have.
        logger.warning("the runs of %r are not remembered in %s: %s", name, folder, error)


def _delete_oldest(folder: Path) -> None:
    """Delete files of programs that ran long ago, and files that a killed process has left."""
    with suppress(FileNotFoundError):  # Another process deletes them, too.
        files = sorted(folder.glob(f"[!.]*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        unfinished = [*folder.glob(f".*{_SUFFIX}")]
        old = [path for path in unfinished if path.stat().st_mtime < time.time() - 3600]
        for path in [*files[:-MAX_PROGRAMS], *old]:
            path.unlink(missing_ok=True)


def _path(folder: Path, name: str) -> Path:
    readable = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[-40:]
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:12]
    return folder / f"{readable.strip('.-')}-{digest}{_SUFFIX}"


def _store(name: str, program: Program) -> _StoredProgram:
    messages, fields = _Numbered(), _Numbered()
    calls = [
        _StoredCall(
            replace(call, request=_without_parts(call.request)),
            [messages.number(message) for message in call.request.messages],
            fields.number(_without_keys(call.request.fields)),
        )
        for call in program.recorded.values()
    ]
    lengths = program.output_lengths.kept()
    return _StoredProgram(
        1, name, messages.values, fields.values, calls, lengths, program.sent_back
    )


def _without_keys(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields without the keys of MCP servers, which no prompt shows."""
    keys = ("authorization", "headers")
    tools = cast("Sequence[Mapping[str, Any]]", fields.get("tools") or ())
    if not any(tool.get("type") == "mcp" for tool in tools):
        return fields
    return {
        **fields,
        "tools": [{name: tool[name] for name in tool if name not in keys} for tool in tools],
    }


def _without_parts(request: RecordedRequest) -> RecordedRequest:
    return replace(request, messages=(), fields={}, headers={})


def _restore(stored: _StoredCall, program: _StoredProgram) -> RecordedCall:
    request = replace(
        stored.call.request,
        messages=[program.messages[number] for number in stored.messages],
        fields=program.fields[stored.fields],
        headers=NOT_REMEMBERED,
    )
    return replace(stored.call, request=request)
