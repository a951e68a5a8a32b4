"""Check an installation (``check_installation``) or a running engine (``check_engine``).

The checks look up SGLang's internals in its source. Importing SGLang and torch would take half a
minute.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import RootModel

import flashmoa
from flashmoa.engine import EngineClient, EngineInfo, StreamUse
from flashmoa.errors import BadAnswer, EngineError, EngineUnreachable, PluginMissing, RequestRefused
from flashmoa.link.prompt import Placeholders
from flashmoa.observe import Event, LinkClosed
from flashmoa.workflow import Workflow

# "note": it works, but could work better. "fix": it does not work.
Level = Literal["ok", "note", "fix"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        about: the thing that was checked, in a word or two.
        text: the result. "It" in this text is the thing that was checked.
        remedy: the command or argument that fixes the problem; empty if there is none.
    """

    level: Level
    about: str
    text: str
    remedy: str = ""


ok, note, fix = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "fix")


def pip_install(packages: str, folders: str) -> str:
    """Return the command that installs FlashMoA's packages, or their folders in a clone."""
    return f"pip install {folders} in a clone of FlashMoA's repository, else pip install {packages}"


_PLUGIN = "flashmoa"
_INSTALL_PLUGIN = pip_install("flashmoa-sglang", "./server_patches")
_AUTOGEN = ("autogen-core", "autogen-agentchat", "autogen-ext")
_DEVICES = Path("/dev")
# The devices of NVIDIA's driver, of WSL 2 and of ROCm.
_GPUS = ("nvidia[0-9]*", "dxg", "kfd")


def check_installation() -> list[Finding]:
    """Check everything on this machine that a client or an engine needs."""
    findings = [*check_system(), ok("flashmoa", flashmoa.__version__), check_autogen()]
    if not runs_engines():
        return findings
    if installed("sglang") is not None:
        findings += [_check_compiler(), *_check_accelerator()]
    return [*findings, *check_plugin(), *_check_environment()]


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, ``None`` if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_autogen() -> Finding:
    missing = [name for name in (*_AUTOGEN, "openai") if installed(name) is None]
    if not missing:
        return ok("AutoGen", installed(_AUTOGEN[0]) or "")
    text = f"not installed: {', '.join(missing)}; flashmoa.autogen needs that"
    return note("AutoGen", text, "pip install 'flashmoa[autogen]'")


def check_plugin() -> list[Finding]:
    """Check SGLang, the plugin, and whether they fit each other."""
    sglang, plugin = installed("sglang"), installed("flashmoa-sglang")
    if sglang is None and plugin is None:
        text = "neither SGLang nor the plugin is installed: engines have to run elsewhere"
        return [note("SGLang", text, "give --engine URL to check one")]
    if sglang is None:
        remedy = f"make setup (CPU), or {_install_command()} (GPU)"
        return [fix("SGLang", "the plugin is installed, but SGLang is not", remedy)]
    if plugin is None:
        text = "SGLang is installed, but flashmoa-sglang is not: engines started here cannot link"
        return [ok("SGLang", sglang), fix("plugin", text, _INSTALL_PLUGIN)]
    fits = ok("plugin", f"flashmoa-sglang {plugin}")
    if plugin != flashmoa.__version__:
        text = f"flashmoa-sglang is {plugin}, but flashmoa is {flashmoa.__version__}"
        fits = fix(
            "plugin", text, pip_install("--upgrade flashmoa flashmoa-sglang", "./server_patches .")
        )
    return [check_release(sglang), fits, *check_internals()]


def _check_environment() -> Iterator[Finding]:
    """Check SGLang's environment variables that keep the plugin out."""
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if excludes_plugin(allowed):
        text = f"SGLANG_PLUGINS={allowed} keeps the plugin out"
        yield fix("environment", text, "unset SGLANG_PLUGINS, or add flashmoa to it")
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if platform not in ("", "flashmoa_cpu"):
        text = f"SGLANG_PLATFORM={platform} keeps out plugins with other platforms"
        yield fix("environment", text, "unset SGLANG_PLATFORM")


def excludes_plugin(allowed: str) -> bool:
    """Return whether a value of ``SGLANG_PLUGINS``, a list of names, keeps the plugin out."""
    names = {name.strip() for name in allowed.split(",")} - {""}
    return bool(names) and _PLUGIN not in names


