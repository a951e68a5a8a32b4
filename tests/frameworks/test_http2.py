"""Test calls over HTTP/2, with the packages for it that LiteLLM needs."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import h2.config
import h2.connection
import h2.events
import openai
import pytest

from flashmoa.openai import instrument, run
from tests.unit.openai.fake_server import TEXT, chunks, whole

# Between the chunks of an answer, in seconds.
PAUSE = 0.3


def serve(connection: socket.socket) -> None:
    """Answer the requests of a connection one by one, each after the same time in all."""
    state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    state.initiate_connection()
    bodies: dict[int, bytes] = {}
    # Its client may leave it at any moment.
    with connection, suppress(OSError):
        connection.sendall(state.data_to_send())
        while data := connection.recv(65536):
            for event in state.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
                elif isinstance(event, h2.events.StreamEnded):
                    answer(state, connection, event.stream_id, bodies.pop(event.stream_id))
            connection.sendall(state.data_to_send())


def answer(
    state: h2.connection.H2Connection, connection: socket.socket, stream_id: int, body: bytes
) -> None:
    is_stream = bool(json.loads(body).get("stream"))
    kind = "text/event-stream" if is_stream else "application/json"
    head = [(":status", "200"), ("content-type", kind)]
    if is_stream:
        state.send_headers(stream_id, head)
    for event in chunks():
        if is_stream:
            state.send_data(stream_id, f"data: {json.dumps(event)}\n\n".encode())
        connection.sendall(state.data_to_send())
        time.sleep(PAUSE)
    if not is_stream:
        state.send_headers(stream_id, head)
    state.send_data(stream_id, b"data: [DONE]\n\n" if is_stream else whole().content, True)
    connection.sendall(state.data_to_send())


@contextmanager
def server() -> Iterator[str]:
    """Serve one connection, and give the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: serve(listener.accept()[0]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def ask(url: str, timeout: float, *, is_linked: bool) -> str:
    """Return the answer, or the name of the error."""
    http = openai.DefaultHttpxClient(http1=False, http2=True)
    options: Any = {"http_client": http, "timeout": timeout, "max_retries": 0}
    with openai.OpenAI(base_url=url, api_key="-", **options) as client, run("http2"):
        if is_linked:
            instrument(client)
        messages: Any = [{"role": "user", "content": "Go."}]
        try:
            answer = client.chat.completions.create(model="m", messages=messages)
        except openai.APITimeoutError as error:
            return type(error.__cause__).__name__
        return answer.choices[0].message.content or ""


@pytest.mark.parametrize(("seconds", "outcome"), [(PAUSE * 2, "ReadTimeout"), (60.0, TEXT)])
async def test_a_read_timeout_over_http2_limits_the_whole_answer(
    seconds: float, outcome: str
) -> None:
    for is_linked in (False, True):
        with server() as url:
            ended = await asyncio.to_thread(ask, url, seconds, is_linked=is_linked)
            assert ended == outcome, is_linked
