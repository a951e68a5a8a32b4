"""``flashmoa router``: the numbers that it refuses, and its limit of open files."""

import resource

import pytest

from flashmoa.cli import router


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    def serve(*_: object) -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    monkeypatch.setattr(router, "_serve", serve)
    monkeypatch.setattr(router, "port_problem", lambda _: None)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        assert router.main(["--engine", "http://127.0.0.1:9", "--port", "0"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [hard]
