"""Check a running engine through its API, and a link on it (``check_engine``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

import flashmoa
from flashmoa.doctor.findings import Finding, fix, note, ok
from flashmoa.engine import (
    BadAnswer,
    EngineClient,
    EngineError,
    EngineInfo,
    EngineTimeout,
    EngineUnreachable,
    PluginMissing,
    RequestRefused,
    StreamUse,
    engine_url,
)
from flashmoa.linking.placeholders import NotForecastable, Placeholders
from flashmoa.observe import Event, LinkClosed
from flashmoa.workflow import Workflow

# Of an unfinished text, engines know more of the tokens than this in every script; fewer tokens say
# little.
_SHARE_KNOWN, _TELLING = 0.9, 1000
_TIMEOUT_SECONDS = 30.0
_IN_STEPS = "prefill prompts there in a few steps only, for its own prefix cache"
_ONE_CHECKOUT = "pip install both from one checkout, and restart the engine"
_CAPABILITIES = {"prefill_only", "render", "prompt_streams", "prompt_stream_id"}
# A text with white space that a template may strip.
_TEXT = "  A plan.\n\n1. Walk.\n"
_TOKENS_OF_READER = 8
# Lengths of the text that is read. The next one is tried if no stream opened while it was written.
_TOKENS_OF_WRITER = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class EngineToCheck:
    """Names an engine to check, and how a client uses it.

    Attributes:
        model: the model name in the client's requests; ``None``: the engine's own.
        calls: whether a link may be checked, which takes two short calls.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    calls: bool = True


async def check_engine(target: EngineToCheck) -> list[Finding]:
    """Check whether an engine can be reached, what it is, and whether links work on it."""
    try:
        url = engine_url(target.url)
    except ValueError as error:
        return [fix("engine", str(error), "--engine http://HOST:PORT")]
    key = target.api_key
    async with EngineClient(url, api_key=key, timeout=_TIMEOUT_SECONDS) as engine:
        try:
            info = await engine.info()
        except EngineError as error:
            return [await _explain_failure(error, url, key)]
        findings = [
            *_check_versions(info, url),
            _check_model(info, target.model),
            *_check_capacity(info),
            *_check_settings(await _get_json(url, key, "/server_info", "/get_server_info")),
            *_check_rides(info),
            *_check_streams(info),
        ]
        try:
            templates = await _check_templates(engine)
            findings += templates
            # A link needs prompts that can be rendered and predicted.
            if target.calls and not any(finding.level == "fix" for finding in templates):
                findings.append(await _check_link(engine, target.model or info.model["name"]))
        except EngineError as error:
            findings.append(fix("engine", f"it stopped answering: {error}", "see the engine's log"))
    return findings


async def _explain_failure(error: EngineError, url: str, key: str | None) -> Finding:
    """Explain why the server at ``url`` does not answer ``/flashmoa/info`` as an engine does."""
    if isinstance(error, EngineUnreachable):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            text = f"the certificate of {url} is not trusted ({error.__cause__})"
            remedy = "SSL_CERT_FILE=FILE for clients, with the certificate of its authority"
            return fix("engine", text, remedy)
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
        return await _identify_server(url, key)
    return fix("engine", str(error), "see the engine's log")


async def _identify_server(url: str, key: str | None) -> Finding:
    """Find out what kind of server answers at ``url``, if it is not SGLang with this plugin."""
    plugin: Any = (await _get_json(url, key, "/flashmoa/info")).get("plugin")
    if isinstance(plugin, dict) and "version" in plugin:
        text = (
            f"{url} has flashmoa-sglang {plugin['version']}, whose answers this client, "
            f"flashmoa {flashmoa.__version__}, cannot read"
        )
        return fix("versions", text, _ONE_CHECKOUT)
    if "model_path" in await _get_json(url, key, "/model_info", "/get_model_info"):
        text = f"{url} is SGLang without the plugin: links {_IN_STEPS}"
        remedy = "where SGLang runs: pip install ./server_patches, unset SGLANG_PLUGINS, restart"
        return note("engine", text, remedy)
    if "data" in await _get_json(url, key, "/v1/models"):
        text = f"{url} is an OpenAI server, but not SGLang: links {_IN_STEPS}, if it has one"
        return note("engine", text, "flashmoa serve --model-path PATH")
    text = f"{url} answers, but is not an engine"
    return fix("engine", text, "--engine http://HOST:PORT as flashmoa serve shows it")


