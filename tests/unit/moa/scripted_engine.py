"""Serve chat completions whose pieces are given, since no tiny model thinks."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.abc import SocketStream

from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.moa import AggregationPrompt, MixtureOfAgents, Model
from tests.unit.engine.faulty_engine import (
    BROKEN,
    chunk,
    listening,
    receive,
    send,
    send_event,
    start_events,
)

NOWHERE = "http://127.0.0.1:9"
PROMPT = AggregationPrompt("question-first", "Weigh:")
# The answer of a model: pieces of text, ("thought", text) for thought that the engine's parser has
# separated, ("call", name) for a call of a tool in several pieces, and ("end", how) for an odd end:
# "cut", "hang", "abort", or "no usage" after the finish reason. ("wait", seconds) is a pause.
Script = Sequence[str | tuple[str, str]]


class ScriptedEngine:
    """A server without the plugin.

    A piece is a token, with one more for each "+" in it. While the server writes, it tells how many
    it has written if a request asks for that. The model ``strict`` refuses such requests.

    Attributes:
        bodies: the bodies of the requests for answers so far.
    """

    def __init__(self, url: str, scripts: Mapping[str, Script]) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self._scripts = scripts

    async def serve(self, client: SocketStream) -> None:
        """Serve one request."""
        async with client:
            with suppress(*BROKEN):
                request = await receive(client)
                path, body = request.path, request.body
                if path == "/v1/models":
                    await send(client, 200, {"data": [{"id": name} for name in self._scripts]})
                    return
                if path != "/v1/chat/completions":
                    await send(client, 404, {"detail": "Not Found"})
                    return
                self.bodies.append(body)
                if body.get("temperature", 1) < 0:
                    await send(client, 400, {"error": {"message": "too cold", "code": "bad"}})
                elif (
                    body["model"] == "strict" and "continuous_usage_stats" in body["stream_options"]
                ):
                    message = "Unknown parameter: 'stream_options.continuous_usage_stats'."
                    await send(client, 400, {"error": {"message": message, "code": "unknown"}})
                elif body["model"] == "down":
                    await send(client, 503, {"error": {"message": "full", "code": "full"}})
                else:
                    await self._answer(client, self._script(body), body)

    def _script(self, body: dict[str, Any]) -> Script:
        """Return the script of a model; in a form with a name, ``MODEL FORM`` if there is one."""
        form = (body.get("response_format") or {}).get("json_schema", {}).get("name")
        return self._scripts.get(f"{body['model']} {form}") or self._scripts[body["model"]]

    async def _answer(self, client: SocketStream, script: Script, body: dict[str, Any]) -> None:
        await start_events(client)
        limit, written = body.get("max_tokens") or len(script), 0
        prompt = sum(len((message["content"] or "").split()) for message in body["messages"])
        tells = "continuous_usage_stats" in body["stream_options"]
        calls = 0
        for piece in script[:limit]:
            if piece == ("end", "hang"):
                await anyio.sleep_forever()
            if piece == ("end", "cut"):
                return
            if isinstance(piece, tuple) and piece[0] == "wait":
                await anyio.sleep(float(piece[1]))
                continue
            if piece in (("end", "abort"), ("end", "no usage")):
                await send_event(client, chunk({}, "abort" if piece[1] == "abort" else "stop"))
                return
            if isinstance(piece, tuple) and piece[0] == "call":
                for call in call_pieces(piece[1]):
                    indexed = {"index": calls, **call}
                    await send_event(client, chunk({"tool_calls": [indexed]}))
                calls, written = calls + 1, written + 1
                continue
            name = "reasoning_content" if isinstance(piece, tuple) else "content"
            text = piece[1] if isinstance(piece, tuple) else piece
            logprobs = {"content": [{"logprob": -1.0 if name == "content" else -9.0}]}
            event = chunk({name: text})
            event["choices"][0]["logprobs"] = logprobs if body.get("logprobs") else None
            written += 1 + text.count("+")
            usage = {"prompt_tokens": prompt, "completion_tokens": written}
            await send_event(client, {**event, "usage": usage if tells else None})
        ending = "tool_calls" if any(piece[0] == "call" for piece in script) else "stop"
        await send_event(client, chunk({}, ending if limit >= len(script) else "length"))
        usage = {"prompt_tokens": prompt, "completion_tokens": written}
        await send_event(client, {**chunk({}), "choices": [], "usage": usage})
        await send_event(client, "[DONE]")
        await client.send(b"0\r\n\r\n")


def call_pieces(name: str) -> list[dict[str, Any]]:
    """Return the pieces of a call of a tool with one argument."""
    begin = {"id": f"call_{name}", "type": "function"}
    return [
        {**begin, "function": {"name": name, "arguments": ""}},
        {"function": {"arguments": '{"path": '}},
        {"function": {"arguments": '"a.py"}'}},
    ]


@asynccontextmanager
async def scripted_engine(
    scripts: Mapping[str, Script],
) -> AsyncGenerator[tuple[ScriptedEngine, EngineClient]]:
    """Start a server whose models write these scripts, and yield it with a client."""
    async with (
        listening(lambda url: ScriptedEngine(url, scripts)) as engine,
        EngineClient(engine.url, engine_settings=EngineSettings(without_plugin="off")) as client,
    ):
        yield engine, client


def mix(
    client: EngineClient, first: Sequence[str | Model], last: str | Model, **more: Any
) -> MixtureOfAgents:
    """Make a mixture of proposers and an aggregator: models, or names of scripts."""
    models = [one if isinstance(one, Model) else Model(client, one) for one in (*first, last)]
    return MixtureOfAgents([models[:-1], models[-1:]], prompt=PROMPT, **more)
