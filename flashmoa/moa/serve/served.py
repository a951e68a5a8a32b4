"""Hold a mixture, staircase or debate that is served as a model (``ServedSystem``)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from flashmoa.engine.connections import engine_url
from flashmoa.moa.config import MixtureConfig
from flashmoa.moa.run import Run, System
from flashmoa.moa.serve.chat_requests import ChatQuestion


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """A model of the server.

    Attributes:
        name: what clients ask for.
        engines: what clients read in place of each engine's URL: ``engine 1``, ``engine 2``, in
            the order of the file.
    """

    name: str
    system: System
    engines: Mapping[str, str]

    @classmethod
    async def build(cls, config: MixtureConfig, stack: AsyncExitStack) -> ServedSystem:
        """Build what a file describes; ``stack`` closes the clients of its engines.

        Raises: ConfigError, FlashMoAError as :meth:`MixtureConfig.build`.
        """
        # This comes first, since it names the system where a URL is wrong.
        system = await config.build(stack)
        engines = {url: f"engine {number}" for number, url in enumerate(_list_urls(config), 1)}
        return cls(config.name, system, engines)

    def answering(self, chat: ChatQuestion) -> AbstractAsyncContextManager[Run]:
        """Answer a question, as the system's own method."""
        return self.system.answering(chat.messages, chat.parameters)


def _list_urls(config: MixtureConfig) -> list[str]:
    """Return the URLs of the engines, each once, as messages of errors have them."""
    models = [model for layer in config.layers for model in layer.models]
    urls = [url for model in (*models, *config.fallback.models) for url in model.urls]
    if config.early_exit is not None:
        urls.append(config.early_exit.embedder)
    return list(dict.fromkeys(map(engine_url, urls)))
