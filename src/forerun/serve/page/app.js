// The playground: a conversation, or a text to continue; one request at a time.

import { Answer } from "/page/answer.js";
import { servedModel } from "/page/api.js";
import { drawPositions, drawRounds, drawSpeeds } from "/page/charts.js";
import { asked, clearErrors, offer, showError } from "/page/options.js";
import { decode, Run } from "/page/run.js";

const $ = (id) => document.getElementById(id);
const turns = []; // {text, answer, element} of the conversation
let busy = null; // {controller, done} of what is in progress
let model = null;

const key = () => $("key").value;
const chatting = () => !$("chat").hidden;
const box = () => $(chatting() ? "message" : "prompt");
const say = (text) => ($("status").textContent = text);

// --- the model and its modes

async function load() {
  model = await servedModel(key());
  $("model").textContent = `${model.id} · ${model.max_model_len.toLocaleString("en")} tokens of context`;
  offer(model);
  $("tab_chat").disabled = !model.chat_template;
  $("chat_note").hidden = model.chat_template;
  choose(model.chat_template ? "chat" : "complete");
}

function choose(mode) {
  for (const name of ["chat", "complete"]) {
    $(name).hidden = name !== mode;
    $(`tab_${name}`).setAttribute("aria-selected", name === mode);
    $(`tab_${name}`).tabIndex = name === mode ? 0 : -1;
  }
  $("system_field").hidden = mode !== "chat";
  offerFresh();
  clearErrors();
  measure(chatting() ? turns.at(-1)?.answer : completed);
}

// --- one thing at a time

function setBusy(now) {
  busy = now;
  for (const button of document.querySelectorAll(".run")) button.hidden = busy !== null;
  for (const button of document.querySelectorAll(".stop")) button.hidden = busy === null;
}

// Ends what is in progress and does `work`; gives whether that came to its end.
async function occupy(work) {
  busy?.controller.abort();
  await busy?.done;
  const controller = new AbortController();
  const held = document.activeElement?.matches(".run");
  clearErrors();
  const task = work(controller.signal).then(
    () => true,
    (error) => {
      if (error.name === "AbortError") say("Stopped.");
      else {
        say("That did not work.");
        showError(error, box());
      }
      return false;
    },
  );
  setBusy({ controller, done: task });
  if (held) visible(".stop")?.focus();
  const whole = await task;
  const stopping = document.activeElement?.matches(".stop");
  setBusy(null);
  if (stopping) visible(".run")?.focus();
  return whole;
}

const visible = (selector) => [...document.querySelectorAll(selector)].find((each) => each.offsetParent !== null);

// --- measurements of one answer

let measured = null;

function measure(answer) {
  measured = answer ?? null;
  $("measured").hidden = !measured?.run.rounds.length;
  $("speeds_figure").hidden = !measured?.speeds;
  if ($("measured").hidden) return;
  drawPositions($("positions"), measured.run.positions);
  drawRounds($("rounds"), measured.run.rounds);
  if (measured.speeds) drawSpeeds($("speeds"), measured.speeds);
}

// Streams an answer into the page; `follow` keeps its end in sight.
async function stream(answer, signal, follow) {
  say(answer.request.speculative.method ? "Speculating …" : "Decoding plainly …");
  measure(answer);
  try {
    await decode(answer.request, key(), signal, answer.run, (round) => {
      follow(() => answer.show(round));
      if (measured === answer) measure(answer);
    });
  } catch (error) {
    if (answer.run.tokens.length) answer.end(error.name === "AbortError" ? "stopped" : "broken off");
    throw error;
  }
  follow(() => answer.end());
  say(`Done: ${answer.run.verdict}.`);
}

const compareNow = (answer) =>
  occupy(async (signal) => {
    const last = answer === turns.at(-1)?.answer;
    const tell = (head, rest) => (last ? atEnd : (change) => change())(() => answer.tellComparison(head, rest));
    try {
      say("Comparing …");
      const told = await answer.compare(key(), signal, (found, text) => {
        answer.speeds = found.on.length ? found : null;
        measure(answer);
        if (text) tell("", text);
      });
      tell(...told);
      say(told.join(" "));
    } catch (error) {
      tell("", "");
      answer.speeds = null;
      measure(answer);
      throw error;
    }
  });

function newAnswer(request, options) {
  const wishes = $("probabilities").checked
    ? request.messages ? { logprobs: true, top_logprobs: 3 } : { logprobs: 3 }
    : {};
  return new Answer({ ...request, ...wishes }, new Run(), { ...options, compareNow });
}

