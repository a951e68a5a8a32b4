"""A team as users write it, with clients of engines that do not run."""

TEAM = """
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

TASK = "Write about Bergen."
large = OpenAIChatCompletionClient(model="gpt-4o", api_key="none")
small = OpenAIChatCompletionClient(model="gpt-4o-mini", api_key="none", max_tokens=40)
writer = AssistantAgent("writer", large, system_message="You write essays.")
critic = AssistantAgent("critic", small, system_message="You criticise essays.")
approved = TextMentionTermination("APPROVED")
"""
ENDLESS = f"{TEAM}team = RoundRobinGroupChat([writer, critic], termination_condition=approved)\n"
ENDING = f"{TEAM}team = RoundRobinGroupChat([writer, critic], max_turns=3)\n"
SELECTED = f"{TEAM}team = SelectorGroupChat([writer, critic], large, max_turns=3)\n"
STRUCTURED = f"""{TEAM}
from pydantic import BaseModel

class Essay(BaseModel):
    text: str

typed = AssistantAgent("typed", large, output_content_type=Essay)
team = RoundRobinGroupChat([writer, typed], max_turns=3)
"""
NESTED = f"""{TEAM}
from autogen_agentchat.agents import MessageFilterAgent, MessageFilterConfig, SocietyOfMindAgent

filtered = MessageFilterAgent("filtered", critic, MessageFilterConfig(per_source=[]))
inner = RoundRobinGroupChat([writer, filtered], max_turns=2)
society = SocietyOfMindAgent("society", inner, model_client=small)
team = RoundRobinGroupChat([society], max_turns=1)
"""
WRAPPED = f"""{TEAM}
from autogen_agentchat.agents import BaseChatAgent

class Wrapper(BaseChatAgent):
    produced_message_types = ()

    async def on_messages(self, messages, cancellation_token):
        raise NotImplementedError

    async def on_reset(self, cancellation_token):
        pass

wrapper = Wrapper("wrapper", "holds a client")
team = RoundRobinGroupChat([writer, wrapper], max_turns=2)
"""
LINKED = f"""{TEAM}
from flashmoa.autogen import FlashMoAChatCompletionClient, link

local = FlashMoAChatCompletionClient(
    model="mine", base_url="http://127.0.0.1:9", model_info=large.model_info, max_tokens=8
)
first = AssistantAgent("first", local)
second = AssistantAgent("second", local)
team = RoundRobinGroupChat([first, second], max_turns=2)
link(team)
"""
