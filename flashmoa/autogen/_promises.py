"""Promised answers: marks that stand for text while it is being written.

For agents written by hand on autogen-core, whose next prompt nobody can tell: what they hand
on is a mark, which travels through messages and f-strings as the text would; the client that
is asked to answer messages with marks in them links its prompt to the texts, and sends it
when they are complete.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from autogen_core.models import CreateResult, LLMMessage, RequestUsage

from flashmoa.autogen._tasks import TaskHost
from flashmoa.engine import EngineClient, EngineError, PluginMissing, PromptUsage
from flashmoa.links import Link, report_plain_engine
from flashmoa.prompts import Prompt
from flashmoa.stand_ins import StandIns
from flashmoa.workflow import Text

logger = logging.getLogger(__name__)

# Texts are kept for whoever may still read them; the oldest go first.
_KEPT = 4096
# Marks of all clients of this process: one model's answer may be another one's prompt.
_texts: OrderedDict[str, Text] = OrderedDict()

# Renders messages as the engine will, for a call with these tools.
Render = Callable[[Sequence[LLMMessage]], Awaitable[str]]


class PromisedCall:
    """A call for or from a promise (a ``CallObserver``)."""

    def __init__(self, promises: Promises, link: Link | None, text: Text | None = None) -> None:
        self.prompt_stream_id = link.take_over() if link is not None else None
        self._promises = promises
        self._link = link
        self._text = text

    def on_text(self, text: str) -> None:
        if self._text is not None:
            self._text.write(text)

    def on_finish(self, result: CreateResult, usage: PromptUsage | None, raw: bool) -> None:
        """Whoever promised it has the result as well."""

    def on_failure(self, error: BaseException) -> None:
        """The request may not have reached the engine, which then still keeps its stream."""
        if self._link is not None:
            self._promises.give_back(self._link)


class Promises:
    """The promises of one client, and the links to prompts that wait for any.

    Args:
        engine: where the client's requests go.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._host = TaskHost()
        self._made = 0

    def make(self, name: str, write: Callable[[Text], Awaitable[CreateResult]]) -> CreateResult:
        """An answer that ``write`` is about to write: its content is a mark."""
        self._made += 1
        text = Text(f"{name}-{self._made}")
        _texts[f"{text}"] = text
        while len(_texts) > _KEPT:
            _texts.popitem(last=False)

        async def run() -> None:
            try:
                result = await write(text)
                if not isinstance(result.content, str):
                    raise TypeError("a promised answer became a tool call; ask for it with create")
                text.finish(result.content)
            except Exception as error:
                text.fail(error)
            except BaseException:
                text.fail(RuntimeError(f"{text.name} was cancelled"))
                raise

        self._host.start(run)
        usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
        return CreateResult(finish_reason="stop", content=f"{text}", usage=usage, cached=False)

    async def resolve(
        self, messages: Sequence[LLMMessage], render: Render | None
    ) -> tuple[Sequence[LLMMessage], Link | None]:
        """Messages with texts for marks, once these are complete, and the link that was fed
        with them meanwhile, to be taken over by the call. Raises: what a text failed with."""
        found = [
            text for mark, text in _texts.items() if any(mark in c for c in _contents(messages))
        ]
        if not found:
            return messages, None
        waiting = [text for text in found if not text.is_complete]
        link = await self._link(messages, waiting, found, render) if waiting and render else None
        try:
            texts = {text.mark: await text.complete() for text in found}
        except BaseException:
            if link is not None:
                link.end("abort")
            raise
        return _replaced(messages, texts), link

    def give_back(self, link: Link) -> None:
        """A request that had taken a link over has failed."""
        self._host.start(link.delete_stream)

    async def close(self) -> None:
        """End what is being written and linked."""
        await self._host.close()

    async def _link(
        self,
        messages: Sequence[LLMMessage],
        waiting: Sequence[Text],
        found: Sequence[Text],
        render: Render,
    ) -> Link | None:
        stand_ins = StandIns(text.name for text in waiting)
        shown = {text.mark: stand_ins.padded(text.name) for text in waiting}
        shown |= {text.mark: f"{text}" for text in found if text.mark not in shown}
        try:
            prompt = Prompt(stand_ins.segments(await render(_replaced(messages, shown))))
        except PluginMissing as problem:
            report_plain_engine(self._engine.url, problem)
            return None
        except (EngineError, ValueError) as error:
            logger.warning("No link to a promised prompt this time: %s", error)
            return None
        link = Link(self._engine, prompt, agent="promise")
        for text in waiting:
            text.follow(link)
        self._host.start(link.run)
        return link


def _contents(messages: Sequence[LLMMessage]) -> list[str]:
    return [message.content for message in messages if isinstance(message.content, str)]


def _replaced(messages: Sequence[LLMMessage], by: dict[str, str]) -> list[LLMMessage]:
    replaced: list[LLMMessage] = []
    for message in messages:
        content: Any = message.content
        for mark, text in by.items() if isinstance(content, str) else ():
            content = content.replace(mark, text)
        replaced.append(message.model_copy(update={"content": content}))
    return replaced
