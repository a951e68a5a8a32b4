"""The prompts of all kinds of calls are recorded, for ``flashmoa trace``."""

from autogen_core.models import UserMessage
from pydantic import BaseModel

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, PromptSent
from flashmoa.observe.calls import calls


async def test_prompts_of_every_kind_of_call_are_recorded(
    engine: LocalEngine, client: EngineClient
) -> None:
    class Plan(BaseModel):
        is_long: bool

    events: list[Event] = []
    thinks = {"chat_template_kwargs": {"enable_thinking": False}}
    model_client = FlashMoAChatCompletionClient(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=64,
        listener=events.append,
        extra_body=thinks,
    )
    ask = [UserMessage(content="Plan a trip.", source="user")]
    sent = {"role": "user", "content": "Plan a trip.", "name": "user"}

    def take() -> PromptSent:
        (call,) = calls(events)
        assert call.prompt is not None and call.usage is not None, events
        assert call.usage.prompt_tokens > 0
        events.clear()
        return call.prompt

    await model_client.create(ask)
    assert take().messages == [sent]
    await model_client.create(ask, json_output=Plan)
    assert take().messages == [sent]
    for json_output in (None, Plan):
        async for _ in model_client.create_stream(ask, json_output=json_output):
            pass
        assert take().messages == [sent]
    await model_client.score(ask, [" yes", " no"])
    prompt = take()
    assert (prompt.messages, prompt.settings) == ([sent], thinks["chat_template_kwargs"])
    await model_client.close()
    async with Workflow(client, listener=events.append) as flow:
        await flow.ask([sent], max_tokens=4, chat_template_kwargs={"a": 1}, cache_salt="s")
    prompt = take()
    assert prompt.messages == [sent]
    assert prompt.settings == {"a": 1, "cache_salt": "s"}
