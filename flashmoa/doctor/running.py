"""Checks of a running engine, through its API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

import flashmoa
from flashmoa.doctor.findings import Finding, fix, note, ok
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
class EngineToCheck:
    """Which engine to check, and how a client would use it.

    ``calls`` says whether two short calls may be made, to see a link work.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    calls: bool = True


async def check_engine(asked: EngineToCheck) -> list[Finding]:
    """Check whether an engine can be reached, what it is, and whether it links."""
    try:
        url = engine_url(asked.url)
    except ValueError as error:
        return [fix("engine", str(error), "--engine http://HOST:PORT")]
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
            if asked.calls and not any(one.level == "fix" for one in templates):
                found.append(await check_link(engine, asked.model or info.model["name"]))
        except EngineError as error:
            found.append(fix("engine", f"it stopped answering: {error}", "see the engine's log"))
    return found


async def _refused(error: EngineError, url: str, key: str | None) -> Finding:
    """Find out what answers at ``url`` where it does not say what it is."""
    if isinstance(error, EngineUnreachable):
        if "SSL" in str(error):
            return fix("engine", f"{url} does not speak https", "--engine http://HOST:PORT")
        port = urlsplit(url).port or 80
        text = f"nothing answers at {url} ({error.__cause__})"
        return fix("engine", text, f"flashmoa serve --model-path PATH --port {port}")
    if isinstance(error, EngineTimeout):
        return fix(
            "engine",
            f"{url} did not answer within {_TIMEOUT_SECONDS:.0f} s",
            "see the engine's log; start it again",
        )
    if isinstance(error, RequestRefused) and error.status in (401, 403):
        given = "refuses this API key" if key else "needs an API key"
        return fix("engine", f"{url} {given}", "--api-key KEY; clients: api_key=KEY")
    if isinstance(error, PluginMissing | BadAnswer):
        return await _without_plugin(url, key)
    return fix("engine", str(error), "see the engine's log")


async def _without_plugin(url: str, key: str | None) -> Finding:
    if "model_path" in await _ask(url, key, "/model_info", "/get_model_info"):
        text = f"{url} is SGLang without the plugin: agents run there, but unlinked"
        remedy = "beside that SGLang: pip install ./server_patches, unset SGLANG_PLUGINS, restart"
        return fix("engine", text, remedy)
    if "data" in await _ask(url, key, "/v1/models"):
        text = f"{url} is an OpenAI server, but not SGLang: agents run there, but unlinked"
        return fix("engine", text, "flashmoa serve --model-path PATH")
    text = f"{url} answers, but is not an engine"
    return fix("engine", text, "--engine http://HOST:PORT as flashmoa serve shows it")


async def _ask(url: str, key: str | None, *paths: str) -> dict[str, Any]:
    """Return the answer of the first of these routes that answers JSON, ``{}`` where none does."""
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
        text = f"its plugin is {plugin}, but this client is {flashmoa.__version__}"
        found.append(note("versions", text, "pip install both from one checkout, and restart it"))
    if info.capabilities == ["render"]:
        text = "the engine keeps no KV, and linking needs it"
        found.append(fix("settings", text, "start it without --flashmoa-kv-cache off"))
    elif missing := sorted(_CAPABILITIES - set(info.capabilities)):
        text = f"its plugin has no {', '.join(missing)}"
        found.append(fix("versions", text, "pip install ./server_patches there, and restart it"))
    return found


def _served(info: EngineInfo, asked: str | None) -> Finding:
    name = info.model.get("name", "?")
    if asked is None or asked == name:
        return ok("model", name)
    text = f"{name} is served; SGLang answers with it although {asked!r} is asked for"
    return note("model", text, f"model={name!r}, or start it with --served-model-name {asked}")


def _room(info: EngineInfo) -> list[Finding]:
    pool = sum(rank.total for rank in info.kv)
    smallest = min((rank.total for rank in info.kv), default=0)
    text = f"{pool:,} tokens of KV, context of {info.context_length:,}"
    found = [ok("room", text)]
    if smallest < info.context_length:
        text += ": prompts longer than the pool are refused"
        found = [note("room", text, "raise --mem-fraction-static or --max-total-tokens")]
    streams = f"{info.prompt_streams} prompt streams open"
    if info.costs is None:
        found.append(
            note("costs", f"{streams}; the engine still measures its forwards, for some seconds")
        )
        return found
    step = f"a decode step takes {1000 * info.costs.decode_step:.1f} ms"
    found.append(ok("costs", f"{streams}; {step}"))
    return found


def _settings(server: dict[str, Any]) -> list[Finding]:
    """Check those arguments of the engine that links depend on."""
    if not server:
        return [note("settings", "the engine does not show its arguments")]
    found: list[Finding] = []
    if server.get("disable_radix_cache"):
        text = "the radix cache is off, and linking keeps its KV there"
        found.append(fix("settings", text, "start it without --disable-radix-cache"))
    if not server.get("enable_cache_report"):
        text = "cached tokens are reported for linked calls only"
        found.append(note("settings", text, "start it with --enable-cache-report"))
    page = server.get("page_size") or 1
    found.append(ok("settings", f"pages of {page} {'token' if page == 1 else 'tokens'}"))
    return found
