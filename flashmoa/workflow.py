"""Linking calls without an agent framework: texts that are still being written, in prompts.

Write a text's name where its text will be, ``f"Review this: {draft}"``; the engine that will
read it prefills everything up to there at once, and the rest as it is written.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio

from flashmoa.engine import EngineClient, EngineError, PluginMissing, PromptUsage
from flashmoa.links import FailurePolicy, Link, report_plain_engine
from flashmoa.observe import Listener, contained, ignore
from flashmoa.prompts import Prompt
from flashmoa.stand_ins import StandIns

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class Text:
    """A text that somebody is writing.

    In a string it is its text once it is complete, and a mark before: hand it on as it is, in
    messages given to the same workflow, and do not look into the string.

    Attributes:
        mark: what stands for it meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.mark = f"\u27e6{name}:{secrets.token_hex(8)}\u27e7"
        self._parts: list[str] = []
        self._links: list[Link] = []
        self._done = anyio.Event()
        self._error: BaseException | None = None

    def __str__(self) -> str:
        return "".join(self._parts) if self.is_complete else self.mark

    def __await__(self) -> Generator[Any, Any, str]:
        return self.complete().__await__()

    @property
    def is_complete(self) -> bool:
        return self._done.is_set() and self._error is None

    async def complete(self) -> str:
        """The whole text. Raises: whatever it was failed with."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return "".join(self._parts)

    def write(self, piece: str) -> None:
        """The next piece."""
        self._parts.append(piece)
        for link in self._links:
            link.feed(self.name, piece)

    def close(self) -> None:
        """That was all of it; harmless to repeat."""
        for link in self._links:
            link.close_slot(self.name)
        self._done.set()

    def finish(self, whole: str) -> None:
        """This is all of it: add what has not been written yet, and close it.

        Where it is not what was written so far, links to it end.
        """
        written = "".join(self._parts)
        if whole.startswith(written):
            if whole != written:
                self.write(whole.removeprefix(written))
        else:
            self._parts = [whole]
            for link in self._links:
                link.end("abort")
        self.close()

    def fail(self, error: BaseException) -> None:
        """It will not be completed; links that wait for it act by their policy."""
        self._error = error
        for link in self._links:
            link.fail_slot(self.name)
        self._done.set()

    def follow(self, link: Link) -> None:
        """Have a link told of it, from its beginning."""
        self._links.append(link)
        if self._parts:
            link.feed(self.name, "".join(self._parts))
        if self.is_complete:
            link.close_slot(self.name)
        elif self._done.is_set():
            link.fail_slot(self.name)


class Answer(Text):
    """The answer to a request of :meth:`Workflow.ask`; ``usage`` once it is complete."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.usage: PromptUsage | None = None


class Expected:
    """A request that will be sent, whose prompt is prefilled as its texts are written."""

    def __init__(self, messages: Messages, texts: Sequence[Text], link: Link | None) -> None:
        self._messages = messages
        self._texts = texts
        self._link = link

    async def messages(self) -> list[dict[str, Any]]:
        """What to send, once every text in it is complete. Raises: what a text failed with."""
        found = {text.mark: await text.complete() for text in self._texts}
        return [_replaced(message, found) for message in self._messages]

    def take_over(self) -> dict[str, Any]:
        """What to add to the request's body (``extra_body`` of OpenAI's client), at last: the
        link sends nothing more then."""
        stream = self._link.take_over() if self._link is not None else None
        return {"prompt_stream_id": stream} if stream is not None else {}

    async def give_back(self) -> None:
        """The request failed or will not be sent: its stream is not to wait for it."""
        if self._link is not None:
            self._link.end("abort")
            await self._link.delete_stream()


