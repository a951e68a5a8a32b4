"""Link the calls of any program that uses OpenAI's asynchronous client, or a framework on it.

Needs the extra ``openai``.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import openai

from flashmoa.engine import EngineSettings
from flashmoa.engine.connections import self_hosted_url
from flashmoa.openai._runs import agent, current_finder, run
from flashmoa.openai._sent_requests import linked_clients, settings_by_http
from flashmoa.openai_http import observe_completions, stop_observing

__all__ = ["AsyncOpenAI", "Instrumentation", "agent", "instrument", "run"]

Client = TypeVar("Client")


class AsyncOpenAI(openai.AsyncOpenAI):
    """Replaces ``openai.AsyncOpenAI`` for self-hosted engines.

    By itself it is the stock client, except that it needs no API key and that its default URL is
    ``OPENAI_BASE_URL`` of the environment or else the address on which SGLang listens by default.
    Within :func:`flashmoa.openai.run` its chat completions are linked.

    Args:
        base_url: the engine's URL, with or without ``/v1``.
        api_key: the key that the engine was started with, if any.
        engine_settings: says how links use the engine.
        **kwargs: see the stock client.
    """

    def __init__(
        self,
        *,
        base_url: object = None,
        api_key: str | None = None,
        engine_settings: EngineSettings | None = None,
        **kwargs: Any,
    ) -> None:
        # Copies of a client are given the URL as an object of its HTTP library.
        url = f"{self_hosted_url(str(base_url) if base_url is not None else None)}/v1"
        super().__init__(base_url=url, api_key=api_key or "EMPTY", **kwargs)
        instrument(self, engine_settings)


class Instrumentation(Generic[Client]):
    """Has the chat completions of a client observed until it is closed (:func:`instrument`).

    As a context manager, it gives the client.

    Attributes:
        client: what was instrumented.
    """

    def __init__(self, client: Client, engine_settings: EngineSettings | None) -> None:
        self.client = client
        self._found = found = _find_client(client)
        linked_clients.add(found)
        observe_completions(found._client, current_finder)
        if engine_settings is not None:
            settings_by_http[found._client] = engine_settings

    def __repr__(self) -> str:
        state = "" if self._found in linked_clients else ", closed"
        return f"<Instrumentation of {type(self.client).__name__} at {self._found.base_url}{state}>"

    def __enter__(self) -> Client:
        return self.client

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the client's calls, and those of its copies, be sent as if it had never been there.

        Repeating this is harmless. The client stays open.
        """
        linked_clients.discard(self._found)
        stop_observing(self._found._client, current_finder)


def instrument(
    client: Client, engine_settings: EngineSettings | None = None
) -> Instrumentation[Client]:
    """Have the chat completions of a client linked within :func:`flashmoa.openai.run`.

    By itself it links nothing. Repeating this is harmless. Copies of the client share its
    connections and are instrumented, too. Give it clients of your own servers: one that charges for
    prompts also charges for what links prefill there.

    Args:
        client: an ``openai.AsyncOpenAI``, or an object that has one in its attribute ``client`` or
            ``root_async_client``: LangChain's ``ChatOpenAI``, Pydantic AI's ``OpenAIProvider`` and
            the models made of it, the Agents SDK's ``OpenAIChatCompletionsModel``, CrewAI's
            ``LLM``.
        engine_settings: says how links use its server; by default as before.

    Returns: what undoes it, by ``close()`` or as a context manager. You need not keep it.

    Raises:
        TypeError: if there is no ``openai.AsyncOpenAI`` in it.
    """
    return Instrumentation(client, engine_settings)


def _find_client(holder: object) -> openai.AsyncOpenAI:
    names = ("root_async_client", "client", "_client", "_async_client")
    for candidate in (holder, *(getattr(holder, name, None) for name in names)):
        if isinstance(candidate, openai.AsyncOpenAI):
            return candidate
    raise TypeError(
        f"there is no openai.AsyncOpenAI in {holder!r}; give instrument() the client itself, which "
        "must be asynchronous"
    )
