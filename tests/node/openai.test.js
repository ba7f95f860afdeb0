// The openai package for Node against a running server of the fixture `chain_tools`, which calls `weather`
// with the city Rome where tools are offered and says ` hello there` elsewhere.
//
// LOCKSTEP_BASE_URL and LOCKSTEP_MODEL name the server; tests/python/test_node_clients.py sets them.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, { BadRequestError, NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.LOCKSTEP_MODEL;
// No retries: an answer that comes only at the second try is a failure here.
const client = new OpenAI({ baseURL: process.env.LOCKSTEP_BASE_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const ask = { model, messages: [{ role: "user", content: "What is the weather in Rome?" }], temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

test("chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(ask);
  assert.equal(whole.choices[0].message.content, " hello there");
  assert.equal(whole.choices[0].finish_reason, "stop");
  let text = "";
  let usage;
  const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, " hello there");
  assert.deepEqual(usage.total_tokens, whole.usage.total_tokens);
});

test("stream helper", async () => {
  const deltas = [];
  const stream = client.chat.completions.stream(ask).on("content", (delta) => deltas.push(delta));
  assert.equal(await stream.finalContent(), " hello there");
  assert.equal(deltas.join(""), " hello there");
});

for (const choice of ["auto", "required", { type: "function", function: { name: "weather" } }]) {
  test(`tools: ${JSON.stringify(choice)}`, async () => {
    const body = { ...ask, tools: [weather], tool_choice: choice };
    const whole = (await client.chat.completions.create(body)).choices[0];
    assert.equal(whole.finish_reason, "tool_calls");
    const streamed = await client.chat.completions.stream(body).finalMessage();
    for (const message of [whole.message, streamed]) {
      assert.equal(message.tool_calls.length, 1);
      assert.equal(message.tool_calls[0].function.name, "weather");
      assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Rome" });
    }
  });
}

test("tool runner: the result goes back and the answer comes", async () => {
  const cities = [];
  const run = { ...weather.function, parse: JSON.parse, function: ({ city }) => (cities.push(city), "sunny") };
  const runner = client.chat.completions.runTools({ ...ask, tools: [{ type: "function", function: run }] });
  assert.equal(await runner.finalContent(), " hello there");
  assert.deepEqual(cities, ["Rome"]);
});

test("structured output", async () => {
  const light = z.object({ on: z.boolean(), colour: z.enum(["red", "green"]) });
  const format = zodResponseFormat(light, "light");
  // The fixture would write white space for ever.
  format.json_schema.schema["x-guidance"] = { whitespace_flexible: false };
  const answer = await client.chat.completions.parse({ ...ask, response_format: format });
  assert.ok(light.safeParse(answer.choices[0].message.parsed).success);
});

test("log-probabilities and several choices", async () => {
  const answer = await client.chat.completions.create({ ...ask, n: 2, logprobs: true, top_logprobs: 2 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  for (const choice of answer.choices) {
    assert.deepEqual(choice.logprobs.content.map((entry) => entry.token), [" hello", " there", "<|eos|>"]);
    assert.ok(choice.logprobs.content.every((entry) => entry.top_logprobs.length === 2));
  }
});

test("completions, models and a closed stream", async () => {
  const answer = await client.completions.create({ model, prompt: ["A", "D"], temperature: 0 });
  assert.deepEqual(answer.choices.map((choice) => choice.text), [" alpha beta gamma delta", "STOP!"]);
  assert.deepEqual((await client.models.list()).data.map((entry) => entry.id), [model]);
  for await (const chunk of await client.completions.create({ model, prompt: "C", max_tokens: 400, stream: true })) {
    assert.equal(chunk.object, "text_completion");
    break;
  }
});

test("errors have their class, code and field", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, model: "nobody" }), (error) => {
    return error instanceof NotFoundError && error.code === "model_not_found";
  });
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: 200 }), (error) => {
    return error instanceof BadRequestError && error.param === "temperature";
  });
});

test("responses: whole, streamed and with tools", async () => {
  const request = { model, input: "What is the weather in Rome?", temperature: 0 };
  assert.equal((await client.responses.create(request)).output_text, " hello there");
  let text = "";
  for await (const event of await client.responses.create({ ...request, stream: true })) {
    text += event.type === "response.output_text.delta" ? event.delta : "";
  }
  assert.equal(text, " hello there");
  const tool = { type: "function", strict: true, ...weather.function };
  const answer = await client.responses.create({ ...request, tools: [tool] });
  const call = answer.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Rome" });
});