// --- the conversation

function history(text) {
  const messages = turns.flatMap((turn) => [
    { role: "user", content: turn.text },
    { role: "assistant", content: turn.answer.run.text },
  ]);
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: text }];
}

// How far the conversation goes on behind the box for messages.
const beyond = () => $("turns").getBoundingClientRect().bottom - $("composer").getBoundingClientRect().top;

// Does `change`; whoever was reading the end of the conversation still does afterwards.
function atEnd(change) {
  const reading = beyond() < 48;
  change();
  if (reading && beyond() > 0) scrollBy({ top: beyond(), behavior: "instant" });
}

async function send(text) {
  await occupy(async (signal) => {
    const answer = newAnswer({ ...asked(), messages: history(text) }, { again: () => again(turn) });
    const element = document.createElement("div");
    element.className = "turn";
    const question = Object.assign(document.createElement("p"), { className: "question", textContent: text });
    element.append(question, answer.element);
    const turn = { text, answer, element };
    $("welcome").hidden = true;
    $("turns").append(element);
    turns.push(turn);
    $("message").value = "";
    scrollBy({ top: Math.max(0, beyond()), behavior: "instant" });
    try {
      await stream(answer, signal, atEnd);
    } finally {
      if (!answer.run.tokens.length) takeBack(turn);
      offerFresh();
    }
  });
}

const offerFresh = () => ($("fresh").hidden = !chatting() || !turns.length);

// A turn that leaves the conversation; its message can be sent once more.
function takeBack(turn) {
  for (const dropped of turns.splice(turns.indexOf(turn))) dropped.element.remove();
  $("message").value ||= turn.text;
  $("welcome").hidden = turns.length > 0;
  measure(turns.at(-1)?.answer);
}

async function again(turn) {
  busy?.controller.abort();
  await busy?.done;
  const draft = $("message").value;
  takeBack(turn);
  await send(turn.text);
  $("message").value ||= draft;
}

async function startAnew() {
  busy?.controller.abort();
  await busy?.done;
  const draft = $("message").value;
  if (turns.length) takeBack(turns[0]);
  $("message").value = draft;
  offerFresh();
  clearErrors();
  say("A new conversation.");
  $("message").focus();
}

function sendMessage() {
  const text = $("message").value;
  if (text.trim()) send(text);
  else $("message").focus();
}

// --- a text to continue

let completed = null;

const complete = () =>
  occupy(async (signal) => {
    const prompt = $("prompt").value;
    const answer = newAnswer({ ...asked(), prompt }, { prompt });
    const before = completed;
    completed = answer;
    $("completion").replaceChildren(answer.element);
    if (answer.element.getBoundingClientRect().top > 0.6 * innerHeight) answer.element.scrollIntoView();
    try {
      await stream(answer, signal, (change) => change());
    } finally {
      if (!answer.run.tokens.length) {
        completed = before;
        $("completion").replaceChildren(...(before ? [before.element] : []));
        measure(before);
      }
    }
  });

// --- what the page listens to

$("composer").addEventListener("submit", (event) => (event.preventDefault(), sendMessage()));
$("continuing").addEventListener("submit", (event) => (event.preventDefault(), complete()));
for (const button of document.querySelectorAll(".stop")) button.addEventListener("click", () => busy?.controller.abort());
for (const button of document.querySelectorAll("#welcome button")) {
  button.addEventListener("click", () => send(button.textContent));
}
$("fresh").addEventListener("click", startAnew);
for (const name of ["chat", "complete"]) $(`tab_${name}`).addEventListener("click", () => choose(name));
$("tabs").addEventListener("keydown", (event) => {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key) || !model?.chat_template) return;
  choose(chatting() ? "complete" : "chat");
  $("tabs").querySelector("[aria-selected=true]").focus();
});
$("rejects").addEventListener("change", () => document.body.classList.toggle("show-rejected", $("rejects").checked));
$("message").addEventListener("keydown", (event) => {
  // Where there is no Shift at hand, Enter is a new line.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(hover: none)").matches) return;
  event.preventDefault();
  sendMessage();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) chatting() ? sendMessage() : complete();
  if (event.key === "Escape") busy?.controller.abort();
});

function connect() {
  clearErrors();
  load().then(() => say("Ready."), (error) => {
    choose("chat");
    say("The model could not be asked for.");
    showError(error, $("message"));
  });
}
$("key").addEventListener("change", connect);
connect();
