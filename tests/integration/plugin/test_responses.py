"""The Responses API on real SGLang: prompts are rendered ahead, and requests use streams."""

import json
from typing import Any

import httpx
import pytest
from flashmoa_sglang.sglang.releases import installed

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.errors import MalformedRequest
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.skipif(
    installed().startswith("0.5.12"), reason="its API counts no tokens and takes no tools"
)

LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TURN = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"place": "lake"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "A fine lake."},
]
BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "Plan three days."},
    "instructions": {"input": [{"role": "user", "content": "Plan."}], "instructions": "You plan."},
    "tools": {"input": [{"role": "user", "content": "Plan."}, *TURN], "tools": [LOOK]},
}


async def ask(engine: LocalEngine, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Return the whole answer, from the last event of a stream if it is to be one."""
    asked = {"temperature": 0, "max_output_tokens": 8, **body, "stream": stream}
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        answer = (await http.post("/v1/responses", json=asked)).raise_for_status()
    if not stream:
        return answer.json()
    (*_, last) = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(last.removeprefix("data: "))["response"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", BODIES)
async def test_a_request_uses_the_stream_of_its_rendered_prompt(
    engine: LocalEngine, client: EngineClient, form: str, stream: bool
) -> None:
    body = {"model": (await client.info()).model["name"], **BODIES[form]}
    plain = await ask(engine, body, stream=stream)
    await client.flush_cache()
    text = await client.render_response(body)
    opened = await client.open_stream(text=text, add_special_tokens=False)
    answer = await ask(engine, {**body, "prompt_stream_id": opened.id}, stream=stream)
    usage, prompt = answer["usage"], opened.received_tokens
    assert usage["prompt_stream"]["status"] == "hit" and usage["input_tokens"] >= prompt
    details = usage["input_tokens_details"]
    assert details["cached_tokens"] + details["late_tokens"] == usage["input_tokens"]
    assert answer["output"][0]["content"] == plain["output"][0]["content"]
    assert plain["usage"].keys() | {"prompt_stream"} == usage.keys()
    await wait_until_idle(client)


async def test_a_prompt_that_is_not_in_the_request_is_not_rendered(client: EngineClient) -> None:
    with pytest.raises(MalformedRequest, match="previous_response_id has a prompt that is stored"):
        await client.render_response(
            {"model": "tiny", "input": "Go on.", "previous_response_id": "resp_1"}
        )
    with pytest.raises(MalformedRequest, match="input: Field required"):
        await client.render_response({"model": "tiny"})
    with pytest.raises(MalformedRequest, match="refuses these messages"):
        items = [{"type": "item_reference", "id": "msg_1"}]
        await client.render_response({"model": "tiny", "input": items})
