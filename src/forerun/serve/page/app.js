// The playground: one request at a time, streamed, every token coloured by what became of its draft.

import { drawPositions, drawRounds, drawSpeeds } from "/page/charts.js";

const $ = (id) => document.getElementById(id);
let running = null; // the AbortController of the run in progress
let drafters = {}; // the server's, by method

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

async function loadModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error.message);
  const model = body.data[0];
  $("model").textContent = `${model.id}, ${model.max_model_len} tokens of context.`;
  drafters = model.speculative;
  const options = [...Object.keys(drafters), "none"].map((name) => new Option(name, name));
  $("method").replaceChildren(...options);
  offerDrafts();
  $("chat").disabled = !model.chat_template;
  $("chat_note").hidden = model.chat_template;
  if (!model.chat_template) $("chat").checked = false;
}

// What the chosen method leaves to choose.
function offerDrafts() {
  const drafter = drafters[$("method").value];
  $("tokens").disabled = $("compare").disabled = !drafter;
  $("tokens").max = drafter?.num_speculative_tokens ?? 0;
  $("tokens").placeholder = drafter ? `up to ${drafter.num_speculative_tokens}` : "none";
}

// The request's body; `plain` decodes without drafts.
function body(plain) {
  const number = (id) => Number($(id).value);
  const speculative = { enabled: !plain, trace: true };
  if (!plain) {
    speculative.method = $("method").value;
    if ($("tokens").value !== "") speculative.num_speculative_tokens = number("tokens");
  }
  const request = {
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), min_p: number("min_p"),
    seed: number("seed"), max_tokens: number("max_tokens"),
    stream: true, stream_options: { include_usage: true }, speculative,
  };
  if ($("stop_text").value) request.stop = [$("stop_text").value];
  if ($("regex").value) request.structured_outputs = { regex: $("regex").value };
  const prompt = $("prompt").value;
  return $("chat").checked ? { ...request, messages: [{ role: "user", content: prompt }] } : { ...request, prompt };
}

// The parsed events of a streamed answer. Throws what the server says is wrong.
async function* events(request, signal) {
  const path = request.messages ? "/v1/chat/completions" : "/v1/completions";
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(request), signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function span(text, kind) {
  const struck = kind === "rejected" || kind === "dropped";
  const element = document.createElement(struck ? "s" : "span");
  element.className = kind;
  // What is no part of the answer must not break its lines.
  element.textContent = struck ? text.replaceAll("\n", "⏎") : text;
  return element;
}

// One round: its accepted tokens, the rejected rest of the draft, then the target's own token.
function showRound(round) {
  const own = round.tokens.filter(([, origin]) => origin !== "accepted");
  const kept = round.tokens.filter(([, origin]) => origin === "accepted");
  const pieces = kept.map(([text, origin]) => span(text, origin));
  if (round.rejected.length) pieces.push(...round.rejected.map((text) => span(text, "rejected")));
  pieces.push(...own.map(([text, origin]) => span(text, origin)));
  const answer = $("answer");
  const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  answer.append(...pieces);
  if (atEnd) answer.scrollTop = answer.scrollHeight;
}

// Of the tokens shown, the first `length` characters are the answer; a stop text cut the rest off.
function cutAnswer(length) {
  let left = length;
  for (const token of document.querySelectorAll("#answer span:not(.prompt)")) {
    const text = token.textContent;
    if (text.length > left) {
      token.after(span(text.slice(left), "dropped"));
      token.textContent = text.slice(0, left);
    }
    left -= token.textContent.length;
  }
}

// On a narrow screen the answer is below the form. The focus stays where it is.
function bringAnswerIntoView() {
  const section = $("answer").parentElement;
  if (section.getBoundingClientRect().top > 0.6 * innerHeight) section.scrollIntoView();
}

class Run {
  constructor() {
    this.text = "";
    this.lengths = [];
    this.positions = [];
    this.tokens = 0;
    this.first = null;
    this.speed = 0;
    this.usage = null;
  }

  add(round) {
    const now = performance.now();
    const accepted = round.tokens.filter(([, origin]) => origin === "accepted").length;
    this.lengths.push(round.tokens.length);
    this.tokens += round.tokens.length;
    for (let i = 0; i < round.drafted; i++) {
      this.positions[i] ??= { drafted: 0, accepted: 0 };
      this.positions[i].drafted += 1;
      this.positions[i].accepted += i < accepted ? 1 : 0;
    }
    if (this.first === null) this.first = { now, tokens: this.tokens };
    else this.speed = (1000 * (this.tokens - this.first.tokens)) / (now - this.first.now);
  }
}

async function decode(plain, signal, onRound) {
  const run = new Run();
  for await (const event of events(body(plain), signal)) {
    for (const choice of event.choices) {
      run.text += choice.text ?? choice.delta.content;
      for (const round of choice.trace ?? []) {
        run.add(round);
        onRound(run, round);
      }
    }
    if (event.usage) {
      run.usage = event.usage;
      run.metrics = event.metrics;
      run.speed = event.metrics.tokens_per_second ?? run.speed;
    }
  }
  return run;
}

async function runAll(signal) {
  const speeds = { on: 0, off: 0 };
  const plainOnly = $("method").value === "none";
  $("answer").replaceChildren(span($("prompt").value, "prompt"));
  bringAnswerIntoView();
  $("verdict").textContent = "";
  drawSpeeds($("speeds"), speeds);
  drawRounds($("rounds"), $("mean"), []);
  drawPositions($("positions"), []);
  say(plainOnly ? "Decoding plainly …" : "Speculating …");
  const first = await decode(plainOnly, signal, (run, round) => {
    showRound(round);
    speeds[plainOnly ? "off" : "on"] = run.speed;
    drawRounds($("rounds"), $("mean"), run.lengths);
    drawPositions($("positions"), run.positions);
    drawSpeeds($("speeds"), speeds);
  });
  cutAnswer(first.text.length);
  speeds[plainOnly ? "off" : "on"] = first.speed;
  drawSpeeds($("speeds"), speeds);
  if ($("compare").checked && !plainOnly) {
    say("The same again, plainly …");
    const second = await decode(true, signal, (run) => {
      speeds.off = run.speed;
      drawSpeeds($("speeds"), speeds);
    });
    speeds.off = second.speed;
    drawSpeeds($("speeds"), speeds);
    compare(first, second);
  }
  say(`${first.usage.completion_tokens} tokens in ${first.lengths.length} rounds.`);
}

function compare(first, second) {
  const ratio = second.speed ? `${(first.speed / second.speed).toFixed(2)} times plain decoding's speed; ` : "";
  const promised = first.metrics.speculative_decoding.identical_to_plain_decoding;
  const same = first.text === second.text ? "the same text." : "another text.";
  const note = promised ? "" : " This rule keeps the distribution, not the text.";
  $("verdict").textContent = `${ratio}${same}${note}`;
}

async function start(event) {
  event?.preventDefault();
  if (running || !$("form").reportValidity()) return;
  running = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  try {
    if (!$("method").options.length) await loadModel();
    await runAll(running.signal);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error.message, true);
  } finally {
    running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", start);
$("method").addEventListener("change", offerDrafts);
$("stop").addEventListener("click", () => running?.abort());
$("rejects").addEventListener("change", () => document.body.classList.toggle("hide-rejected", !$("rejects").checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start(event);
  if (event.key === "Escape") running?.abort();
});
$("key").addEventListener("change", () => loadModel().then(() => say("Ready."), (error) => say(error.message, true)));
loadModel().catch((error) => say(error.message, true));
