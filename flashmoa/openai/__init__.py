"""Link the calls of any program that uses OpenAI's client, or a framework on it.

Needs the extra ``openai``.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from flashmoa._extras import from_extra

with from_extra("openai", __name__, "OpenAI's client"):
    import openai

from flashmoa.engine import EngineSettings
from flashmoa.engine.connections import self_hosted_key, self_hosted_url
from flashmoa.openai.http import observe_completions, stop_observing
from flashmoa.openai.runs import agent, current_finder, run
from flashmoa.openai.sent_requests import linked_clients, settings_by_http

__all__ = [
    "AsyncOpenAI",
    "Instrumentation",
    "OpenAI",
    "agent",
    "instrument",
    "observe_completions",
    "run",
]

Client = TypeVar("Client")


class _SelfHosted:
    """Adds defaults for self-hosted engines to a client of OpenAI."""

    def __init__(
        self,
        *,
        base_url: object = None,
        api_key: str | None = None,
        engine_settings: EngineSettings | None = None,
        **kwargs: Any,
    ) -> None:
        # A copy of a client gets the URL as an object of the HTTP library.
        url = f"{self_hosted_url(str(base_url) if base_url is not None else None)}/v1"
        stock: Any = super()  # OpenAI's class of the same name.
        stock.__init__(
            base_url=url, api_key=self_hosted_key(api_key, base_url) or "EMPTY", **kwargs
        )
        instrument(self, engine_settings)


class AsyncOpenAI(_SelfHosted, openai.AsyncOpenAI):
    """Replaces ``openai.AsyncOpenAI`` for self-hosted engines.

    By itself it is the stock client, but needs no API key, and its default URL is the environment's
    ``OPENAI_BASE_URL`` or else SGLang's default address. Within :func:`flashmoa.openai.run` its
    requests are linked.

    Args:
        base_url: the engine's URL, with or without ``/v1``.
        api_key: the key that the engine was started with, if any; by default ``OPENAI_API_KEY`` of
            the environment, if the URL is the environment's, too.
        engine_settings: how links use the engine.
        **kwargs: see the stock client.
    """


class OpenAI(_SelfHosted, openai.OpenAI):
    """Replaces ``openai.OpenAI`` as :class:`AsyncOpenAI` replaces ``openai.AsyncOpenAI``."""


class Instrumentation(Generic[Client]):
    """Observes the requests of a client until it is closed (:func:`instrument`).

    As a context manager, it gives the client.

    Attributes:
        client: the object that was given to :func:`instrument`.
    """

    def __init__(self, client: Client, engine_settings: EngineSettings | None) -> None:
        self.client = client
        self._found = _find_clients(client)
        # The HTTP clients that no earlier instrumentation observes.
        self._own: set[object] = set()
        # The earlier settings of HTTP clients that get others.
        self._earlier: dict[Any, EngineSettings | None] = {}
        for found in self._found:
            http = found._client
            linked_clients[found] = None
            if observe_completions(http, current_finder):
                self._own.add(http)
            if engine_settings is not None:
                self._earlier.setdefault(http, settings_by_http.get(http))
                settings_by_http[http] = engine_settings

    def __repr__(self) -> str:
        first = self._found[0]
        state = "" if first in linked_clients else ", closed"
        return f"<Instrumentation of {type(self.client).__name__} at {first.base_url}{state}>"

    def __enter__(self) -> Client:
        return self.client

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop observing the client and its copies, unless they were instrumented before.

        The client stays open. Repeating this is harmless.
        """
        for found in self._found:
            if found._client in self._own:
                linked_clients.pop(found, None)
                stop_observing(found._client, current_finder)
        for http, earlier in self._earlier.items():
            if earlier is None:
                settings_by_http.pop(http, None)
            else:
                settings_by_http[http] = earlier
        self._earlier.clear()


def instrument(
    client: Client, engine_settings: EngineSettings | None = None
) -> Instrumentation[Client]:
    """Link the requests of a client within :func:`flashmoa.openai.run`.

    Outside of runs this changes nothing. Repeating it is harmless. Copies of the client share its
    connections and are instrumented, too. Only instrument clients of your own servers: a server
    that charges for prompts also charges for prefills by links.

    Args:
        client: an ``openai.OpenAI`` or ``openai.AsyncOpenAI``, or an object with such a client in
            an attribute: LangChain's ``ChatOpenAI``, Pydantic AI's ``OpenAIProvider`` and models
            with this provider, the Agents SDK's ``OpenAIChatCompletionsModel``, smolagents'
            ``OpenAIModel`` and CrewAI's ``LLM``.
        engine_settings: how links use the client's server; by default unchanged.

    Returns: an object whose ``close()`` undoes this, also a context manager. You need not keep it.

    Raises:
        TypeError: if the object has no client of OpenAI.
    """
    return Instrumentation(client, engine_settings)


def _find_clients(holder: object) -> list[openai.OpenAI | openai.AsyncOpenAI]:
    names = ("root_client", "root_async_client", "client", "_client", "_async_client")
    candidates = (holder, *(getattr(holder, name, None) for name in names))
    found = [each for each in candidates if isinstance(each, openai.OpenAI | openai.AsyncOpenAI)]
    if not found:
        raise TypeError(
            f"there is no client of OpenAI in {holder!r}; give instrument() the client itself, an "
            "openai.OpenAI or openai.AsyncOpenAI"
        )
    return found
