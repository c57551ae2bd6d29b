// An answer on the page: its tokens, the line under it, and what can be done with it.

import { compare, PAIRS, words } from "/page/compare.js";
import { button, copyButton, make } from "/page/elements.js";
import { render } from "/page/markdown.js";
import { whole } from "/page/run.js";
import { describe } from "/page/tooltip.js";

function span(token) {
  const struck = token.kind === "rejected" || token.kind === "dropped";
  // What is no part of the answer must not break its lines.
  const element = make(struck ? "s" : "span", token.kind, struck ? token.text.replaceAll("\n", "⏎") : token.text);
  describe(element, token);
  return element;
}

const PAINT_EVERY = 50; // ms

function folded(name, title) {
  const element = make("details", name);
  element.append(make("summary", "", title), make("div", "markdown"));
  return element;
}

export class Answer {
  // `request` is what was asked. These are called, if given: `again` to ask it anew, `reply` with the results of its
  // tool calls, and `compareNow` for a comparison of this answer.
  constructor(request, run, { prompt = "", again = null, reply = null, compareNow }) {
    this.request = request;
    this.run = run;
    this.emitted = []; // {element, token} of the text
    this.element = make("article", "answer");
    this.element.setAttribute("aria-label", "Answer");
    this.tokens = make("div", "tokens");
    this.tokens.tabIndex = 0;
    this.tokens.setAttribute("role", "group");
    this.tokens.setAttribute("aria-label", "Text; the arrow keys go from token to token");
    if (prompt) this.tokens.append(make("span", "prompt", prompt));
    this.reply = reply;
    this.painted = 0; // when
    this.reasoning = folded("reasoning", "Reasoning");
    this.reasoning.hidden = true;
    this.markdown = make("div", "markdown");
    this.calls = make("div", "calls");
    this.verdict = make("p", "verdict");
    this.comparison = make("p", "comparison");
    this.comparison.hidden = true;
    this.actions = make("div", "actions");
    this.actions.hidden = true;
    this.actions.append(copyButton(() => this.run.text));
    this.comparing = button("Compare with plain decoding", () => compareNow(this));
    if (request.speculative.method) this.actions.append(this.comparing);
    if (again) this.actions.append(button("Again", again));
    this.element.append(this.reasoning, this.markdown, this.tokens, this.calls);
    this.element.append(this.verdict, this.comparison, this.actions);
  }

  // The text of a conversation's answer, its thoughts folded.
  paint() {
    const { text, reasoning } = this.run;
    this.painted = performance.now();
    if (!this.request.messages) return;
    render(this.markdown, text);
    this.reasoning.hidden = !reasoning;
    if (reasoning) render(this.reasoning.lastElementChild, reasoning);
    this.reasoning.firstElementChild.textContent = text || this.run.calls.length || this.line ? "Reasoning" : "Reasoning …";
  }

  // The calls of tools, each with a field for its result.
  showCalls() {
    if (!this.run.calls.length) return;
    const fields = this.run.calls.map(({ function: { name, arguments: given } }) => {
      const element = make("div", "call"), field = make("textarea");
      let pretty = given;
      try {
        pretty = JSON.stringify(JSON.parse(given), null, 2);
      } catch {
        // It was cut off: shown as it came.
      }
      field.rows = 1;
      field.placeholder = "its result";
      field.setAttribute("aria-label", `Result of ${name}`);
      element.append(make("strong", "", name), make("pre", "", pretty), ...(this.reply ? [field] : []));
      this.calls.append(element);
      return field;
    });
    const results = () =>
      this.run.calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: fields[i].value }));
    if (this.reply) this.calls.append(button("Send results", () => this.reply(results())));
  }

  // One round: its accepted tokens, the rejected rest of the draft, then the model's own token.
  show(round) {
    const own = round.tokens.filter(({ kind }) => kind !== "accepted");
    const kept = round.tokens.filter(({ kind }) => kind === "accepted");
    for (const token of [...kept, ...round.rejected, ...own]) {
      const element = span(token);
      if (token.kind !== "rejected") this.emitted.push({ element, token });
      this.tokens.append(element);
    }
    this.verdict.textContent = this.run.verdict;
    if (performance.now() > this.painted + PAINT_EVERY) this.paint();
  }

  end(note = "") {
    this.cut();
    const failed = this.run.metrics?.speculative_decoding.draft_error;
    const notes = [note, failed && `the drafter failed: ${failed}`].filter(Boolean);
    this.finish([this.run.verdict, ...notes].join(" · "));
  }

  finish(line) {
    this.line = this.verdict.textContent = line;
    this.actions.hidden = false;
    this.comparing.hidden = !this.run.metrics; // it was stopped: another text would be no wonder
    this.element.classList.toggle("untold", !this.run.tokens.length);
    this.paint();
    this.showCalls();
  }

  // A stop text cut off what the tokens say behind the answer.
  cut() {
    const { text, reasoning, calls } = this.run;
    const all = this.emitted.map(({ token }) => token.text).join("");
    const begin = reasoning ? all.indexOf(text, reasoning.length) : 0;
    if (calls.length || begin < 0) return;
    let left = begin + text.length;
    for (const { element, token } of this.emitted) {
      if (token.text.length > left) {
        element.after(span({ ...token, text: token.text.slice(left), kind: "dropped" }));
        element.textContent = token.text.slice(0, left);
      }
      left -= element.textContent.length;
    }
  }

  // What is kept of it, and an answer as it was kept.
  kept() {
    const { messages, ...request } = this.request;
    const { message, reasoning, told: rounds, metrics } = this.run;
    return { request, message, reasoning, rounds, metrics, line: this.line ?? `${this.run.verdict} · stopped` };
  }

  restore({ message, reasoning, rounds, metrics, line }) {
    Object.assign(this.run, { text: message.content, calls: message.tool_calls ?? [], reasoning, metrics });
    for (const told of rounds) this.show(this.run.add(told));
    this.cut();
    this.finish(line);
  }

  get whole() {
    return whole({ ...this.run.message, reasoning_content: this.run.reasoning });
  }

  // Gives what came of it, in two parts; `onPair` is told the speeds so far and the words to show.
  async compare(key, signal, onPair) {
    const found = await compare(this.request, this.whole, key, signal, (so_far, pair) =>
      onPair(so_far, `Comparing with plain decoding: pair ${pair + 1} of ${PAIRS} …`),
    );
    onPair(found, "");
    return words(found, this.run.metrics.speculative_decoding.identical_to_plain_decoding);
  }

  // What matters in it and the rest; nothing of both hides the line.
  tellComparison(head, rest) {
    this.comparison.hidden = !head && !rest;
    this.comparison.replaceChildren(make("strong", "", head), ` ${rest}`);
  }
}
