"""All hooks of the plugin into SGLang, and the checks that SGLang has what the plugin uses.

SGLang calls :func:`register` through the entry point ``sglang.srt.plugins`` in the HTTP process and
in each scheduler. SGLang only logs a hook that fails to apply, but half a plugin is worse than
none. So before the hooks are registered the plugin looks for everything that it uses in SGLang
(:func:`verify`), and afterwards it checks that each hook was applied. A failure stops the process
with a message that names the release and the missing name.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing
import pkgutil
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from flashmoa_sglang.http import (
    client_requests,
    guard,
    metrics,
    rendering,
    running_usage,
    sent_answers,
)
from flashmoa_sglang.http.calibration import calibrate, read_costs
from flashmoa_sglang.http.engine import Engine, is_ours
from flashmoa_sglang.http.hearing.calls import HeardCalls, heard_outputs
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.http.tool_gaps import ToolGaps
from flashmoa_sglang.moe import asyncep, kv_free
from flashmoa_sglang.scheduler import admission, apply, logits, results, state, token_states
from flashmoa_sglang.sglang import internals, options
from flashmoa_sglang.sglang.releases import RELEASE, TESTED, installed, too_old

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

logger = logging.getLogger(__name__)

_MANAGERS = "sglang.srt.managers"
_KV_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_SCHEDULE_BATCH = f"{_MANAGERS}.schedule_batch.ScheduleBatch"
_REQUEST_TABLE = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
_POLICY = f"{_MANAGERS}.schedule_policy"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_TOKENIZER_MANAGER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_OPENAI = "sglang.srt.entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_MESSAGES = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_RESPONSES = f"{_OPENAI}.serving_responses.OpenAIServingResponses"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
# SGLang starts without this package, but has no Responses API then.
_HAS_RESPONSES = find_spec("openai_harmony") is not None


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of SGLang, and the plugin's function that runs after it or wraps it (around)."""

    target: str
    kind: Literal["after", "around"]
    function: Callable[..., Any]


def attach_api(_result: None, manager: Any) -> None:
    """Add the routes and wrap the tokenizer; runs after ``init_request_dispatcher``."""
    arguments = RELEASE.resolve_arguments(manager.server_args)
    manager.flashmoa_table = manager.flashmoa_tool_gaps = manager.flashmoa_calls = None
    if state.stands_aside(arguments):
        return
    _refuse_unsupported(arguments)
    metrics.start(arguments)
    # The engine keeps the tokenizer's original ``encode``, so it comes before the wrapper.
    engine = Engine(manager)
    table = StreamTable(engine)
    manager.flashmoa_table = table
    if engine.tokenizer is not None:
        rendering.wrap_encode(manager.tokenizer)
    http_server = sys.modules.get(_HTTP_SERVER)
    if http_server is None:  # This is sglang.Engine.
        return
    # Schedulers load this module, too, and need no FastAPI, so this is not imported above.
    from flashmoa_sglang.http.api import Api, refuse_nesting
    from flashmoa_sglang.http.bodies import PromptReader
    from flashmoa_sglang.http.similarities import SimilarityApi

    http_server.app.add_exception_handler(RecursionError, refuse_nesting)
    renderer = rendering.ChatRenderer(http_server.app.state)
    # An embedding model has no answers to prefill for.
    if not manager.model_config.is_generation:
        reader = PromptReader(engine, renderer, table.limits.characters_per_token)
        SimilarityApi(engine, reader).add_to(http_server.app)
        return
    if ToolGaps.may_hold(engine):
        manager.flashmoa_tool_gaps = ToolGaps(engine, table, renderer)
    if engine.tokenizer is not None:
        decode = manager.tokenizer.decode
        table.calls = HeardCalls(engine, decode, http_server.app.state)
        manager.flashmoa_calls = table.calls
    Api(engine, table, renderer, manager.flashmoa_calls).add_to(http_server.app)
    _run_with(http_server.app, lambda: calibrate(engine))


