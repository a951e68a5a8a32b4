"""Ask the engines of a file for what its models will need (``check_models``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashmoa import EngineClient, FlashMoAError
from flashmoa.doctor.findings import Finding, fix, note, ok
from flashmoa.doctor.linking import check_templates
from flashmoa.engine import EngineError, PluginMissing
from flashmoa.moa.config import ConfigError, EarlyExitConfig, MixtureConfig, ModelConfig
from flashmoa.moa.embedding import EngineEmbedder, LocalEmbedder
from flashmoa.moa.estimate import agents_by_layer, estimate
from flashmoa.moa.topology import Topology

_TIMEOUT_SECONDS = 60.0
# What is assumed of an answer without max_tokens, and of a question with its instruction.
_ANSWER_TOKENS = 1024
_QUESTION_TOKENS = 512
_QUESTION = [
    {"role": "system", "content": "Answer with one word."},
    {"role": "user", "content": "Which day comes after Monday?"},
]


@dataclass(frozen=True, slots=True)
class _Need:
    """What a file needs of a model on an engine; ``context`` in tokens."""

    url: str
    api_key: str | None
    model: str
    logprobs: bool = False
    continues: bool = False
    context: int = 0

    @property
    def key(self) -> tuple[str, str | None, str]:
        return self.url, self.api_key, self.model

    def merge(self, other: _Need) -> _Need:
        """Return what both need of the same model."""
        return _Need(
            *self.key,
            logprobs=self.logprobs or other.logprobs,
            continues=self.continues or other.continues,
            context=max(self.context, other.context),
        )


async def check_models(configs: Sequence[MixtureConfig]) -> list[Finding]:
    """Check the engines and embedders that models of a file need.

    Each model of each engine is asked for one token, in the form in which agents will ask it.

    Raises: ConfigError if the layers of a model do not match its topology.
    """
    needs: dict[tuple[str, str | None, str], _Need] = {}
    for config in configs:
        for need in _list_needs(config):
            needs[need.key] = needs[need.key].merge(need) if need.key in needs else need
    findings = [ok("file", f"models {', '.join(config.name for config in configs)}")]
    for need in needs.values():
        key = need.api_key
        async with EngineClient(need.url, api_key=key, timeout=_TIMEOUT_SECONDS) as engine:
            findings += await _check_model(engine, need)
    for config in configs:
        if config.early_exit is not None:
            findings.append(await _check_embedder(config.early_exit))
    return findings


def _models(config: MixtureConfig) -> list[ModelConfig]:
    return [model for layer in config.layers for model in layer.models]


def _list_needs(config: MixtureConfig) -> list[_Need]:
    """Return what each agent of a mixture, staircase or debate needs of its engines.

    Raises: ConfigError if the layers do not match the topology.
    """
    limits = [model.sampling.get("max_tokens", 0) for model in _models(config)]
    try:
        agents = estimate(config, _QUESTION_TOKENS, max(_ANSWER_TOKENS, *limits)).agents
    except ValueError as error:
        raise ConfigError(f"{config.name}: {error}") from error
    tokens = {agent.name: agent.prompt_tokens + agent.completion_tokens for agent in agents}
    layers = agents_by_layer(config)
    needs: list[_Need] = []
    for layer, models in enumerate(layers, 1):
        for place, model in enumerate(models, 1):
            need = partial(
                _Need,
                api_key=model.api_key,
                model=model.model,
                logprobs=_is_scored(config, layer - 1, place - 1),
                continues=layer > 1 and config.overlaps,
                context=tokens[f"{layer}.{place}"],
            )
            needs += [need(url) for url in model.urls]
    return needs + [
        _Need(url, model.api_key, model.model)
        for model in config.fallback.models
        for url in model.urls
    ]


def _is_scored(config: MixtureConfig, layer: int, place: int) -> bool:
    """Return whether early exit scores an agent's answers, by its layer and place from 0."""
    if config.early_exit is None:
        return False
    widths = [len(models) for models in agents_by_layer(config)]
    together = Topology.of(widths, config.topology).largest_cluster(layer, place)
    return together > config.early_exit.least_answers


