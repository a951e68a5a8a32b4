"""Random requests in random order: no 500, the engine keeps running, and no stream is left."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    rule,
    run_state_machine_as_test,
)

from flashmoa.engine.local import LocalEngine
from tests.integration.baseline import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5000)
    | st.sampled_from([2**31, 2**63, -(2**64), 1.5, -0.0, 1e308, "", "x", "\ud800", "\x00"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "stranger"])},
    optional={"content": st.text(max_size=20) | junk, "name": junk, "tool_calls": junk},
)
messages = st.lists(message, max_size=3)
item = message | st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"])},
    optional=dict.fromkeys(("role", "content", "summary", "arguments", "output", "id"), junk),
)
tool = st.fixed_dictionaries({"type": st.just("function") | junk}, optional={"function": junk})


def body(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for objects with valid and invalid fields, and for other values."""
    odd = {name: value | junk for name, value in optional.items() if name not in required}
    shaped = st.fixed_dictionaries(required, optional={**odd, "surprise": junk})
    return shaped | st.fixed_dictionaries({}, optional={**odd, **required}) | junk


text = st.text(max_size=60)
ids = st.lists(st.integers(0, 4095), max_size=20)
prompt: dict[str, Any] = {
    "text": text, "input_ids": ids, "messages": messages, "tools": st.lists(tool, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=8), junk, max_size=2),
    "add_special_tokens": st.booleans(), "cache_salt": text, "priority": st.integers(),
    "continue_final_message": st.booleans(), "reasoning_effort": st.sampled_from(["low", "high"]),
}  # fmt: skip
few = st.integers(0, 3)
hints: dict[str, Any] = {
    "prompt_stream_id": st.sampled_from(["OPEN", "nonsense"]),
    "expected_output_tokens": st.integers(-1, 10**6),
}
custom = st.dictionaries(st.sampled_from(["flashmoa", "mine"]), junk, max_size=2)
sampling = st.fixed_dictionaries({"max_new_tokens": few}, optional={"custom_params": custom | junk})
ROUTES: dict[str, st.SearchStrategy[Any]] = {
    "/prefill_only": body({}, **prompt),
    "/render": body({"messages": messages}, **prompt),
    "/render_response": body(
        {"input": text | st.lists(item, max_size=3), "model": st.just("m")},
        instructions=text,
        tools=st.lists(junk, max_size=1),
        previous_response_id=text,
        reasoning=junk,
        chat_template_kwargs=junk,
        text=junk,
        tool_choice=junk,
    ),
    "/prompt_streams": body({"text": text}, **prompt, ttl_seconds=st.floats(0.01, 100)),
    "/prompt_streams/OPEN/append": body({"seq": few}, text=text, input_ids=ids, end=st.booleans()),
    # The fields that SGLang reads itself are always valid, because SGLang is not tested here.
    "/generate": st.fixed_dictionaries(
        {"text": st.text(min_size=1, max_size=60), "sampling_params": sampling},
        optional={name: value | junk for name, value in hints.items()},
    ),
    "/v1/chat/completions": st.fixed_dictionaries(
        {"model": st.just("m"), "messages": messages, "max_tokens": st.integers(1, 3)},
        optional={name: value | junk for name, value in hints.items()} | {"custom_params": custom},
    ),
}
EXAMPLES = 150
# Bodies that are drawn seldom or never, and bodies that are not JSON.
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
ODD: list[Any] = [
    {"messages": [{"role": "user", "content": [PICTURE]}]}, {"input_ids": [4096]},
    {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}},
    {"messages": [{"role": "user", "content": "\ud800"}]}, {"seq": 0, "text": "\ud800"},
    b"", b"{", b"\xff\xfe", b'{"text": NaN}', b"[" * 100_000, b'{"input_ids": [1e999]}',
]  # fmt: skip
COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class StreamRecorder:
    """Records the ids of prompt streams that an httpx client opens; engines do not list them."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def record(self, response: httpx.Response) -> None:
        request = response.request
        opens = request.method == "POST" and request.url.path == "/prompt_streams"
        if opens and response.is_success:
            response.read()
            self.ids.append(response.json()["id"])


@pytest.fixture
async def opened(engine: LocalEngine, base: Baseline) -> AsyncGenerator[StreamRecorder]:
    """The streams of a test. At its end each is deleted, and the engine is as it was before."""
    streams = StreamRecorder()
    yield streams
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        for stream_id in streams.ids:
            await client.delete(f"/prompt_streams/{stream_id}")
    await base.wait_until_restored()


def connect(engine: LocalEngine, opened: StreamRecorder) -> httpx.Client:
    hooks = {"response": [opened.record]}
    return httpx.Client(base_url=engine.url, timeout=30, headers=JSON, event_hooks=hooks)


def encode(fields: Any) -> bytes:
    """Encode JSON as Python does, with surrogates and numbers that other parsers refuse."""
    if isinstance(fields, bytes):
        return fields
    return json.dumps(fields).encode(errors="surrogatepass")


JSON = {"Content-Type": "application/json"}


def send(http: httpx.Client, route: str, fields: Any) -> httpx.Response:
    """Send a body to a route; ``OPEN`` in either is replaced by the id of an open stream."""
    if "OPEN" in route or (isinstance(fields, dict) and fields.get("prompt_stream_id") == "OPEN"):
        body = {"text": "a b", "ttl_seconds": 5}
        stream_id = http.post("/prompt_streams", json=body).json()["id"]
        route = route.replace("OPEN", stream_id)
        if isinstance(fields, dict) and "prompt_stream_id" in fields:
            fields = {**fields, "prompt_stream_id": stream_id}
    return http.post(route, content=encode(fields))


@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_no_body_breaks_a_route(
    engine: LocalEngine, opened: StreamRecorder, route: str
) -> None:
    """Each is accepted, or refused with a 4xx, a code and a sentence; none gets a 500."""
    is_own = route.startswith(("/prefill_only", "/render", "/prompt_streams"))

    def check_answer(fields: Any) -> None:
        answer = send(client, route, fields)
        assert answer.status_code < 500, (fields, answer.text)
        if answer.status_code >= 400:
            refusal = answer.json()
            error = refusal.get("error")
            # SGLang's own error is a string in some releases, and an object in others.
            message = error if isinstance(error, str) else (error or refusal)["message"]
            assert len(message) > 10
            assert not is_own or error["code"]

    def check_all() -> None:
        settings(COMMON, max_examples=EXAMPLES)(given(fields=ROUTES[route])(check_answer))()
        for fields in ODD if is_own else ():
            check_answer(fields)

    with connect(engine, opened) as client:
        # Hypothesis calls its tests synchronously, so this runs in a thread.
        await anyio.to_thread.run_sync(check_all)


@dataclass
class Stream:
    """A stream's expected state."""

    id: str
    text: str
    next_seq: int = 0
    ended: bool = False
    gone: str | None = None
    last_append: tuple[str, bool] | None = None


