"""The openai package against a base URL. Each line printed is what a user would see, without what differs from run to run:
run it on an engine and on the proxy before it, and the two outputs must be the same."""
import asyncio
import sys

import httpx
import openai

BASE = sys.argv[1]
STREAMS = 200
client = openai.OpenAI(base_url=BASE + "/v1", api_key="none", max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "user", "content": "Say hello to Anna."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def say(name, *what):
    print(f"{name}:", *what, flush=True)


def refused(name, call):
    """What an error is to a user: its class, status and body."""
    try:
        call()
        say(name, "NO ERROR")
    except openai.APIStatusError as e:
        say(name, type(e).__name__, e.status_code, e.body)
    except openai.APIError as e:
        say(name, type(e).__name__, e)


def usage(u):
    return (u.prompt_tokens, u.completion_tokens, u.total_tokens)


models = client.models.list().data
say("models", [(m.id, m.object, m.owned_by) for m in models])

a = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16)
say("chat", a.object, a.choices[0].finish_reason, len(a.choices[0].message.content) > 0, usage(a.usage))

# A conversation: the second turn shares its prefix with the first.
turns = HELLO + [{"role": "assistant", "content": a.choices[0].message.content}, {"role": "user", "content": "And Otto?"}]
a = client.chat.completions.create(model=MODEL, messages=turns, max_completion_tokens=16)
say("second turn", a.choices[0].finish_reason, a.usage.completion_tokens)

chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, stream=True))
say("stream", len(chunks), chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason, any(c.usage for c in chunks))

chunks = list(
    client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
)
say("stream with usage", len(chunks), len(chunks[-1].choices), usage(chunks[-1].usage), sum(c.usage is not None for c in chunks))

chunks = list(
    client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, stream=True,
        stream_options={"include_usage": True}, extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
)
say("stream with running usage", len(chunks), sum(c.usage is not None for c in chunks))

a = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, tools=[TOOL], tool_choice="auto")
say("tools", a.choices[0].finish_reason, a.choices[0].message.tool_calls, usage(a.usage))
after = HELLO + [
    {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
a = client.chat.completions.create(model=MODEL, messages=after, max_tokens=16, tools=[TOOL])
say("tool answer", a.choices[0].finish_reason, usage(a.usage))

parts = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hellö 🙂\u2028"}]}]
a = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=16)
say("parts of text", a.choices[0].finish_reason, usage(a.usage))

raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=4)
say("raw", raw.status_code, raw.headers["content-type"], raw.parse().choices[0].finish_reason)

a = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=16)
say("completion", a.object, a.choices[0].finish_reason, usage(a.usage))
chunks = list(client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=16, stream=True))
say("completion stream", len(chunks), chunks[-1].choices[0].finish_reason)
a = client.completions.create(model=MODEL, prompt=[1, 2, 3, 4, 5], max_tokens=4)
say("completion of tokens", usage(a.usage))

refused("embeddings", lambda: client.embeddings.create(model=MODEL, input="hello"))
refused("responses", lambda: client.responses.create(model=MODEL, input="hello"))
refused("model of another name", lambda: client.chat.completions.create(model="nobody", messages=HELLO))
refused("stream of a model of another name", lambda: client.chat.completions.create(model="nobody", messages=HELLO, stream=True))
refused("too long", lambda: client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 400_000}]))
refused("none to answer", lambda: client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=-1))
refused("messages of a wrong type", lambda: client.chat.completions.create(model=MODEL, messages="hello"))
refused("no messages", lambda: client.chat.completions.create(model=MODEL, messages=[]))
refused("max_tokens of a wrong type", lambda: client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens="many"))
refused("unknown path", lambda: client.post("/nothing", cast_to=httpx.Response, body={}))


async def crowd():
    """Many streams at once, a third of them left in the middle."""
    async with openai.AsyncOpenAI(base_url=BASE + "/v1", api_key="none", max_retries=0, timeout=120) as c:

        async def one(i):
            text = f"You are helper {i % 5}. " * 60 + f"Question {i}"
            s = await c.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=24, stream=True
            )
            n = 0
            async for chunk in s:
                n += 1
                if i % 3 == 0 and n == 4:
                    await s.close()
                    return "left"
                end = chunk.choices[0].finish_reason
            return f"{end} after {n}"

        got = await asyncio.gather(*(one(i) for i in range(STREAMS)), return_exceptions=True)
        say("crowd", sorted({str(g): sum(str(g) == str(h) for h in got) for g in got}.items()))
        a = await c.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
        say("after the crowd", a.choices[0].finish_reason)


asyncio.run(crowd())