def check_release(release: str) -> Finding:
    """Check whether the plugin was tested with this release of SGLang."""
    releases = _plugin("sglang.releases")
    tested, remedy = ", ".join(releases.TESTED), _install_command()
    if release in releases.TESTED:
        return ok("SGLang", f"{release}, a tested release")
    if releases.too_old(release) is not None:
        return fix("SGLang", f"{release} is too old for the plugin; tested: {tested}", remedy)
    return note("SGLang", f"{release} is not among the tested releases {tested}", remedy)


def check_internals() -> list[Finding]:
    """Check whether SGLang has everything that the plugin hooks, calls, reads or writes in it.

    An engine checks the features that it uses when it starts; this checks all features.
    """
    internals = _plugin("sglang.internals")
    source = internals.installed()
    if source is None:
        return [note("internals", "not checked: SGLang is not installed")]
    release, hooked = _plugin("sglang.releases").installed(), _plugin("sglang.hooks").hooked
    # Without a GPU, each engine runs on the CPU platform.
    needed = {internals.EVERYBODY} if accelerators() else {internals.EVERYBODY, internals.CPU}
    problems: list[Finding] = []
    count = 0
    for feature in (internals.EVERYBODY, *internals.FEATURES):
        check = internals.looked_at(release, source, feature, hooked(feature))
        count += len(check.seen)
        if check.problem:
            level = fix if feature in needed else note
            why = "" if feature in needed else f"; {feature} needs that"
            text = f"this SGLang {check.problem}{why}"
            problems.append(level("internals", text, _install_command()))
    return problems or [ok("internals", f"SGLang has all {count} internals that the plugin uses")]


def _install_command() -> str:
    return f"pip install sglang=={_plugin('sglang.releases').TESTED[-1]}"


def _plugin(name: str) -> Any:
    """Import a module of the plugin, which is not a dependency and has no types here."""
    return import_module(f"flashmoa_sglang.{name}")


def runs_engines() -> bool:
    return sys.platform.startswith("linux")


def check_system() -> list[Finding]:
    python = ok("Python", platform.python_version())
    if runs_engines():
        return [python, ok("system", f"{platform.system()} {platform.machine()}")]
    text = f"SGLang runs on Linux only; {platform.system()} can run the client library"
    return [python, note("system", text, "run the engine on a Linux machine, or in WSL or Docker")]


