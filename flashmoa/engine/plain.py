"""Use a server without the plugin: render and prefill prompts by its ordinary routes.

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

from pydantic import BaseModel

from flashmoa import errors
from flashmoa.engine import wire
from flashmoa.engine.refusals import Answer, make_abort_refusal
from flashmoa.engine.wire import PromptUsage

# The namespace fields that SGLang's /generate accepts. Its OpenAI routes accept all.
_GENERATE_FIELDS = {"extra_key", "lora_path"}
# A GPU computes this number of tokens hardly slower than one, so fewer are not worth a request.
MIN_STEP_TOKENS = 64
# The same for a server that does not report cached tokens, so that costs are unknown.
MIN_UNMEASURED_STEP_TOKENS = 256
# Older measurements say little about a server whose load changes.
_REMEMBERED_SECONDS = 60.0


class PlainServer:
    """Renders and prefills prompts on a server without the plugin.

    The server must convert messages to tokens and back (``/tokenize`` and ``/detokenize`` of SGLang
    and vLLM). Prefilled prompts stay in its prefix cache, like the prompts of all requests.

    Args:
        call: sends a request: ``call(method, path, answer_type, body)``.
        model: the served model's name; by default the first one that the server lists.

    Attributes:
        costs: the costs of prefills on this server.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], model: str | None) -> None:
        self.costs = StepCosts()
        self._call = call
        self._model = model
        # Numbers of prefills that are running, and that have ever begun.
        self._running, self._begun = 0, 0
        self._has_generate = True
        self._reports_cached = False

    async def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
        """Return the prompt of a chat as the server's chat template renders it.

        ``fields`` are the request's other fields that shape the prompt.

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
            text = (await self._ask("/detokenize", wire.RenderedText, body)).text
            # Some servers ignore the messages, and some tokenizers change white space. Then the
            # text has other tokens than the request.
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

        Returns: the server's usage report, with zeros if it reports none; and the seconds that the
            prefill took, ``None`` if other prefills ran meanwhile.

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
        """Return the names of the server's models, each with its context length, if reported.

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
        """Prefill by SGLang's own route: it decodes no token, and always reports cached tokens."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": tokens, "sampling_params": sampling, **namespace}
        meta = (await self._ask("/generate", _Generated, body)).meta_info
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise make_abort_refusal(reason)
        return PromptUsage.model_validate(meta)

    async def _complete(self, tokens: list[int], namespace: Mapping[str, str]) -> PromptUsage:
        # Not 0 tokens: some servers refuse that, and others take it for no limit.
        limits = {"model": await self.model(), "max_tokens": 1, "temperature": 0.0}
        body = {**limits, "prompt": tokens, **namespace}
        answer = await self._ask("/v1/completions", _Completed, body)
        usage = PromptUsage.from_openai(answer.usage or {})
        if usage.cached_tokens is not None:
            self._reports_cached = True
        elif self._reports_cached:  # The server leaves the field out if no token was cached.
            usage = usage.model_copy(update={"cached_tokens": 0})
        return usage

    async def _tokenize_text(self, text: str) -> list[int]:
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: Mapping[str, Any]) -> list[int]:
        return (await self._ask("/tokenize", wire.PromptTokens, body)).tokens

    async def model(self) -> str:
        """Return the given model name, or the server's first one."""
        if self._model is None:
            # A server that is starting lists none yet.
            self._model = next(iter(await self.models()), None)
        return self._model or "default"

    async def _ask(self, path: str, answer: type[Answer], body: Mapping[str, Any]) -> Answer:
        return await self._call("POST", path, answer, body)


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
        """The owners of the models. Inference engines give their own names."""
        return {model.owned_by for model in self.data}

    @property
    def context_lengths(self) -> dict[str, int | None]:
        """The models' context lengths in tokens by name; ``None`` for an unreported length."""
        return {model.id: model.max_model_len for model in self.data}


def _is_text(content: Any) -> bool:
    if not isinstance(content, list):
        return True
    parts = cast("list[object]", content)
    return all(isinstance(part, dict) and ("type", "text") in part.items() for part in parts)


@dataclass(frozen=True, slots=True)
class _Step:
    at: float
    computed: int
    seconds: float
    missing: int


class StepCosts:
    """Measures the costs of prefill steps on one server, and decides whether another step pays.

    A *step* is a request that prefills the certain part of a prompt and generates at most one
    token. It computes the tokens that no earlier step has sent. The prompt's own request then finds
    them in the server's prefix cache. The *overhead* of a step is the time that it takes beside
    these tokens: for the request, and for a forward apart from the decodes of other requests.

    The rule: a step is sent when the number of new tokens is at least

    - ``MIN_STEP_TOKENS``, or ``MIN_UNMEASURED_STEP_TOKENS`` if the server does not report cached
      tokens;
    - the number of tokens that the server computes in the time of a step's overhead. So a step
      saves the prompt's own request at least the time that its overhead costs the server;
    - the most tokens of an earlier step that a step of the last minute did not find in the cache. A
      cache keeps whole blocks, and fewer tokens may fill none;
    - the number of tokens still to come while text is being written (:func:`tokens_to_come`). So
      each step takes at least half of the remaining tokens, and a text of L tokens has at most
      log2(L) steps. The last step leaves no more than about the minimum to the request.

    If a step finds less than half of the previous step's tokens in the cache, the cache does not
    keep prompts (it is off, too small, or another replica's). Then no step pays for a minute.

    The overhead is the median, over the steps of the last minute, of a step's time less its tokens'
    time at the fastest rate of these steps. It is zero after a single step. A step counts only if
    this client had no other step on the server meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = deque[_Step](maxlen=32)
        self._is_reported = True
        self._lost_at = float("-inf")

    def add(self, prompt: int, cached: int | None, seconds: float | None, before: int) -> bool:
        """Note a step. Return whether it found the previous step's tokens in the cache.

        Args:
            prompt: number of tokens of the prompt so far.
            cached: number of cached tokens of the prompt; ``None`` if the server does not tell.
            seconds: the time from the request to its answer; ``None`` if other steps ran meanwhile.
            before: number of tokens of the prompt's previous step; 0 for its first step.
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
        """The least number of new tokens for a step to pay if no tokens are still to come."""
        if not self._is_reported:
            return MIN_UNMEASURED_STEP_TOKENS
        since = self._clock() - _REMEMBERED_SECONDS
        recent = [step for step in self._steps if step.at >= since]
        missing = max((step.missing for step in recent), default=0)
        return max(MIN_STEP_TOKENS, missing, _overhead_tokens(recent))

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
    """Return the number of tokens that the server computes in the time of a step's overhead."""
    fastest = min((step.seconds / step.computed for step in steps), default=0.0)
    if fastest <= 0:
        return 0.0
    return median_high(step.seconds / fastest - step.computed for step in steps)


def tokens_to_come(written: float, expected: float | None) -> float:
    """Return the expected number of tokens still to come of a text that is being written.

    A text of unknown length, or longer than expected, is taken to grow by another third. So steps
    are sent each time it has grown by half. ``expected`` is the expected length in tokens.
    """
    if expected is not None and expected > written:
        return expected - written
    return written / 3
