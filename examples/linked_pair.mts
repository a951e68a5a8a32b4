// Two calls from TypeScript: the engine prefills the reader's prompt while the writer writes.
// npm install openai && node linked_pair.mts http://127.0.0.1:30000   (node 22.18 or newer)
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:30000";
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });

async function post(path: string, body: object): Promise<any> {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
async function ask(messages: any[], headers: Record<string, string> = {}, more: object = {}) {
  const body = { model: "default", messages, max_tokens: 200, temperature: 0, ...more };
  const answer: any = await openai.chat.completions.create(body, { headers });
  return { message: answer.choices[0].message, usage: answer.usage };
}
const user = (content: string) => [{ role: "user", content }];
const review = (plan: string) => user(`Check the plan of a trip to Nepal.\n${plan}\nIs it safe?`);

// The prompt up to the plan goes into a prompt stream, which then follows the writer's call.
const [before, after] = (await post("/render", { messages: review("<plan>") })).text.split("<plan>");
const { id } = await post("/prompt_streams", { text: before, add_special_tokens: false });
const call = crypto.randomUUID();
await post(`/prompt_streams/${id}/append`, { seq: 0, call });
const plan = (await ask(user("Plan a trip."), { "X-Request-Id-FlashMoA": call })).message.content;
const rest = { seq: 1, start: [...before].length, text: plan + after, end: true };
await post(`/prompt_streams/${id}/append`, rest);
const linked = await ask(review(plan), { "X-Request-Id-FlashMoA-Stream": id });
console.log(`stream: ${linked.usage.prompt_stream.status}`);

// While a tool runs, the engine prefills the next prompt up to the tool's result.
const tools = { tools: [{ type: "function", function: { name: "weather" } }], parallel_tool_calls: false };
const talk: any[] = user("How is the weather?");
const { message, usage } = await ask(talk, {}, { ...tools, tool_choice: "required" });
await new Promise((ended) => setTimeout(ended, 2000)); // The tool runs.
talk.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "It rains." });
const { prompt_tokens, prompt_tokens_details: details } = (await ask(talk, {}, tools)).usage;
console.log(`tool: ${details?.cached_tokens} of ${prompt_tokens} cached, ${usage.prompt_tokens} before`);
