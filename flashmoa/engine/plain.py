"""Use a server without the plugin: render and prefill prompts by the routes that it has."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from pydantic import AliasChoices, BaseModel, Field

from flashmoa import errors
from flashmoa.engine import wire
from flashmoa.engine.prefill_steps import StepCosts
from flashmoa.engine.refusals import make_abort_refusal
from flashmoa.engine.wire import PromptUsage

WithoutPlugin = Literal["prefill", "off"]

_Answer = TypeVar("_Answer", bound=BaseModel)
# What SGLang's /generate takes of a namespace; its OpenAI routes take all of it.
_GENERATE_FIELDS = {"extra_key", "lora_path"}
# Control characters, which JSON escapes: at the start, before each message, before its content, and
# between the parts of a content that is a list.
_START, _MESSAGE, _CONTENT, _PART = "\x03", "\x00", "\x01", "\x02"


def check_choice(choice: WithoutPlugin) -> WithoutPlugin:
    """Return ``choice``. Raises: ValueError if it is none of the choices."""
    if choice not in ("prefill", "off"):
        raise ValueError(f"without_plugin must be 'prefill' or 'off', not {choice!r}")
    return choice


class PlainServer:
    """Renders and prefills prompts on a server without the plugin.

    A prompt is text if the server can convert messages to tokens and back (``/tokenize`` and
    ``/detokenize`` of SGLang and vLLM), and a transcript (:func:`to_transcript`) if not. What is
    prefilled stays in the server's prefix cache, as the prompt of any request.

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
        """Return the prompt of a chat request: text as its chat template renders it, if possible.

        Args:
            fields: the other fields of the request that its prompt depends on.

        Raises: MalformedRequest if the messages do not consist of text.
        """
        transcript = to_transcript(messages, fields)
        try:
            tokens = await self._tokenize({"messages": list(messages), **fields})
            if not tokens:  # The route is there, but takes something else.
                return transcript
            body = {"tokens": tokens, "skip_special_tokens": False}
            text = (await self._ask("/detokenize", _Detokenized, body)).text
            # Some tokenizers change white space on the way. Such a text would have other tokens
            # than the request.
            return text if await self._tokenize_text(text) == tokens else transcript
        except errors.RequestRefused as error:
            if error.code == "unauthorized":
                raise
            return transcript
        except (errors.PluginMissing, errors.BadAnswer):
            return transcript

    async def prefill(
        self, prompt: str, namespace: Mapping[str, str]
    ) -> tuple[PromptUsage | None, float | None]:
        """Prefill the beginning of a prompt that :meth:`render` has returned.

        Args:
            namespace: the namespace of the KV.

        Returns: what the server says of it, with zeros if it says nothing, and ``None`` if there
            was nothing to send; and how many seconds it took, ``None`` if others ran beside it.

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
        listed = await self._call("GET", "/v1/models", _Models)
        return {model.id: model.max_model_len for model in listed.data}

    async def _prefill(self, prompt: str, namespace: Mapping[str, str]) -> PromptUsage | None:
        if is_transcript(prompt):
            body = from_transcript(prompt)
            if not body["messages"]:
                return None
            return await self._complete("chat/completions", body, namespace)
        tokens = await self._tokenize_text(prompt)
        if self._has_generate and namespace.keys() <= _GENERATE_FIELDS:
            try:
                return await self._generate(tokens, namespace)
            except errors.PluginMissing:
                self._has_generate = False
        return await self._complete("completions", {"prompt": tokens}, namespace)

    async def _generate(self, tokens: list[int], namespace: Mapping[str, str]) -> PromptUsage:
        """Prefill by SGLang's own route: it need not decode, and reports cached tokens always."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": tokens, "sampling_params": sampling, **namespace}
        meta = (await self._ask("/generate", _Generated, body)).meta_info
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise make_abort_refusal(reason)
        return PromptUsage.model_validate(meta)

    async def _complete(
        self, route: str, body: Mapping[str, Any], namespace: Mapping[str, str]
    ) -> PromptUsage:
        # One token is the least that all servers understand: some refuse 0, and others take it for
        # no limit.
        limits = {"model": await self._get_model(), "max_tokens": 1, "temperature": 0.0}
        answer = await self._ask(f"/v1/{route}", _Completed, {**limits, **body, **namespace})
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

    async def _get_model(self) -> str:
        if self._model is None:
            self._model = next(iter(await self.models()), "default")
        return self._model

    async def _ask(self, path: str, answer: type[_Answer], body: Mapping[str, Any]) -> _Answer:
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
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model] = []


def to_transcript(messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
    """Return a chat request as one text that may be cut anywhere, for servers that cannot render.

    Contents are in it as they are, everything else is JSON. Links cut prompts at the texts that are
    still being written; what precedes the cut is again a chat request, whose last message is the
    part of a message that is certain so far.

    Args:
        fields: the request's other fields.

    Raises: MalformedRequest if a message has a content other than text.
    """
    return _START + json.dumps(dict(fields)) + "".join(_write(message) for message in messages)


def is_transcript(text: str) -> bool:
    """Return whether a text is a transcript, or the beginning of one."""
    return text.startswith(_START)


def from_transcript(transcript: str) -> dict[str, Any]:
    """Return the body of the chat request that a transcript's beginning stands for.

    A message that is cut before its content is left out, and so are the last ones without text.

    Raises: ValueError if it is no transcript, or is cut in the fields before its first message.
    """
    head, *rest = transcript.removeprefix(_START).split(_MESSAGE)
    messages = [_read(*one.split(_CONTENT, 1)) for one in rest if _CONTENT in one]
    while messages and not _has_text(messages[-1]["content"]):
        del messages[-1]
    return {**json.loads(head), "messages": messages}


def _write(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    fields = {name: value for name, value in message.items() if name != "content"}
    kind, text = "text", content
    if content is None:
        kind, text = "none", ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        parts = cast("Sequence[Any]", content)
        kind, text = "parts", _PART.join(_text_of(part) for part in parts)
    if not isinstance(text, str) or _MESSAGE in text:
        raise _not_text()
    return f"{_MESSAGE}{json.dumps([kind, fields])}{_CONTENT}{text}"


def _read(head: str, text: str) -> dict[str, Any]:
    kind, fields = json.loads(head)
    content: Any = text
    if kind == "none":
        content = None
    elif kind == "parts":
        content = [{"type": "text", "text": part} for part in text.split(_PART)]
    return {**fields, "content": content}


def _has_text(content: Any) -> bool:
    if isinstance(content, str) or content is None:
        return bool(content)
    return any(part["text"] for part in content)


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, Any]", part)
        if fields.get("type") == "text" and isinstance(fields.get("text"), str):
            return fields["text"]
    raise _not_text()


def _not_text() -> errors.MalformedRequest:
    text = "only text can be prefilled ahead; messages with images are sent as usual"
    return errors.MalformedRequest(text, 400, "malformed")