class Sequences(RuleBasedStateMachine):
    """Opens, appends to, uses and deletes streams in any order, and checks the answers."""

    http: httpx.Client
    opened: StreamRecorder
    streams = Bundle("streams")

    @initialize()
    def delete_all(self) -> None:
        while self.opened.ids:
            self.http.delete(f"/prompt_streams/{self.opened.ids.pop()}")

    @rule(target=streams, text=text)
    def open(self, text: str) -> Stream:
        answer = self.http.post("/prompt_streams", content=encode({"text": text}))
        assert answer.status_code == 200, answer.text
        return Stream(answer.json()["id"], text)

    @rule(stream=streams, skew=st.integers(-2, 2), text=text, end=st.booleans())
    def append(self, stream: Stream, skew: int, text: str, end: bool) -> None:
        seq = max(0, stream.next_seq + skew)
        path = f"/prompt_streams/{stream.id}/append"
        answer = self.http.post(path, content=encode({"seq": seq, "text": text, "end": end}))
        if stream.gone:
            assert (answer.status_code, answer.json()["error"]["reason"]) == (410, stream.gone)
        elif seq == stream.next_seq - 1 and (text, end) != stream.last_append:
            assert answer.json()["error"]["code"] == "out_of_order"
        elif seq < stream.next_seq:
            assert answer.json()["next_seq"] == stream.next_seq
        elif stream.ended or seq > stream.next_seq:
            assert answer.json()["error"]["code"] == "out_of_order"
        else:
            assert answer.status_code == 200, answer.text
            stream.text += text
            stream.next_seq += 1
            stream.ended = end
            stream.last_append = text, end
            assert answer.json()["next_seq"] == stream.next_seq

    @rule(stream=streams)
    def look(self, stream: Stream) -> None:
        answer = self.http.get(f"/prompt_streams/{stream.id}").json()
        if stream.gone:
            assert answer["error"]["reason"] == stream.gone
        else:
            assert (answer["next_seq"], answer["ended"]) == (stream.next_seq, stream.ended)
            assert answer["prefilled_tokens"] <= answer["received_tokens"]

    @rule(stream=streams, more=text, predicted=st.booleans())
    def use(self, stream: Stream, more: str, predicted: bool) -> None:
        prompt = stream.text + more if predicted else "Otherwise: " + more
        fields = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        plain = self.http.post("/generate", content=encode(fields), headers=JSON)
        fields["prompt_stream_id"] = stream.id
        linked = self.http.post("/generate", content=encode(fields), headers=JSON)
        assert plain.status_code == linked.status_code
        if linked.status_code != 200:  # The prompt is empty.
            assert linked.status_code == 400
            return
        answer = linked.json()
        assert answer["output_ids"] == plain.json()["output_ids"]
        status = answer["meta_info"]["prompt_stream"]["status"]
        if stream.gone:
            assert status == stream.gone
        else:
            is_hit = prompt.startswith(stream.text)
            assert status == ("hit" if is_hit else "mispredicted"), (stream, prompt)
            stream.gone = "used"

    @rule(stream=consumes(streams))
    def delete(self, stream: Stream) -> None:
        answer = self.http.delete(f"/prompt_streams/{stream.id}")
        assert answer.status_code == (410 if stream.gone else 200)


async def test_any_order_of_calls_is_answered_as_documented(
    engine: LocalEngine, opened: StreamRecorder
) -> None:
    def run() -> None:
        with connect(engine, opened) as client:
            machine = type("Machine", (Sequences,), {"http": client, "opened": opened})
            run_state_machine_as_test(
                machine, settings=settings(COMMON, max_examples=60, stateful_step_count=25)
            )

    await anyio.to_thread.run_sync(run)