def compiler() -> str | None:
    """Return the path of a C compiler: the one that ``CC`` names, otherwise cc, gcc or clang."""
    names = [os.environ["CC"].split()[0]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def _check_compiler() -> Finding:
    path = compiler()
    if path is not None:
        return ok("C compiler", path)
    text = "there is none, and SGLang compiles kernels when they are first used"
    return fix("C compiler", text, "apt-get install gcc")


def accelerators() -> list[str]:
    """Return the names of the system's GPU devices."""
    return [path.name for name in _GPUS for path in sorted(_DEVICES.glob(name))]


def _check_accelerator() -> list[Finding]:
    release, devices = installed("torch"), accelerators()
    if release is None:
        remedy = "make setup (CPU), or install SGLang, which installs torch (GPU)"
        return [fix("torch", "it is not installed", remedy)]
    if not devices and find_spec("flashmoa_cpu") is None:
        text = "there is none, and no platform for engines on a CPU"
        gpu = note("GPU", text, f"for such engines: {_INSTALL_PLUGIN}")
    elif not devices:
        gpu = note("GPU", "there is none: engines run on the CPU")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        text = "CUDA_VISIBLE_DEVICES is empty: no GPU is used"
        gpu = note("GPU", text, "unset CUDA_VISIBLE_DEVICES")
    elif release.endswith("+cpu"):
        text = f"{', '.join(devices)} found, but this torch is built for CPUs"
        index = "https://download.pytorch.org/whl/cu128"
        # The other devices also exist with GPUs that SGLang does not support.
        level = fix if devices[0].startswith("nvidia") else note
        gpu = level("GPU", text, f"pip install --force-reinstall torch --index-url {index}")
    else:
        gpu = ok("GPU", ", ".join(devices))
    return [ok("torch", release), gpu]


_IN_STEPS = "prefill prompts there in a few steps only, for its own prefix cache"
_ONE_CHECKOUT = "pip install both from one checkout, and restart the engine"
_CAPABILITIES = {"prefill_only", "render", "prompt_streams", "prompt_stream_id"}
# A text with white space that a template may strip.
_TEXT = "  A plan.\n\n1. Walk.\n"


async def check_engine(
    base_url: str, *, api_key: str | None = None, model: str | None = None, calls: bool = True
) -> list[Finding]:
    """Check whether an engine can be reached, its kind and settings, and whether links work.

    Args:
        model: the model name in the client's requests; by default the engine's own.
        calls: whether a link may be checked, which takes two short calls.
    """
    try:
        client = EngineClient(base_url, api_key=api_key, timeout=30.0)
    except ValueError as error:
        return [fix("engine", str(error), "--engine http://HOST:PORT")]
    async with client as engine:
        try:
            info = await engine.info()
        except EngineError as error:
            return [await _explain_failure(error, engine)]
        findings = [
            *_check_versions(info, engine.url),
            _check_model(info, model),
            *_check_capacity(info),
            _check_settings(await _get_object(engine, "/server_info", "/get_server_info")),
            *_check_rides(info),
        ]
        try:
            template = await _check_template(engine)
            findings.append(template)
            # A link needs prompts that can be rendered and predicted.
            if calls and template.level != "fix":
                findings.append(await _check_link(engine, model or info.model["name"]))
        except EngineError as error:
            findings.append(fix("engine", f"it stopped answering: {error}", "see the engine's log"))
    return findings


async def _explain_failure(error: EngineError, engine: EngineClient) -> Finding:
    """Explain why a server does not answer ``/flashmoa/info`` as an engine does."""
    if isinstance(error, EngineUnreachable):
        # The error has the reason: nothing listens there, or the certificate is not trusted.
        port = urlsplit(engine.url).port or 80
        return fix("engine", str(error), f"flashmoa serve --model-path PATH --port {port}")
    if isinstance(error, RequestRefused) and error.status in (401, 403):
        given = "refuses this API key" if engine.authorization else "needs an API key"
        return fix("engine", f"{engine.url} {given}", "--api-key KEY; clients: api_key=KEY")
    if isinstance(error, PluginMissing | BadAnswer):
        return await _identify_server(engine)
    return fix("engine", str(error), "see the engine's log")


async def _identify_server(engine: EngineClient) -> Finding:
    """Find out the kind of a server that is not SGLang with this plugin."""
    url = engine.url
    plugin: Any = (await _get_object(engine, "/flashmoa/info")).get("plugin")
    if isinstance(plugin, dict) and "version" in plugin:
        text = (
            f"{url} has flashmoa-sglang {plugin['version']}, whose answers this client, "
            f"flashmoa {flashmoa.__version__}, cannot read"
        )
        return fix("versions", text, _ONE_CHECKOUT)
    if "model_path" in await _get_object(engine, "/model_info", "/get_model_info"):
        text = f"{url} is SGLang without the plugin: links {_IN_STEPS}"
        remedy = f"where SGLang runs: {_INSTALL_PLUGIN}, unset SGLANG_PLUGINS, restart"
        return note("engine", text, remedy)
    if "data" in await _get_object(engine, "/v1/models"):
        text = f"{url} is an OpenAI server, but not SGLang: links {_IN_STEPS}, if it has one"
        return note("engine", text, "flashmoa serve --model-path PATH")
    text = f"{url} answers, but is not an engine"
    return fix("engine", text, "--engine http://HOST:PORT as flashmoa serve shows it")


async def _get_object(engine: EngineClient, *paths: str) -> dict[str, Any]:
    """Return the answer of the first of these routes that answers an object, otherwise ``{}``."""
    for path in paths:
        with suppress(EngineError):
            return (await engine.ask("GET", path, RootModel[dict[str, Any]])).root
    return {}


def _check_versions(info: EngineInfo, url: str) -> Iterator[Finding]:
    plugin, sglang = info.plugin.get("version"), info.sglang.get("version")
    yield ok("engine", f"{url}: SGLang {sglang}, flashmoa-sglang {plugin}")
    if plugin != flashmoa.__version__:
        client = flashmoa.__version__
        text = f"the engine's plugin has version {plugin}, but this client has {client}"
        yield note("versions", text, _ONE_CHECKOUT)
    if "render" in info.capabilities and "prompt_streams" not in info.capabilities:
        text = "the engine keeps no KV, and linking needs it"
        ways = "--disable-radix-cache, --flashmoa-kv-cache off and, for a PD pair, --pp-size"
        yield fix("settings", text, f"start the engine without {ways}")
    elif missing := sorted(_CAPABILITIES - set(info.capabilities)):
        text = f"the engine's plugin lacks {', '.join(missing)}"
        yield fix("versions", text, f"where the engine runs: {_INSTALL_PLUGIN}, and restart it")


def _check_model(info: EngineInfo, requested: str | None) -> Finding:
    name = info.model.get("name", "?")
    if requested is None or requested == name:
        return ok("model", name)
    text = f"{name} is served; SGLang answers requests for {requested!r} with it, too"
    remedy = f"model={name!r}, or start the engine with --served-model-name {requested}"
    return note("model", text, remedy)


def _check_capacity(info: EngineInfo) -> Iterator[Finding]:
    sizes = [rank.total for rank in info.kv]
    text = f"{sum(sizes):,} tokens of KV, context of {info.context_length:,}"
    if min(sizes, default=0) < info.context_length:
        text += ": prompts longer than the pool are refused"
        yield note("room", text, "raise --mem-fraction-static or --max-total-tokens")
    else:
        yield ok("room", text)
    streams = f"{info.prompt_streams} prompt streams open"
    if info.costs is None:
        busy = "the engine measures what forwards cost when no request runs for some seconds"
        yield note("costs", f"{streams}; {busy}")
    else:
        step = f"a decode step takes {1000 * info.costs.decode_step:.1f} ms"
        yield ok("costs", f"{streams}; {step}")


def _check_rides(info: EngineInfo) -> Iterator[Finding]:
    """Check whether tokens of prompt streams ride along with decode steps."""
    reasons = {rank.no_rides for rank in info.kv if rank.no_rides is not None}
    if reasons == {""}:
        yield ok("rides", "tokens of prompts ride along with decode steps")
    for reason in sorted(reasons - {""}):
        text = f"off, because {reason}; streams have forwards of their own now and then"
        yield note("rides", text, "docs/limits.md lists what does not ride")


def _check_settings(server: dict[str, Any]) -> Finding:
    """Check the engine's arguments that links depend on."""
    if not server:
        return note("settings", "the engine does not show its arguments")
    if server.get("enable_cache_report"):
        return ok("settings", "cached tokens are reported")
    text = "cached tokens are reported for linked calls only"
    return note("settings", text, "start the engine with --enable-cache-report")


def _user_message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def _check_template(engine: EngineClient) -> Finding:
    """Check whether the chat template keeps texts unchanged, so that prompts can be predicted.

    Raises: EngineError if the engine stops answering.
    """
    try:
        problem = await _prediction_problem(engine)
    except RequestRefused as error:
        return fix("chat template", str(error), "start the engine with --chat-template FILE")
    if problem is not None:
        text = f"it {problem}, so that prompts cannot be predicted"
        return fix("chat template", text, "start the engine with --chat-template FILE")
    try:
        await engine.render([_user_message("Plan a trip."), _user_message("A plan.")])
    except RequestRefused:
        text = "it refuses two user messages in a row, which AutoGen's teams send"
        remedy = "FlashMoAChatCompletionClient(merge_user_messages=True)"
        return note("chat template", text, remedy)
    return ok("chat template", "it keeps texts as they are")


async def _prediction_problem(engine: EngineClient) -> str | None:
    """Return why prompts cannot be predicted, as the end of a sentence; ``None`` if they can."""

    def messages(text: str) -> list[dict[str, str]]:
        return [_user_message(f"Shorten this:\n{text}\nBriefly.")]

    placeholders = Placeholders(["writer"])
    prompt = placeholders.build_prompt(await engine.render(messages(placeholders.padded("writer"))))
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
    # Write a longer text if no stream opened while the shorter one was written.
    for max_tokens in (16, 64, 256):
        try:
            use, reason = await _make_linked_calls(engine, model, max_tokens)
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
    engine: EngineClient, model: str, max_tokens: int
) -> tuple[StreamUse | None, str]:
    """Make a call of at most ``max_tokens``, and one that reads its text.

    Returns: how the second call used its stream, ``None`` without one; and why its link ended.

    Raises: EngineError if a call fails.
    """
    events: list[Event] = []
    async with Workflow(engine, listener=events.append) as flow:
        sampling: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}
        plan = flow.ask([_user_message("Plan a trip to Nepal.")], max_tokens=max_tokens, **sampling)
        summary = flow.ask([_user_message(f"Shorten this:\n{plan}")], max_tokens=8, **sampling)
        await summary
    reasons = [event.reason for event in events if isinstance(event, LinkClosed)]
    usage = summary.usage
    return usage.prompt_stream if usage is not None else None, ", ".join(reasons)