async def _get_json(url: str, key: str | None, *paths: str) -> dict[str, Any]:
    """Return the object that the first of these routes answers, ``{}`` if none answers one."""
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


def _check_versions(info: EngineInfo, url: str) -> list[Finding]:
    plugin, sglang = info.plugin.get("version"), info.sglang.get("version")
    findings = [ok("engine", f"{url}: SGLang {sglang}, flashmoa-sglang {plugin}")]
    if plugin != flashmoa.__version__:
        client = flashmoa.__version__
        text = f"the engine's plugin has version {plugin}, but this client has {client}"
        findings.append(note("versions", text, _ONE_CHECKOUT))
    if "render" in info.capabilities and "prompt_streams" not in info.capabilities:
        text = "the engine keeps no KV, and linking needs it"
        findings.append(fix("settings", text, "start the engine without --flashmoa-kv-cache off"))
    elif missing := sorted(_CAPABILITIES - set(info.capabilities)):
        text = f"the engine's plugin lacks {', '.join(missing)}"
        remedy = "pip install ./server_patches there, and restart the engine"
        findings.append(fix("versions", text, remedy))
    return findings


def _check_model(info: EngineInfo, requested: str | None) -> Finding:
    name = info.model.get("name", "?")
    if requested is None or requested == name:
        return ok("model", name)
    text = f"{name} is served; SGLang answers requests for {requested!r} with it, too"
    remedy = f"model={name!r}, or start the engine with --served-model-name {requested}"
    return note("model", text, remedy)


def _check_capacity(info: EngineInfo) -> list[Finding]:
    pool = sum(rank.total for rank in info.kv)
    smallest = min((rank.total for rank in info.kv), default=0)
    text = f"{pool:,} tokens of KV, context of {info.context_length:,}"
    room = ok("room", text)
    if smallest < info.context_length:
        text += ": prompts longer than the pool are refused"
        room = note("room", text, "raise --mem-fraction-static or --max-total-tokens")
    streams = f"{info.prompt_streams} prompt streams open"
    if info.costs is None:
        busy = "the engine is still measuring its forwards, which takes some seconds"
        text = f"{streams}; {busy}"
        return [room, note("costs", text)]
    step = f"a decode step takes {1000 * info.costs.decode_step:.1f} ms"
    return [room, ok("costs", f"{streams}; {step}")]


def _check_rides(info: EngineInfo) -> list[Finding]:
    """Check whether tokens of prompt streams ride along with decode steps."""
    reasons = {rank.no_rides for rank in info.kv if rank.no_rides is not None}
    if reasons == {""}:
        return [ok("rides", "tokens of prompts ride along with decode steps")]
    return [
        note(
            "rides",
            f"off, because {reason}; prompts are prefilled when no request decodes",
            "docs/limits.md lists what does not ride",
        )
        for reason in sorted(reasons - {""})
    ]


def _check_streams(info: EngineInfo) -> list[Finding]:
    """Check how much of the streamed text could be prefilled while it was written."""
    if info.streamed_tokens is None or not info.streamed_tokens.total:
        return []
    share = info.streamed_tokens.ahead / info.streamed_tokens.total
    text = f"{share:.0%} of the tokens of streamed prompts were known before their text ended"
    if share >= _SHARE_KNOWN or info.streamed_tokens.total < _TELLING:
        return [ok("tokens", text)]
    return [note("tokens", text, "serve the model with its fast (Rust) tokenizer, if it has one")]