def _run_with(app: Any, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start ``work`` when the application starts, and cancel it when the application ends."""
    original_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any]:
        async with original_lifespan(app) as state:
            task = asyncio.create_task(work())
            try:
                yield state
            finally:
                task.cancel()
                await asyncio.wait([task])

    app.router.lifespan_context = lifespan


def generate_request(
    original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
) -> Any:
    """Tie requests to their prompt stream; wraps ``TokenizerManager.generate_request``."""
    if (heard := heard_outputs(obj)) is not None:
        return heard
    original = RELEASE.forget_refused(original)
    if manager.flashmoa_table is None or is_ours(obj):
        return original(manager, obj, request)
    outputs = client_requests.generate_request(original, manager, obj, request)
    outputs = running_usage.watch(manager, obj, rendering.served.get(), request, outputs)
    gaps: ToolGaps | None = manager.flashmoa_tool_gaps
    if gaps is not None:
        outputs = gaps.watch(obj, outputs)
    calls: HeardCalls | None = manager.flashmoa_calls
    return outputs if calls is None else calls.watch(obj, request, outputs)


async def handle_chat(
    original: Callable[..., Any], chat: Any, request: Any, raw_request: Any = None
) -> Any:
    """Tie chats to their prompt stream; wraps ``OpenAIServingChat.handle_request`` and
    ``OpenAIServingResponses.create_responses``."""
    table: StreamTable | None = chat.tokenizer_manager.flashmoa_table
    if table is None:
        return await original(chat, request, raw_request)
    try:
        stream_request = client_requests.bind(table, raw_request)
    except ValueError as error:
        return chat.create_error_response(str(error))
    # SGLang may process its messages in a worker thread, whose context variables do not come back.
    rendering.served.set(request)
    gaps: ToolGaps | None = chat.tokenizer_manager.flashmoa_tool_gaps
    serving = original(chat, request, raw_request)
    if gaps is None:
        result = await serving
    else:
        api = sent_answers.Chat if hasattr(request, "messages") else sent_answers.Responses
        result = await gaps.follow(api, serving)
    if stream_request is None:
        return result
    return client_requests.annotate_chat(result, stream_request)


async def handle_messages(
    original: Callable[..., Any], messages: Any, request: Any, raw_request: Any
) -> Any:
    """Follow the answer of Anthropic's API; wraps ``AnthropicServing.handle_messages``."""
    serving = original(messages, request, raw_request)
    gaps: ToolGaps | None = messages.openai_serving_chat.tokenizer_manager.flashmoa_tool_gaps
    return await (serving if gaps is None else gaps.follow(sent_answers.Messages, serving))


async def without_streams(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Close prompt streams before a change; wraps methods of ``TokenizerManager``.

    SGLang changes weights and adapters when no request runs. It does not know of prompt streams,
    because the schedulers make their increments. For an adapter that is unloaded, SGLang waits for
    the adapter's requests only, and only the adapter's streams are closed. Where SGLang has room
    for a few adapters, it also unloads one when a request needs another one.
    """
    if manager.flashmoa_table is None:
        return await original(manager, *args, **kwargs)
    # The first argument is SGLang's request for the change.
    adapter = getattr(args[0], "lora_name", None) if args else None
    async with manager.flashmoa_table.closing(adapter):
        return await original(manager, *args, **kwargs)


async def without_measurement(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let the engine be idle if only its costs are measured; wraps methods of ``TokenizerManager``.

    SGLang cannot do this otherwise, or would hold a measuring request until it goes on.
    """
    if manager.flashmoa_table is None:
        return await original(manager, *args, **kwargs)
    async with manager.flashmoa_table.engine.change():
        return await original(manager, *args, **kwargs)


async def release_memory(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> None:
    """Let nothing run without memory; wraps ``TokenizerManager.release_memory_occupation``."""
    await without_streams(original, manager, obj, *args, **kwargs)
    if manager.flashmoa_table is not None:
        manager.flashmoa_table.engine.lacks.update(_kinds_of_memory(obj))


async def resume_memory(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> None:
    """Note what memory the engine has; wraps ``TokenizerManager.resume_memory_occupation``."""
    await original(manager, obj, *args, **kwargs)
    if manager.flashmoa_table is not None:
        manager.flashmoa_table.engine.lacks.difference_update(_kinds_of_memory(obj))


def _kinds_of_memory(obj: Any) -> list[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return obj.tags or GPU_MEMORY_ALL_TYPES


def update_weights(*result: Any) -> Callable[..., Any]:
    """Make the wrapper of ``TokenizerManager.update_weights_from_...``.

    Args: result: further values that a refused method returns after ``False`` and the message.
    """

    async def update(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        if options.Options.from_environment().asyncep != "off":
            return False, asyncep.WEIGHTS_REFUSED, *result
        return await without_streams(original, manager, *args, **kwargs)

    return update


async def begin_update(original: Callable[..., Any], manager: Any, *args: Any) -> Any:
    """Let nothing run until :func:`end_update`; wraps ``TokenizerManager.begin_weight_update``."""
    begun = await update_weights()(original, manager, *args)
    if begun[0] and manager.flashmoa_table is not None:
        manager.flashmoa_table.engine.lacks.add("update")
    return begun


async def end_update(original: Callable[..., Any], manager: Any, *args: Any) -> Any:
    """Let the engine run again; wraps ``TokenizerManager.end_weight_update``."""
    ended = await update_weights()(original, manager, *args)
    if ended[0] and manager.flashmoa_table is not None:
        manager.flashmoa_table.engine.lacks.discard("update")
    return ended


def _optional(target: str | None, function: Callable[..., Any]) -> list[Hook]:
    """Return a hook around a function that some releases lack."""
    return [] if target is None else [Hook(target, "around", function)]


def _where_attached(target: str, function: Callable[..., Any]) -> Hook:
    """Return a hook around a method, which is left alone where the scheduler has no state.

    The method's object is the scheduler, or has the scheduler's tree. Where the plugin stands
    aside there are no increments, and a mark on a request may be a client's.
    """

    @wraps(function)
    def hook(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(owner.tree_cache, "flashmoa", None) is None:
            return original(owner, *args, **kwargs)
        return function(original, owner, *args, **kwargs)

    return Hook(target, "around", hook)


SCHEDULER_HOOKS = [
    Hook(f"{_SCHEDULER}.init_request_dispatcher", "after", state.attach),
    _where_attached(f"{_SCHEDULER}.handle_generate_request", state.handle_request),
    _where_attached(f"{_SCHEDULER}.get_num_allocatable_reqs", admission.allocatable_requests),
    Hook(f"{_REQUEST_TABLE}.__init__", "around", state.add_rows),
    *_optional(RELEASE.LARGEST_BATCH, state.largest_batch),
    _where_attached(f"{_SCHEDULER}._get_new_batch_prefill_raw", apply.next_prefill_batch),
    _where_attached(f"{_SCHEDULER}._prefetch_kvcache", admission.prefetch),
    _where_attached(f"{_SCHEDULER}.run_batch", results.run_batch),
    _where_attached(f"{_SCHEDULER}.process_batch_result", results.process_result),
    _where_attached(f"{_SCHEDULER}.flush_cache", state.flush_cache),
    _where_attached(f"{_SCHEDULE_BATCH}.check_decode_mem", admission.check_decode_memory),
    Hook(f"{_SCHEDULE_BATCH}.mix_with_running", "around", results.mix),
    _where_attached(f"{_SCHEDULE_BATCH}.filter_batch", results.drop_increments),
    _where_attached(f"{_POLICY}.PrefillAdder.add_one_req", admission.admit),
    Hook(f"{_POLICY}.SchedulePolicy.calc_priority", "after", admission.order_queue),
    _where_attached(RELEASE.STREAM_OUTPUT, results.stream_output),
    Hook("sglang.srt.layers.sampler.Sampler._preprocess_logits", "around", logits.keep_finite),
    Hook("sglang.srt.layers.pooler.Pooler.forward", "after", token_states.pool),
    Hook(RELEASE.CREATE_OFFLOADER, "around", asyncep.create_offloader),
    Hook(f"{_KV_POOL}._create_buffers", "around", kv_free.create_buffers),
    Hook(f"{_KV_POOL}.get_kv_size_bytes", "around", kv_free.get_kv_size_bytes),
    *(Hook(target, "around", function) for target, function in RELEASE.SCHEDULER_FIXES),
]
HTTP_HOOKS = [
    Hook(f"{_SERVER_ARGS}.add_cli_args", "after", options.Options.add_arguments),
    Hook(f"{_SERVER_ARGS}.from_cli_args", "around", asyncep.choose_arguments),
    Hook(f"{_TOKENIZER_MANAGER}.init_request_dispatcher", "after", attach_api),
    Hook(f"{_TOKENIZER_MANAGER}.generate_request", "around", generate_request),
    Hook(f"{_TOKENIZER_MANAGER}._create_tokenized_object", "after", guard.refuse_harmful),
    Hook(f"{_CHAT}.handle_request", "around", handle_chat),
    Hook(f"{_CHAT}._process_messages", "around", rendering.note_served),
    Hook(f"{_MESSAGES}.handle_messages", "around", handle_messages),
    Hook(f"{_CHAT}._convert_to_internal_request", "around", client_requests.convert_chat),
    *_optional(RELEASE.CHAT_ENCODER, rendering.encode_chat),
    *_optional(RELEASE.PARTS_ENCODER, rendering.encode_parts),
    *_optional(f"{_RESPONSES}.create_responses" if _HAS_RESPONSES else None, handle_chat),
    # This method also returns the number of requests that were paused.
    Hook(f"{_TOKENIZER_MANAGER}.update_weights_from_disk", "around", update_weights(0)),
    *(
        Hook(f"{_TOKENIZER_MANAGER}.update_weights_from_{way}", "around", update_weights())
        for way in ("distributed", "tensor", "ipc")
    ),
    *_optional(RELEASE.BEGIN_UPDATE, begin_update),
    *_optional(RELEASE.END_UPDATE, end_update),
    Hook(f"{_TOKENIZER_MANAGER}._unload_lora_adapter_locked", "around", without_streams),
    Hook(f"{_TOKENIZER_MANAGER}.release_memory_occupation", "around", release_memory),
    Hook(f"{_TOKENIZER_MANAGER}.resume_memory_occupation", "around", resume_memory),
    Hook(f"{_TOKENIZER_MANAGER}.flush_cache", "around", without_measurement),
    Hook(f"{_TOKENIZER_MANAGER}.pause_generation", "around", without_measurement),
    *(Hook(target, "around", function) for target, function in RELEASE.HTTP_FIXES),
]


def register() -> None:
    """Register this process's hooks with SGLang, or end the process.

    Raises:
        SystemExit: if SGLang lacks something that the plugin uses; later, if SGLang has not applied
            a hook.
    """
    if problem := too_old(installed()):
        raise SystemExit(f"flashmoa-sglang cannot run: {problem}")
    verify()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if installed() not in TESTED:
        logger.warning(
            "flashmoa-sglang was tested with SGLang %s; this is %s",
            ", ".join(TESTED),
            installed(),
        )
    hooks = _hooks_of_this_process()
    originals = {hook.target: _resolve(hook.target) for hook in hooks}
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    _verify_application(HookRegistry, originals)


def verify(arguments: Any = None) -> None:
    """Verify that SGLang has every name that this engine uses, once for a process and its forks.

    Args: arguments: SGLang's; ``None`` before they are read, when only some features are known.

    Raises: SystemExit if a name is missing.
    """
    own = options.Options.from_environment()
    is_pair = arguments is not None and arguments.disaggregation_mode not in (None, "null")
    uses = {
        internals.EVERYBODY: True,
        internals.CPU: options.lacks_accelerator(),
        internals.ASYNCEP: own.asyncep != "off",
        internals.KV_OFF: own.kv_cache == "off",
        internals.PD: is_pair,
    }
    for feature, is_used in uses.items():
        if is_used and (problem := _problem(feature)):
            needs = "" if feature == internals.EVERYBODY else f", which {feature} needs"
            _stop(problem + needs)


@cache
def _problem(feature: str) -> str:
    source = internals.installed()
    if source is None:
        return ""
    return internals.looked_at(installed(), source, feature, hooked(feature)).problem


def hooked(feature: str) -> dict[str, Callable[..., Any]]:
    hooks = [*HTTP_HOOKS, *SCHEDULER_HOOKS] if feature == internals.EVERYBODY else []
    return {hook.target: hook.function for hook in hooks}


def _hooks_of_this_process() -> list[Hook]:
    # Schedulers are child processes. A main process may fork them, and they inherit its hooks.
    if multiprocessing.parent_process() is not None:
        return SCHEDULER_HOOKS
    return HTTP_HOOKS + SCHEDULER_HOOKS


def _resolve(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    try:
        return inspect.getattr_static(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError) as error:
        _stop(f"has no {target} ({error})")


def _verify_application(registry: Any, originals: dict[str, Any]) -> None:
    """Check each hook after SGLang has applied them, when all plugins have registered theirs."""
    apply_hooks = registry.apply_hooks

    def apply_and_verify() -> None:
        apply_hooks()
        for target, original in originals.items():
            if _resolve(target) is original:
                _stop(f"did not take the hook on {target}")

    registry.apply_hooks = apply_and_verify


def _stop(problem: str) -> NoReturn:
    raise SystemExit(
        f"flashmoa-sglang cannot run: SGLang {installed()} {problem}. "
        f"Tested releases: {', '.join(TESTED)}. Install one of them, or start "
        "without the plugin (SGLANG_PLUGINS=none)."
    )


def _refuse_unsupported(arguments: Any) -> None:
    own = options.Options.from_environment()
    if problem := asyncep.problem(arguments, own):
        raise SystemExit(problem)
    if own.costs:
        try:
            read_costs(own.costs)
        except ValueError as error:
            raise SystemExit(str(error)) from error
    if kv_free.is_on():
        kv_free.refuse_unsupported(arguments)
    verify(arguments)
