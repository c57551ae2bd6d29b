// The playground: a conversation, or a text to continue; one request at a time.

import { Answer } from "/page/answer.js";
import { readyModel, servedModels } from "/page/api.js";
import { drawPositions, drawRounds, drawSpeeds } from "/page/charts.js";
import { button, make } from "/page/elements.js";
import { create, keep, list, open, opened } from "/page/kept.js";
import { asked, clearErrors, MOST_CONTINUED, offer, showError, tools } from "/page/options.js";
import { decode, Run } from "/page/run.js";

const $ = (id) => document.getElementById(id);
const turns = []; // {messages, answer, element} of the conversation; messages: of the user, or of tools
let conversation = create();
let busy = null; // {controller, done} of what is in progress
let model = null;

const COLOURS = "forerun.colours", MODEL = "forerun.model";

const key = () => $("key").value;
const chatting = () => !$("chat").hidden;
const box = () => $(chatting() ? "message" : "prompt");
const say = (text) => ($("status").textContent = text);

// --- the model and its modes

// Which model answers: the conversation's, else one that is loaded, else the only one; several wait to be chosen from.
async function load() {
  const cards = await servedModels(key());
  const names = cards.map(({ id }) => id);
  const asked = [conversation.model, localStorage.getItem(MODEL)].find((name) => names.includes(name));
  $("models").hidden = names.length < 2;
  $("models").replaceChildren(new Option("Choose a model", ""), ...names.map((name) => new Option(name, name)));
  $("models").firstChild.disabled = true;
  await take(asked ?? cards.find(({ speculative }) => speculative)?.id ?? (names.length === 1 ? names[0] : ""));
}

async function take(name) {
  $("models").value = name;
  if (!name) return choose("chat");
  if (!$("models").hidden) say(`Loading ${name} …`);
  model = await readyModel(name, key());
  localStorage.setItem(MODEL, name);
  const called = $("models").hidden ? `${model.id} · ` : "";
  $("model").textContent = `${called}${model.max_model_len.toLocaleString("en")} tokens of context`;
  offer(model);
  $("tab_chat").disabled = !model.chat_template;
  $("chat_note").hidden = model.chat_template;
  choose(model.chat_template ? "chat" : "complete");
  toEnd();
}

// The model that requests name: none before one is chosen, which the server then says.
const named = () => (model ? { model: model.id } : {});

function choose(mode) {
  for (const name of ["chat", "complete"]) {
    $(name).hidden = name !== mode;
    $(`tab_${name}`).setAttribute("aria-selected", name === mode);
    $(`tab_${name}`).tabIndex = name === mode ? 0 : -1;
  }
  for (const name of ["system_field", "tools_field", "list"]) $(name).hidden = mode !== "chat";
  $("max_tokens").placeholder = mode === "chat" ? "the context" : MOST_CONTINUED;
  refresh();
  clearErrors();
  measure(chatting() ? turns.at(-1)?.answer : completed);
}

const colour = () => document.body.classList.toggle("colours", $("coloured").checked);

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

function history(before) {
  const system = $("system").value.trim();
  const messages = before.flatMap((turn) => [...turn.messages, turn.answer.run.message]);
  return [...(system ? [{ role: "system", content: system }] : []), ...messages];
}

// How far the conversation goes on behind the box for messages.
const beyond = () => $("turns").getBoundingClientRect().bottom - $("composer").getBoundingClientRect().top;

const toEnd = () => turns.length && scrollBy({ top: Math.max(0, beyond()), behavior: "instant" });

// Does `change`; whoever was reading the end of the conversation still does afterwards.
function atEnd(change) {
  const reading = beyond() < 48;
  change();
  if (reading && beyond() > 0) scrollBy({ top: beyond(), behavior: "instant" });
}

function newTurn(request, messages) {
  const turn = { messages, element: make("div", "turn") };
  turn.answer = newAnswer(request, {
    again: () => send(messages, turn),
    reply: (results) => send(results, turns[turns.indexOf(turn) + 1]),
  });
  turn.element.append(...messages.map((message) => question(turn, message)), turn.answer.element);
  return turn;
}

function question(turn, { role, content }) {
  const element = make("div", "asked");
  element.append(make("p", role === "tool" ? "question result" : "question", content));
  if (role === "user") element.append(button("Edit", () => edit(turn, element)));
  return element;
}

// Another message in the place of one; the conversation goes on from there.
function edit(turn, element) {
  const form = make("form", "edit"), field = make("textarea"), actions = make("div", "actions");
  const before = [...element.children];
  field.value = turn.messages[0].content;
  field.rows = Math.min(12, field.value.split("\n").length + 1);
  field.setAttribute("aria-label", "Message");
  const done = Object.assign(make("button", "", "Send"), { type: "submit" });
  actions.append(done, button("Cancel", () => element.replaceChildren(...before)));
  form.append(field, actions);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return field.focus();
    element.replaceChildren(...before);
    send([{ role: "user", content: field.value }], turn);
  });
  element.replaceChildren(form);
  field.focus();
}

