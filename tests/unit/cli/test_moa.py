"""The requests of ``flashmoa moa`` to engines without the plugin, and its findings."""

from collections import defaultdict
from pathlib import Path

import anyio
import pytest
import uvicorn

from flashmoa.cli import moa
from flashmoa.engine.local import free_port
from tests.integration.router.serving import serve as serve_app
from tests.unit.moa.scripted_engine import Script, scripted_engine
from tests.unit.router.support import FakeEngine

NOWHERE = "http://127.0.0.1:9"
MODEL = 'engine = "URL", model = "m"'
LAYERS = f"layers = [{{models = [{{{MODEL}, repeat = 3}}]}}, {{models = [{{{MODEL}}}]}}]\n"
EARLY = 'early_exit = {embedder = "URL"}\n'


async def check(
    folder: Path, shown: pytest.CaptureFixture[str], text: str, script: Script = ("Tuesday",)
) -> tuple[str, list[dict[str, object]]]:
    """Check a file whose engine has one model, ``m``. Return the output, and the requests."""
    path = folder / "moa.toml"
    # As SGLang, it answers requests for any name.
    async with scripted_engine(defaultdict(lambda: script, m=script)) as (engine, _):
        path.write_text(text.replace("URL", engine.url))
        status = await anyio.to_thread.run_sync(moa.main, ["check", str(path)])
    output = " ".join(shown.readouterr().out.split())
    assert status == ("to fix" in output and "nothing to fix" not in output)
    return output, engine.bodies


async def serve(path: Path, url: str, port: int = 0) -> None:
    await anyio.Path(path).write_text(LAYERS.replace("URL", url))
    command = ["serve", str(path), "--port", str(port or free_port())]
    assert await anyio.to_thread.run_sync(moa.main, command) == 0


@pytest.mark.parametrize(
    ("first", "has", "lacks"),
    [
        ("", {"max_tokens"}, {"logprobs", "continue_final_message"}),
        ('kind = "staircase"\n', {"continue_final_message"}, {"logprobs"}),
        (EARLY, {"logprobs"}, {"continue_final_message"}),
    ],
)
async def test_a_request_has_the_form_that_is_needed(
    first: str, has: set[str], lacks: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, [body] = await check(tmp_path, capsys, f"{first}{LAYERS}")
    assert all(body[name] for name in has) and not body.keys() & lacks
    assert first or ("nothing to fix" in shown and body["max_tokens"] == 1)


async def test_an_engine_needs_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, _ = await check(tmp_path, capsys, LAYERS, [("end", "abort")])
    assert "it refuses an agent's request to 'm'" in shown

    class Silent:
        async def compare(self, texts: list[str]) -> None:
            await anyio.sleep_forever()

    monkeypatch.setattr(moa, "_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr("flashmoa.moa.config.EngineEmbedder", lambda *_: Silent())
    shown, _ = await check(tmp_path, capsys, f"{EARLY}{LAYERS}", [])
    assert "gives no log-probabilities" in shown
    assert "it did not answer within 0.3 s" in shown


@pytest.mark.parametrize("up", [True, False])
async def test_a_server_names_absent_engines_and_starts(
    up: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: served.extend(sockets))
    path, port = tmp_path / "moa.toml", free_port()
    async with scripted_engine({"m": ["Tuesday"]}) as (engine, _):
        await serve(path, engine.url if up else NOWHERE, port)
    printed = capsys.readouterr()
    assert len(served) == 1 and printed.out == f"flashmoa: moa on http://127.0.0.1:{port}/v1\n"
    # Agents ask the same engine with one key, so that it is named once.
    assert printed.err.count(f"flashmoa moa: {NOWHERE} cannot be reached") == (not up)
    assert (f"`flashmoa moa check {path}`" in printed.err) == (not up)
    assert up == (not printed.err)


async def test_a_server_names_a_refused_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: None)
    async with serve_app(FakeEngine().app()) as url:
        await serve(tmp_path / "moa.toml", url)
    problem = f"flashmoa moa: {url} refuses this API key, or needs one"
    assert problem in capsys.readouterr().err
