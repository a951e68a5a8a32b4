"""Use a server without the plugin: render and prefill prompts by the routes that it has.

:class:`StepCosts` decides when a prefill of a growing prompt pays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_high
from typing import Any, cast

from pydantic import AliasChoices, BaseModel, Field

from flashmoa import errors
from flashmoa.engine import wire
from flashmoa.engine.refusals import Answer, make_abort_refusal
from flashmoa.engine.wire import PromptUsage

# What SGLang's /generate takes of a namespace; its OpenAI routes take all of it.
_GENERATE_FIELDS = {"extra_key", "lora_path"}
# A GPU computes that many tokens hardly slower than one: fewer are not worth a request.
LEAST_TOKENS = 64
# The least if the server does not say what it found in its cache, so that costs are unknown.
LEAST_UNMEASURED_TOKENS = 256
# Older measurements say little about a server whose load changes.
_REMEMBERED_SECONDS = 60.0
_REMEMBERED_STEPS = 32
# Of a text that goes on for longer than expected, or whose length is unknown, this part of what has
# been written is expected to come.
_PART_TO_COME = 1 / 3


class PlainServer:
    """Renders and prefills prompts on a server without the plugin.

    The server must convert messages to tokens and back (``/tokenize`` and ``/detokenize`` of SGLang
    and vLLM). What is prefilled stays in its prefix cache, as the prompt of any request.

    Args:
        call: sends a request: ``call(method, path, answer_type, body)``.
        model: the served model's name; by default the first one that the server lists.

    Attributes:
        costs: what prefills have cost on this server.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], model: str | None) -> None:
        self.costs = StepCosts()
        self._call = call
        self._model = model
        # How many prefills are running, and how many have ever begun.
        self._running, self._begun = 0, 0
        self._has_generate = True
        self._reports_cached = False

    async def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
        """Return the prompt of a chat request as the server's chat template renders it.

        Args:
            fields: the other fields of the request that its prompt depends on.

        Raises:
            MalformedRequest: if the messages do not consist of text.
            EngineError: if the server cannot convert messages to tokens and back, unchanged.
        """
        if not all(_is_text(message.get("content")) for message in messages):
            text = "only text can be prefilled ahead; messages with images are sent as usual"
            raise errors.MalformedRequest(text, 400, "malformed")
        with suppress(errors.PluginMissing, errors.BadAnswer):
            tokens = await self._tokenize({"messages": list(messages), **fields})
            body = {"tokens": tokens, "skip_special_tokens": False}
            text = (await self._ask("/detokenize", _Detokenized, body)).text
            # Some servers take something else, and some tokenizers change white space on the way.
            # Such a text would have other tokens than the request.
            if tokens and await self._tokenize_text(text) == tokens:
                return text
        raise errors.EngineError(
            "the server cannot convert messages to tokens and back (/tokenize, /detokenize), so "
            "nothing is prefilled ahead there"
        )

    async def prefill(
        self, prompt: str, namespace: Mapping[str, str]
    ) -> tuple[PromptUsage, float | None]:
        """Prefill the beginning of a prompt that :meth:`render` has returned.

        Args:
            namespace: the namespace of the KV.

        Returns: what the server says of it, with zeros if it says nothing; and how many seconds it
            took, ``None`` if others ran beside it.

        Raises: PluginMissing if the server has no route for it, and other EngineErrors.
        """
        was_alone = not self._running
        self._begun += 1
        self._running += 1
        begun, start = self._begun, time.monotonic()
        try:
            usage = await self._prefill(prompt, namespace)
        finally:
            self._running -= 1
        is_alone = was_alone and begun == self._begun
        return usage, time.monotonic() - start if is_alone else None

    async def models(self) -> dict[str, int | None]:
        """Return its models' names, each with the context length in tokens if it says that.

        Raises: EngineError if it does not answer.
        """
        return (await self._call("GET", "/v1/models", Models)).context_lengths

    async def _prefill(self, prompt: str, namespace: Mapping[str, str]) -> PromptUsage:
        tokens = await self._tokenize_text(prompt)
        if self._has_generate and namespace.keys() <= _GENERATE_FIELDS:
            try:
                return await self._generate(tokens, namespace)
            except errors.PluginMissing:
                self._has_generate = False
        return await self._complete(tokens, namespace)

    async def _generate(self, tokens: list[int], namespace: Mapping[str, str]) -> PromptUsage:
        """Prefill by SGLang's own route: it need not decode, and reports cached tokens always."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": tokens, "sampling_params": sampling, **namespace}
        meta = (await self._ask("/generate", _Generated, body)).meta_info
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise make_abort_refusal(reason)
        return PromptUsage.model_validate(meta)

    async def _complete(self, tokens: list[int], namespace: Mapping[str, str]) -> PromptUsage:
        # One token is the least that all servers understand: some refuse 0, and others take it for
        # no limit.
        limits = {"model": await self.model(), "max_tokens": 1, "temperature": 0.0}
        body = {**limits, "prompt": tokens, **namespace}
        answer = await self._ask("/v1/completions", _Completed, body)
        usage = PromptUsage.from_openai(answer.usage or {})
        if usage.cached_tokens is not None:
            self._reports_cached = True
        elif self._reports_cached:  # Such servers leave the field out if there are none.
            usage = usage.model_copy(update={"cached_tokens": 0})
        return usage

    async def _tokenize_text(self, text: str) -> list[int]:
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: Mapping[str, Any]) -> list[int]:
        return (await self._ask("/tokenize", wire.PromptTokens, body)).tokens

    async def model(self) -> str:
        """Return the served model's name; that of the first one unless another was given."""
        if self._model is None:
            # A server that is starting lists none yet.
            self._model = next(iter(await self.models()), None)
        return self._model or "default"

    async def _ask(self, path: str, answer: type[Answer], body: Mapping[str, Any]) -> Answer:
        return await self._call("POST", path, answer, body)


