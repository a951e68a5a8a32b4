"""What is looked at of a running engine, through its API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

import flashmoa
from flashmoa.doctor.findings import Finding, mend, note, ok
from flashmoa.doctor.linking import check_link, check_templates
from flashmoa.engine import (
    BadAnswer,
    EngineClient,
    EngineError,
    EngineInfo,
    EngineTimeout,
    EngineUnreachable,
    PluginMissing,
    RequestRefused,
    engine_url,
)

_TIMEOUT_SECONDS = 30.0
_CAPABILITIES = {"prefill_only", "render", "prompt_streams", "prompt_stream_id"}


@dataclass(frozen=True, slots=True)
class Asked:
    """Which engine to look at, and how a client would use it.

    ``calls``: whether two short answers may be asked of it, to see a link work.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    calls: bool = True


async def check_engine(asked: Asked) -> list[Finding]:
    """Whether it can be reached, what it is, and whether it links."""
    try:
        url = engine_url(asked.url)
    except ValueError as error:
        return [mend("engine", str(error), "--engine http://HOST:PORT")]
    async with EngineClient(url, api_key=asked.api_key, timeout=_TIMEOUT_SECONDS) as engine:
        try:
            info = await engine.info()
        except EngineError as error:
            return [await _refused(error, url, asked.api_key)]
        found = [*_versions(info, url), _served(info, asked.model), *_room(info)]
        found += _settings(await _ask(url, asked.api_key, "/server_info", "/get_server_info"))
        try:
            templates = await check_templates(engine)
            found += templates
            # Where prompts cannot be rendered, no link can be made.
            if asked.calls and not any(one.level == "mend" for one in templates):
                found.append(await check_link(engine, asked.model or info.model["name"]))
        except EngineError as error:
            found.append(mend("engine", f"it stopped answering: {error}", "see the engine's log"))
    return found


async def _refused(error: EngineError, url: str, key: str | None) -> Finding:
    """What an engine is that does not say what it is."""
    if isinstance(error, EngineUnreachable):
        if "SSL" in str(error):
            return mend("engine", f"{url} does not speak https", "--engine http://HOST:PORT")
        port = urlsplit(url).port or 80
        text = f"nothing answers at {url} ({error.__cause__})"
        return mend("engine", text, f"flashmoa serve --model-path PATH --port {port}")
    if isinstance(error, EngineTimeout):
        return mend("engine", f"{url} does not answer", "see the engine's log, start it again")
    if isinstance(error, RequestRefused) and error.status in (401, 403):
        given = "takes another API key" if key else "needs an API key"
        return mend("engine", f"{url} {given}", "--api-key KEY; clients: api_key=KEY")
    if isinstance(error, PluginMissing | BadAnswer):
        return await _without_plugin(url, key)
    return mend("engine", str(error), "see the engine's log")


async def _without_plugin(url: str, key: str | None) -> Finding:
    if "model_path" in await _ask(url, key, "/model_info", "/get_model_info"):
        text = f"{url} is SGLang without the plugin: agents run there, unlinked"
        remedy = "beside that SGLang: pip install ./server_patches; unset SGLANG_PLUGINS; restart"
        return mend("engine", text, remedy)
    if "data" in await _ask(url, key, "/v1/models"):
        text = f"{url} is another OpenAI server than SGLang: agents run there, unlinked"
        return mend("engine", text, "flashmoa serve --model-path PATH")
    text = f"{url} answers, but is no engine"
    return mend("engine", text, "--engine http://HOST:PORT as flashmoa serve shows it")


async def _ask(url: str, key: str | None, *paths: str) -> dict[str, Any]:
    """The first of these routes that answers JSON; empty where none does."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_SECONDS) as http:
        for path in paths:
            try:
                answer = await http.get(path)
                if answer.is_success and isinstance(answer.json(), dict):
                    return cast("dict[str, Any]", answer.json())
            except (httpx.HTTPError, ValueError):
                continue
    return {}


def _versions(info: EngineInfo, url: str) -> list[Finding]:
    plugin, sglang = info.plugin.get("version"), info.sglang.get("version")
    found = [ok("engine", f"{url}: SGLang {sglang}, flashmoa-sglang {plugin}")]
    if plugin != flashmoa.__version__:
        text = f"its plugin is {plugin}, this client {flashmoa.__version__}"
        found.append(note("versions", text, "pip install both from one checkout, and restart it"))
    if info.capabilities == ["render"]:
        text = "the engine keeps no KV, and linking needs it"
        found.append(mend("settings", text, "start it without --flashmoa-kv-cache off"))
    elif missing := sorted(_CAPABILITIES - set(info.capabilities)):
        text = f"its plugin has no {', '.join(missing)}"
        found.append(mend("versions", text, "pip install ./server_patches there, and restart it"))
    return found


def _served(info: EngineInfo, asked: str | None) -> Finding:
    name = info.model.get("name", "?")
    if asked is None or asked == name:
        return ok("model", name)
    text = f"{name} is served; asked for {asked!r}, SGLang answers with it all the same"
    return note("model", text, f"model={name!r}, or start it with --served-model-name {asked}")


def _room(info: EngineInfo) -> list[Finding]:
    pool = sum(rank.total for rank in info.kv)
    smallest = min((rank.total for rank in info.kv), default=0)
    text = f"{pool:,} tokens of KV, context of {info.context_length:,}"
    found = [ok("room", text)]
    if smallest < info.context_length:
        text += ": longer prompts than the pool holds are refused"
        found = [note("room", text, "--mem-fraction-static or --max-total-tokens, higher")]
    streams = f"{info.prompt_streams} prompt streams open"
    if info.costs is None:
        found.append(
            note("costs", f"{streams}; the engine measures its forwards, which takes some seconds")
        )
        return found
    step = f"a decode step takes {1000 * info.costs.decode_step:.1f} ms"
    found.append(ok("costs", f"{streams}; {step}"))
    return found


def _settings(server: dict[str, Any]) -> list[Finding]:
    """Arguments that the engine was started with, as far as links depend on them."""
    if not server:
        return [note("settings", "the engine does not tell its arguments")]
    found: list[Finding] = []
    if server.get("disable_radix_cache"):
        text = "the radix cache is off, and linking keeps its KV there"
        found.append(mend("settings", text, "start it without --disable-radix-cache"))
    if not server.get("enable_cache_report"):
        text = "cached tokens are told of linked calls only"
        found.append(note("settings", text, "start it with --enable-cache-report"))
    page = server.get("page_size") or 1
    found.append(ok("settings", f"pages of {page} {'token' if page == 1 else 'tokens'}"))
    return found
