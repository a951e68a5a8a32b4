"""``flashmoa router``: the numbers that it refuses, and its limit of open files."""

import resource

import pytest

from flashmoa.cli import router


@pytest.mark.parametrize("option", ["--saturation", "--patience", "--agent-seconds"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_numbers_that_are_not_finite_are_refused(
    option: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "_serve", print)
    with pytest.raises(SystemExit):
        router.main(["--engine", "http://127.0.0.1:9", f"{option}={value}"])
    assert f"{option}: {value} is refused; give a number " in capsys.readouterr().err


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
