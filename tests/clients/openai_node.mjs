// The openai package for Node against a base URL; same rules as openai_python.py.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0, timeout: 120_000 });
const say = (name, ...what) => console.log(name + ":", ...what.map((w) => JSON.stringify(w)));
const models = [];
for await (const m of client.models.list()) models.push(m.id);
say("models", models);
const model = models[0];
const messages = [{ role: "user", content: "Say hello to Anna." }];
const usage = (u) => [u.prompt_tokens, u.completion_tokens, u.total_tokens];
const all = async (stream) => { const chunks = []; for await (const c of await stream) chunks.push(c); return chunks; };
const refused = async (name, call) => {
  try { await call(); say(name, "NO ERROR"); } catch (e) { say(name, e.constructor.name, e.status, e.error ?? e.message); }
};

let a = await client.chat.completions.create({ model, messages, max_tokens: 16 });
say("chat", a.object, a.choices[0].finish_reason, usage(a.usage));

let chunks = await all(client.chat.completions.create({ model, messages, max_tokens: 16, stream: true }));
say("stream", chunks.length, chunks.at(-1).choices[0].finish_reason);

chunks = await all(client.chat.completions.create(
  { model, messages, max_tokens: 16, stream: true, stream_options: { include_usage: true } }));
say("stream with usage", chunks.length, chunks.at(-1).choices.length, usage(chunks.at(-1).usage));

const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: { town: { type: "string" } } } } }];
a = await client.chat.completions.create({ model, messages, max_tokens: 16, tools });
say("tools", a.choices[0].finish_reason, usage(a.usage));

// The helper that gathers a stream by events.
const runner = client.chat.completions.stream({ model, messages, max_tokens: 16 });
say("gathered stream", (await runner.finalChatCompletion()).choices[0].finish_reason);

a = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 16 });
say("completion", a.choices[0].finish_reason, usage(a.usage));
chunks = await all(client.completions.create({ model, prompt: "Once upon a time", max_tokens: 16, stream: true }));
say("completion stream", chunks.length);

await refused("embeddings", () => client.embeddings.create({ model, input: "hello" }));
await refused("model of another name", () => client.chat.completions.create({ model: "nobody", messages }));
await refused("too long", () =>
  client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(400_000) }] }));
await refused("no messages", () => client.chat.completions.create({ model, messages: [] }));

// Many streams at once, a third of them left in the middle: half of those by the stream's controller, half by a signal.
const one = async (i) => {
  const gone = new AbortController();
  const content = `You are helper ${i % 5}. `.repeat(60) + `Question ${i}`;
  const s = await client.chat.completions.create(
    { model, messages: [{ role: "user", content }], max_tokens: 24, stream: true }, { signal: gone.signal });
  let n = 0, end;
  for await (const c of s) {
    n += 1;
    end = c.choices[0].finish_reason;
    if (i % 3 === 0 && n === 4) {
      if (i % 2) { s.controller.abort(); return "left"; }
      gone.abort();
      return "left";
    }
  }
  return `${end} after ${n}`;
};
const got = {};
for (const r of await Promise.allSettled(Array.from({ length: 200 }, (_, i) => one(i)))) {
  const k = r.status === "fulfilled" ? r.value : "FAILED " + r.reason;
  got[k] = (got[k] ?? 0) + 1;
}
say("crowd", Object.fromEntries(Object.entries(got).sort()));
