// One streamed answer: its rounds, its tokens and what is known of each.

import { eventsOf } from "/page/api.js";

// A token's probability and its rivals, as chat and completions each write them.
function listed(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      probability: Math.exp(logprob),
      others: top_logprobs.filter((top) => top.token !== token).map((top) => [top.token, Math.exp(top.logprob)]),
    }));
  }
  return logprobs.tokens.map((token, i) => ({
    probability: Math.exp(logprobs.token_logprobs[i]),
    others: Object.entries(logprobs.top_logprobs[i])
      .filter(([name]) => name !== token)
      .map(([name, value]) => [name, Math.exp(value)]),
  }));
}

// All that an answer says, as a text to compare.
export const whole = ({ content, reasoning_content, tool_calls }) =>
  [reasoning_content, content, ...(tool_calls ?? []).map((call) => JSON.stringify(call.function))].join("");

export class Run {
  constructor() {
    this.text = this.reasoning = "";
    this.calls = []; // of tools, as a message has them
    this.told = []; // rounds as the server tells them
    this.rounds = [];
    this.tokens = [];
    this.positions = []; // of the drafts: how many were that long, how many were accepted so far
    this.known = 0; // tokens whose probability has come
    this.first = null;
    this.speed = 0;
    this.usage = this.metrics = this.finish = null;
  }

  add(told) {
    this.told.push(told);
    const round = { number: this.rounds.length + 1, drafted: told.drafted, method: told.method };
    round.tokens = told.tokens.map(([text, kind], i) => ({ text, kind, id: told.token_ids[i], round }));
    round.rejected = told.rejected.map((text, i) => ({ text, kind: "rejected", id: told.rejected_ids[i], round }));
    round.accepted = round.tokens.filter(({ kind }) => kind === "accepted").length;
    this.rounds.push(round);
    this.tokens.push(...round.tokens);
    for (let i = 0; i < round.drafted; i++) {
      this.positions[i] ??= { drafted: 0, accepted: 0 };
      this.positions[i].drafted += 1;
      this.positions[i].accepted += i < round.accepted ? 1 : 0;
    }
    const now = performance.now();
    if (this.first === null) this.first = { now, tokens: this.tokens.length };
    else this.speed = (1000 * (this.tokens.length - this.first.tokens)) / (now - this.first.now);
    return round;
  }

  // What is new of tool calls.
  addCalls(deltas) {
    for (const { index, id, function: { name, arguments: more } } of deltas) {
      this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
      this.calls[index].function.arguments += more ?? "";
    }
  }

  // The answer as a message of the conversation.
  get message() {
    const calls = this.calls.length ? { tool_calls: this.calls } : {};
    return { role: "assistant", content: this.text, ...calls };
  }

  // The line under an answer.
  get verdict() {
    const words = [`${this.tokens.length} tokens`];
    if (this.speed) words.push(`${this.speed.toFixed(this.speed < 100 ? 1 : 0)} tokens/s`);
    const sum = (key) => this.rounds.reduce((total, round) => total + round[key], 0);
    const drafted = sum("drafted");
    words.push(drafted ? `${sum("accepted")} of ${drafted} drafted tokens accepted` : "nothing drafted");
    if (drafted) words.push(`${(this.tokens.length / this.rounds.length).toFixed(2)} tokens per round`);
    if (this.finish === "length") words.push("ended by max tokens");
    return words.join(" · ");
  }
}

// Streams `request` into `run`; `onRound` is called with every round.
export async function decode(request, key, signal, run, onRound) {
  for await (const event of eventsOf(request, key, signal)) {
    for (const choice of event.choices) {
      run.text += choice.text ?? choice.delta.content ?? "";
      run.reasoning += choice.delta?.reasoning_content ?? "";
      run.addCalls(choice.delta?.tool_calls ?? []);
      run.finish = choice.finish_reason ?? run.finish;
      const rounds = (choice.trace ?? []).map((told) => run.add(told));
      for (const found of listed(choice.logprobs)) Object.assign(run.tokens[run.known++], found);
      rounds.forEach(onRound);
    }
    if (event.usage) {
      run.usage = event.usage;
      run.metrics = event.metrics;
      run.speed = event.metrics.tokens_per_second ?? run.speed;
    }
  }
}
