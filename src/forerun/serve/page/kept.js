// Conversations in this browser's storage, and the dialog that lists them.

import { button, make } from "/page/elements.js";

const PREFIX = "forerun.conversation.", OPEN = "forerun.open";
const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const dialog = document.getElementById("kept");

export const create = () => ({ id: `${Date.now()}.${Math.random()}`, system: "", turns: [] });

export const titleOf = ({ title, turns }) => title || (turns[0]?.messages[0].content ?? "").trim().slice(0, 80);

function read(id) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null; // cut off, or of another version
  }
}

// All of them, the newest first.
export function kept() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  return ids.map(read).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

// The one that was open last.
export const opened = () => read(localStorage.getItem(OPEN));

export function open(id) {
  localStorage.setItem(OPEN, id);
}

function write(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

// Where the storage is full, the colours of all conversations go. Gives whether the conversation is kept.
export function keep(conversation) {
  try {
    write(conversation);
  } catch {
    for (const each of [...kept(), conversation]) {
      for (const turn of each.turns) turn.answer.rounds = [];
      try {
        write(each);
      } catch {
        return false;
      }
    }
  }
  return true;
}

const messagesOf = ({ system, turns }) => [
  ...(system ? [{ role: "system", content: system }] : []),
  ...turns.flatMap(({ messages, answer }) => [...messages, answer.message]),
];

const HEADS = { system: "System", user: "You", assistant: "Answer", tool: "Result" };

function asMarkdown(conversation) {
  const parts = messagesOf(conversation).map(({ role, content, tool_calls }) => {
    const calls = (tool_calls ?? []).map((call) => `\`${call.function.name}(${call.function.arguments})\``);
    return [`## ${HEADS[role]}`, ...(content ? [content] : []), ...calls].join("\n\n");
  });
  return [`# ${titleOf(conversation)}`, ...parts].join("\n\n") + "\n";
}

const asJson = (conversation) =>
  JSON.stringify({ title: titleOf(conversation), messages: messagesOf(conversation) }, null, 2);

function download(name, text, type) {
  const link = Object.assign(make("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const fileName = (conversation) => titleOf(conversation).replaceAll(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";

// Shows the list. `choose` is given a conversation to open; `change` the id of one and its title, null if it is deleted.
export function list(current, { choose, change }) {
  const rows = kept().map((conversation) => row(conversation, conversation.id === current, { choose, change }));
  dialog.querySelector("ul").replaceChildren(...rows);
  dialog.querySelector(".note").hidden = rows.length > 0;
  if (!dialog.open) dialog.showModal();
}

function row(conversation, current, { choose, change }) {
  const element = make("li"), name = button(titleOf(conversation), () => (dialog.close(), choose(conversation)));
  name.classList.add("name");
  if (current) name.setAttribute("aria-current", "true");
  const when = make("small", "", WHEN.format(conversation.updated));
  const rename = button("Rename", () => {
    const field = Object.assign(make("input"), { value: titleOf(conversation) });
    field.setAttribute("aria-label", "Title");
    const end = () => {
      conversation.title = field.value.trim();
      write(conversation);
      name.textContent = titleOf(conversation);
      field.replaceWith(name);
      change(conversation.id, conversation.title);
    };
    field.addEventListener("blur", end, { once: true });
    field.addEventListener("keydown", (event) => event.key === "Enter" && field.blur());
    name.replaceWith(field);
    field.select();
  });
  const away = button("Delete", () => {
    if (away.textContent === "Delete") return (away.textContent = "Really delete?");
    localStorage.removeItem(PREFIX + conversation.id);
    element.remove();
    return change(conversation.id, null);
  });
  const actions = make("div", "actions");
  actions.append(
    rename,
    button("Markdown", () => download(`${fileName(conversation)}.md`, asMarkdown(conversation), "text/markdown")),
    button("JSON", () => download(`${fileName(conversation)}.json`, asJson(conversation), "application/json")),
    away,
  );
  element.append(name, when, actions);
  return element;
}
