"""LangChain's ChatOpenAI and OpenAI against a base URL; same rules as openai_python.py."""
import asyncio
import sys

import openai
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

BASE = sys.argv[1]
MODEL = openai.OpenAI(base_url=BASE + "/v1", api_key="none").models.list().data[0].id
common = dict(base_url=BASE + "/v1", api_key="none", model=MODEL, max_tokens=16, max_retries=0, timeout=120)
chat = ChatOpenAI(**common)
talk = [SystemMessage("You are brief."), HumanMessage("Say hello to Anna.")]


@tool
def weather(town: str) -> str:
    """The weather in a town."""
    return "rain"


def meta(m):
    u = m.usage_metadata
    return m.response_metadata.get("finish_reason"), u and (u["input_tokens"], u["output_tokens"], u["total_tokens"])


print("chat:", meta(chat.invoke(talk)))
whole = None
for piece in chat.stream(talk):
    whole = piece if whole is None else whole + piece
print("stream:", meta(whole))
whole = None
for piece in ChatOpenAI(**common, stream_usage=True).stream(talk):
    whole = piece if whole is None else whole + piece
print("stream with usage:", meta(whole))
print("tools:", meta(chat.bind_tools([weather]).invoke(talk)))
print("batch:", [meta(m) for m in chat.batch([talk] * 20)] == [meta(chat.invoke(talk))] * 20)
print("completion:", len(OpenAI(**common).invoke("Once upon a time")) > 0)
try:
    print("too long: NO ERROR", chat.invoke("word " * 400_000))
except Exception as e:
    print("too long:", type(e).__name__, e)


async def crowd():
    async def one(i):
        return sum([1 async for _ in chat.astream([SystemMessage(f"You are helper {i % 5}. " * 60), HumanMessage(f"Question {i}")])]) > 0

    got = await asyncio.gather(*(one(i) for i in range(100)), return_exceptions=True)
    print("crowd:", {str(g): sum(str(g) == str(h) for h in got) for g in got})


asyncio.run(crowd())