class Workflow:
    """Calls of one engine, or several, that read what others of them write.

    Args:
        engine: where requests go unless they say otherwise.
        on_failure: what becomes of links whose text fails, see :class:`flashmoa.Link`.
        listener: is told what happens.

    A context manager: leaving it ends its links and waits for its requests, or cancels them
    where it is left by an exception. Its clients stay open.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        on_failure: FailurePolicy = "abort",
        listener: Listener = ignore,
    ) -> None:
        self._engine = engine
        self._on_failure: FailurePolicy = on_failure
        self._listener = contained(listener)
        self._texts: dict[str, Text] = {}
        self._asking = anyio.create_task_group()
        self._linking = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._linking.__aenter__()
        await self._asking.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return await self._asking.__aexit__(kind, error, trace)
        finally:
            self._linking.cancel_scope.cancel()
            await self._linking.__aexit__(None, None, None)

    def text(self, name: str = "text") -> Text:
        """A text that you write, from whatever source."""
        text = Text(self._unused(name))
        self._texts[text.mark] = text
        return text

    def ask(
        self,
        messages: Messages,
        *,
        engine: EngineClient | None = None,
        name: str = "answer",
        **parameters: Any,
    ) -> Answer:
        """Send a chat completion as soon as every text in its messages is complete.

        Args:
            parameters: of OpenAI's chat completions, and SGLang's own.

        What goes wrong is raised where the answer is awaited.
        """
        answer = Answer(self._unused(name))
        self._texts[answer.mark] = answer
        target = engine or self._engine
        self._asking.start_soon(self._answer, answer, messages, target, parameters)
        return answer

    async def expect(
        self,
        messages: Messages,
        *,
        engine: EngineClient | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        name: str = "request",
    ) -> Expected:
        """Say what will be asked, by whatever client, and have its prompt prefilled."""
        target = engine or self._engine
        texts = self._read_by(messages)
        stand_ins = StandIns(text.name for text in texts)
        padded = {text.mark: stand_ins.padded(text.name) for text in texts}
        shown = [_replaced(message, padded) for message in messages]
        try:
            rendered = await target.render(shown, tools=tools, template_args=template_args)
            prompt = Prompt(stand_ins.segments(rendered))
        except PluginMissing as problem:
            report_plain_engine(target.url, problem)
            return Expected(messages, texts, None)
        except (EngineError, ValueError) as error:
            logger.warning("No link to %s this time: %s", name, error)
            return Expected(messages, texts, None)
        link = Link(
            target, prompt, agent=name, on_failure=self._on_failure, listener=self._listener
        )
        for text in texts:
            text.follow(link)
        self._linking.start_soon(link.run)
        return Expected(messages, texts, link)

    async def _answer(
        self, answer: Answer, messages: Messages, engine: EngineClient, parameters: dict[str, Any]
    ) -> None:
        texts = self._read_by(messages)
        expected = Expected(messages, texts, None)
        try:
            if not all(text.is_complete for text in texts):
                expected = await self.expect(
                    messages,
                    engine=engine,
                    tools=parameters.get("tools"),
                    template_args=parameters.get("chat_template_kwargs"),
                    name=answer.name,
                )
            sent = await expected.messages()
            parameters = {**parameters, **expected.take_over()}
            async with engine.chat(sent, **parameters) as deltas:
                async for delta in deltas:
                    answer.usage = delta.usage or answer.usage
                    if delta.text:
                        answer.write(delta.text)
            answer.close()
        except Exception as error:
            answer.fail(error)
            await expected.give_back()
        except BaseException:
            answer.fail(RuntimeError(f"{answer.name} was cancelled"))
            await expected.give_back()
            raise

    def _read_by(self, messages: Messages) -> list[Text]:
        """The texts whose marks are in these messages."""
        return [text for mark, text in self._texts.items() if _mentions(messages, mark)]

    def _unused(self, name: str) -> str:
        """The name, or that with a number, so that every text has its own."""
        taken = {text.name for text in self._texts.values()}
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in taken)


def _mentions(messages: Messages, mark: str) -> bool:
    return any(mark in value for message in messages for value in _strings(message))


def _strings(message: Mapping[str, Any]) -> list[str]:
    return [value for value in message.values() if isinstance(value, str)]


def _replaced(message: Mapping[str, Any], by: Mapping[str, str]) -> dict[str, Any]:
    replaced = dict(message)
    for key, value in message.items():
        for mark, text in by.items() if isinstance(value, str) else ():
            replaced[key] = replaced[key].replace(mark, text)
    return replaced