// Sends messages of the user, or results of tools: in the place of `turn` and what follows it, if that is given.
async function send(messages, turn = null) {
  await occupy(async (signal) => {
    const at = turns.includes(turn) ? turns.indexOf(turn) : turns.length;
    const added = newTurn({ ...named(), ...asked(), ...tools(), messages: [...history(turns.slice(0, at)), ...messages] }, messages);
    const dropped = turns.splice(at, Infinity, added);
    for (const each of dropped) each.element.remove();
    $("turns").append(added.element);
    if (!turn && messages[0].role === "user") $("message").value = "";
    toEnd();
    try {
      refresh();
      await stream(added.answer, signal, atEnd);
    } finally {
      if (added.answer.run.tokens.length) keepTurns();
      else takeBack(added, dropped);
      refresh();
    }
  });
}

// What there is to do with the conversation as it is.
function refresh() {
  $("fresh").hidden = !chatting() || !turns.length;
  $("welcome").hidden = turns.length > 0;
}

// A turn that came to nothing: what it replaced is there again, and its message can be sent once more.
function takeBack(turn, dropped) {
  turn.element.remove();
  turns.splice(turns.indexOf(turn), 1, ...dropped);
  $("turns").append(...dropped.map(({ element }) => element));
  if (turn.messages[0].role === "user") $("message").value ||= turn.messages[0].content;
  measure(turns.at(-1)?.answer);
}

function keepTurns() {
  const system = $("system").value.trim();
  const begun = turns.filter(({ answer }) => answer.run.tokens.length || answer.line);
  const saved = begun.map(({ messages, answer }) => ({ messages, answer: answer.kept() }));
  conversation = { ...conversation, ...named(), system, updated: Date.now(), turns: saved };
  open(conversation.id);
  const full = new Error("This browser's storage is full: delete a conversation to keep this one.");
  if (!keep(conversation)) showError(full, $("message"));
}

// Shows a conversation that was kept, or a new one.
async function show(next) {
  busy?.controller.abort();
  await busy?.done;
  conversation = next;
  open(conversation.id);
  if (conversation.turns.length) $("system").value = conversation.system;
  turns.splice(0);
  for (const { messages, answer } of conversation.turns) {
    const turn = newTurn({ ...answer.request, messages: [...history(turns), ...messages] }, messages);
    turn.answer.restore(answer);
    turns.push(turn);
  }
  $("turns").replaceChildren(...turns.map(({ element }) => element));
  refresh();
  clearErrors();
  measure(turns.at(-1)?.answer);
  toEnd();
  if (model && conversation.model && conversation.model !== model.id) connect(); // else the one in use goes on
}

async function startAnew() {
  await show(create());
  say("A new conversation.");
  $("message").focus();
}

const showList = () =>
  list(conversation.id, {
    choose: show,
    change(id, title) {
      if (id !== conversation.id) return;
      if (title === null) show(create());
      else conversation.title = title;
    },
  });

function sendMessage() {
  const text = $("message").value;
  if (text.trim()) send([{ role: "user", content: text }]);
  else $("message").focus();
}

// --- a text to continue

let completed = null;

const complete = () =>
  occupy(async (signal) => {
    const prompt = $("prompt").value;
    const answer = newAnswer({ ...named(), max_tokens: MOST_CONTINUED, ...asked(), prompt }, { prompt });
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
  button.addEventListener("click", () => send([{ role: "user", content: button.textContent }]));
}
$("fresh").addEventListener("click", startAnew);
$("list").addEventListener("click", showList);
for (const name of ["chat", "complete"]) $(`tab_${name}`).addEventListener("click", () => choose(name));
$("tabs").addEventListener("keydown", (event) => {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key) || !model?.chat_template) return;
  choose(chatting() ? "complete" : "chat");
  $("tabs").querySelector("[aria-selected=true]").focus();
});
addEventListener("pagehide", () => busy && turns.length && keepTurns());
$("coloured").checked = localStorage.getItem(COLOURS) === "1";
$("coloured").addEventListener("change", () => {
  localStorage.setItem(COLOURS, $("coloured").checked ? "1" : "0");
  colour();
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
  if (event.key === "Escape" && !$("kept").open) busy?.controller.abort();
});

// One at a time: a model that is chosen while another loads comes after it.
let connected = Promise.resolve();
function connect(work = load) {
  return (connected = connected.then(clearErrors).then(work).then(() => say(model ? "Ready." : "Choose a model."), (error) => {
    if (!model) choose("chat");
    say("The model could not be asked for.");
    showError(error, $("message"));
  }));
}
$("key").addEventListener("change", () => connect());
$("models").addEventListener("change", () => {
  const name = $("models").value;
  connect(() => take(name)).then(() => ($("models").value = model?.id ?? ""));
});
colour();
show(opened() ?? conversation).then(() => connect());