class _Detokenized(BaseModel):
    # SGLang's name, and vLLM's.
    text: str = Field(validation_alias=AliasChoices("text", "prompt"))


class _Generated(BaseModel):
    meta_info: dict[str, Any]


class _Completed(BaseModel):
    usage: dict[str, Any] | None = None


class _Model(BaseModel):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class Models(BaseModel):
    """The answer of ``GET /v1/models``."""

    data: list[_Model] = []

    @property
    def owners(self) -> set[str]:
        """Who the models' owners are, which engines give as their own names."""
        return {model.owned_by for model in self.data}

    @property
    def context_lengths(self) -> dict[str, int | None]:
        """The context length in tokens of each model, by its name; ``None`` if it is not said."""
        return {model.id: model.max_model_len for model in self.data}


def _is_text(content: Any) -> bool:
    if not isinstance(content, list):
        return True
    parts = cast("list[dict[str, Any]]", content)
    return all(part.get("type") == "text" for part in parts)


@dataclass(frozen=True, slots=True)
class _Step:
    at: float
    computed: int
    seconds: float
    missing: int


class StepCosts:
    """Measures what prefill steps cost on one server, and decides whether another one pays.

    A *step* is a request that prefills a prompt as far as it is certain, and generates one token or
    none. It computes the tokens that no earlier step has sent, which the prompt's own request then
    finds in the server's prefix cache. What it costs beside these tokens is its overhead: the
    request, and a forward apart from the decodes of other requests.

    The rule: a step is sent when the number of new tokens is at least

    - ``LEAST_TOKENS``, or ``LEAST_UNMEASURED_TOKENS`` if the server does not report cached tokens;
    - the number of tokens that the server computes in the time of a step's overhead. So a step
      takes at least as much time off the prompt's own request as its overhead takes of the server;
    - the number of tokens that a step of the last minute missed of what the step before it left in
      the cache: a cache keeps whole blocks, and fewer tokens may fill none;
    - the number of tokens still to come, as far as text is being written (:func:`tokens_to_come`).
      So each step takes at least half of what is left, and a text of L tokens has at most log2(L)
      steps, of which the last leaves no more than about the minimum to the request.

    If a step finds less than half of what the step before it left in the cache, the cache does not
    keep prompts (it is off, too small, or that of another replica); no step pays for a minute.

    The overhead is the median, over the steps of the last minute, of a step's time less its tokens'
    time at the fastest rate of all these steps. It is zero after a single step. Only steps that ran
    while this client had no other step on the server count.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = deque[_Step](maxlen=_REMEMBERED_STEPS)
        self._is_reported = True
        self._lost_at = float("-inf")

    def add(self, prompt: int, cached: int | None, seconds: float | None, before: int) -> bool:
        """Note a step. Return whether it found what the step before it left in the cache.

        Args:
            prompt: number of tokens of the prompt so far.
            cached: number of these that were cached; ``None`` if the server does not say.
            seconds: the time from sending the request to its answer; ``None`` if steps of other
                prompts took part of it.
            before: number of tokens of the step before it; 0 if it is the first one of a prompt.
        """
        self._is_reported = cached is not None
        if cached is None:
            return True
        is_found = cached >= before / 2
        if not is_found:
            self._lost_at = self._clock()
        elif prompt > cached and seconds is not None:
            missing = max(0, before - cached)
            self._steps.append(_Step(self._clock(), prompt - cached, seconds, missing))
        return is_found

    @property
    def least_tokens(self) -> float:
        """The number of new tokens from which on a step pays if none are still to come."""
        if not self._is_reported:
            return LEAST_UNMEASURED_TOKENS
        since = self._clock() - _REMEMBERED_SECONDS
        recent = [step for step in self._steps if step.at >= since]
        missing = max((step.missing for step in recent), default=0)
        return max(LEAST_TOKENS, missing, _overhead_tokens(recent))

    def pays(self, new: float, to_come: float) -> bool:
        """Return whether a step pays now.

        Args:
            new: number of tokens that no step has sent.
            to_come: number of tokens expected still to come before the prompt is complete.
        """
        if self._clock() - self._lost_at < _REMEMBERED_SECONDS:
            return False
        return new >= max(self.least_tokens, to_come)


def _overhead_tokens(steps: Sequence[_Step]) -> float:
    """Return how many tokens the server computes in the time of a step's overhead."""
    fastest = min((step.seconds / step.computed for step in steps), default=0.0)
    if fastest <= 0:
        return 0.0
    return median_high(step.seconds / fastest - step.computed for step in steps)


def tokens_to_come(written: float, expected: float | None) -> float:
    """Return how many tokens of a text that is being written are still to come.

    A text whose length is unknown, or that is longer than expected, is taken to go on for a third
    of its length so far: then steps are sent each time it has grown by half.

    Args:
        written: number of its tokens so far.
        expected: its expected length in tokens, if that is known.
    """
    if expected is not None and expected > written:
        return expected - written
    return written * _PART_TO_COME