async def _check_model(engine: EngineClient, need: _Need) -> list[Finding]:
    """Check a model of an engine; ``about`` in the findings is the model's name."""
    where = f"{engine.url}: "
    try:
        served = await engine.plain.models()
        finding = _check_name(served, need, where)
    except EngineError as error:
        remedy = "start the engine, or correct engine and api_key in the file"
        return [fix(need.model, f"{where}{error}", remedy)]
    findings = [finding]
    if finding.level == "fix":
        return findings
    findings += await _check_call(engine, need, where)
    context = served.get(need.model) or next(iter(served.values()), None)
    if context is not None and context < need.context:
        text = f"{where}its context of {context:,} is shorter than the {need.context:,} tokens "
        text += "that a prompt and its answer may have: the longest answers in it will be cut"
        findings.append(note(need.model, text, "lower max_tokens of the agents that it reads"))
    return findings + await _check_plugin(engine, need, where)


def _check_name(served: dict[str, int | None], need: _Need, where: str) -> Finding:
    if need.model in served:
        return ok(need.model, f"{where}served")
    names = ", ".join(served) or "nothing"
    text = f"{where}it serves {names}, and not {need.model!r}"
    if need.model == "default" and len(served) == 1:
        # SGLang answers requests for any name with its one model.
        return ok(need.model, f"{where}{names}")
    return fix(need.model, text, f"model = {next(iter(served), 'NAME')!r}")


async def _check_call(engine: EngineClient, need: _Need, where: str) -> list[Finding]:
    """Ask for a token as an agent does."""
    messages, parameters = list(_QUESTION), dict[str, Any](model=need.model, max_tokens=1)
    if need.logprobs:
        parameters["logprobs"] = True
    if need.continues:
        messages.append({"role": "assistant", "content": "The day after Monday is"})
        parameters |= {"continue_final_message": True, "add_generation_prompt": False}
    logprobs: list[float] = []
    try:
        async with engine.chat(messages, **parameters) as deltas:
            async for delta in deltas:
                logprobs += delta.logprobs
    except EngineError as error:
        remedy = "see the engine's log; its chat template must take a system message"
        return [fix(need.model, f"{where}it refuses an agent's request: {error}", remedy)]
    if need.logprobs and not logprobs:
        text = f"{where}it gives no log-probabilities, by which early exit judges answers"
        return [fix(need.model, text, "use SGLang or vLLM, or remove [early_exit]")]
    asked = " with log-probabilities" if need.logprobs else ""
    return [ok(need.model, f"{where}answers agents' requests{asked}")]


async def _check_plugin(engine: EngineClient, need: _Need, where: str) -> list[Finding]:
    """Check what makes prompts cheap; answers do not depend on it."""
    try:
        await engine.info()
    except PluginMissing:
        text = f"{where}no plugin: prompts are prefilled in a few steps while answers are written"
        return [note(need.model, text, "pip install flashmoa-sglang where the engine runs")]
    except EngineError as error:
        return [note(need.model, f"{where}{error}", "see the engine's log")]
    with suppress(EngineError):
        templates = await check_templates(engine)
        problems = [finding for finding in templates if finding.level != "ok"]
        return [note(need.model, f"{where}chat template: {p.text}", p.remedy) for p in problems]
    return []


async def _check_embedder(table: EarlyExitConfig) -> Finding:
    """Embed a text as early exit does."""
    name = table.embedder
    try:
        if name == "local":
            await LocalEmbedder().embed("Tuesday.")
            return ok("embedder", "all-MiniLM-L6-v2 in this process")
        async with EngineClient(name, api_key=table.api_key, timeout=_TIMEOUT_SECONDS) as engine:
            await EngineEmbedder(engine, table.model).embed("Tuesday.")
    except FlashMoAError as error:
        return fix("embedder", f"{name}: {error}", "correct [early_exit], or remove it")
    return ok("embedder", f"{name} embeds texts")