def _check_settings(server: dict[str, Any]) -> list[Finding]:
    """Check the engine's arguments that links depend on."""
    if not server:
        return [note("settings", "the engine does not show its arguments")]
    findings: list[Finding] = []
    if server.get("disable_radix_cache"):
        text = "the radix cache is off, and linking keeps its KV there"
        findings.append(fix("settings", text, "start the engine without --disable-radix-cache"))
    if not server.get("enable_cache_report"):
        text = "cached tokens are reported for linked calls only"
        findings.append(note("settings", text, "start the engine with --enable-cache-report"))
    page = server.get("page_size") or 1
    findings.append(ok("settings", f"pages of {page} {'token' if page == 1 else 'tokens'}"))
    return findings


def _user_message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def _check_templates(engine: EngineClient) -> list[Finding]:
    """Check whether the chat template keeps texts unchanged, so that prompts can be predicted.

    Raises: EngineError if the engine stops answering.
    """
    try:
        problem = await _prediction_problem(engine)
    except RequestRefused as error:
        return [fix("chat template", str(error), "start the engine with --chat-template FILE")]
    if problem is not None:
        text = f"it {problem}, so that prompts cannot be predicted"
        return [fix("chat template", text, "start the engine with --chat-template FILE")]
    try:
        await engine.render([_user_message("Plan a trip."), _user_message("A plan.")])
    except RequestRefused:
        text = "it refuses two user messages in a row, which AutoGen's teams send"
        remedy = "FlashMoAChatCompletionClient(merge_user_messages=True)"
        return [note("chat template", text, remedy)]
    return [ok("chat template", "it keeps texts as they are")]


async def _prediction_problem(engine: EngineClient) -> str | None:
    """Return why prompts cannot be predicted, as the end of a sentence; ``None`` if they can."""

    def messages(text: str) -> list[dict[str, str]]:
        return [_user_message(f"Shorten this:\n{text}\nBriefly.")]

    placeholders = Placeholders(["writer"])
    try:
        rendered = await engine.render(messages(placeholders.padded("writer")))
        prompt = placeholders.build_prompt(rendered)
    except NotForecastable as error:
        return str(error).removeprefix("the chat template ")
    if not prompt.slots:
        return "leaves texts out"
    for slot in prompt.slots:
        slot.append(_TEXT)
        slot.close()
    same = prompt.stable() == await engine.render(messages(_TEXT))
    return None if same else "changes texts, or what is around them"


async def _check_link(engine: EngineClient, model: str) -> Finding:
    """Check whether a call's prompt is prefilled while the text that it reads is written."""
    use: StreamUse | None = None
    reason = ""
    for tokens in _TOKENS_OF_WRITER:
        try:
            use, reason = await _make_linked_calls(engine, model, tokens)
        except EngineError as error:
            return fix("link", f"a call failed: {error}", "see the engine's log")
        if use is not None:
            break
    if use is None:
        return fix("link", f"no link was made: {reason}", "see docs/troubleshooting.md")
    if use.status != "hit":
        return fix("link", f"a linked call ended as {use.status!r}", "see docs/troubleshooting.md")
    return ok("link", "hit: a call's prompt was prefilled before the call came")


async def _make_linked_calls(
    engine: EngineClient, model: str, tokens: int
) -> tuple[StreamUse | None, str]:
    """Make two calls, of which the second reads the first one's text.

    Returns: how the second call used its stream, ``None`` without one; and why its link ended.

    Raises: EngineError if a call fails.
    """
    events: list[Event] = []
    async with Workflow(engine, listener=events.append) as flow:
        sampling: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}
        plan = flow.ask([_user_message("Plan a trip to Nepal.")], max_tokens=tokens, **sampling)
        question = [_user_message(f"Shorten this:\n{plan}")]
        summary = flow.ask(question, max_tokens=_TOKENS_OF_READER, **sampling)
        await summary
    reasons = [event.reason for event in events if isinstance(event, LinkClosed)]
    usage = summary.usage
    return usage.prompt_stream if usage is not None else None, ", ".join(reasons)
