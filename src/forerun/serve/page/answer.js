// An answer on the page: its tokens, the line under it, and what can be done with it.

import { compare, PAIRS, words } from "/page/compare.js";
import { describe } from "/page/tooltip.js";

function make(name, className, text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

function button(text, action) {
  const element = make("button", "quiet", text);
  element.type = "button";
  element.addEventListener("click", () => action(element));
  return element;
}

function span(token) {
  const struck = token.kind === "rejected" || token.kind === "dropped";
  // What is no part of the answer must not break its lines.
  const element = make(struck ? "s" : "span", token.kind, struck ? token.text.replaceAll("\n", "⏎") : token.text);
  describe(element, token);
  return element;
}

// Where the page is no secure context there is no clipboard to write to.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export class Answer {
  // `request` is what was asked, `again` (if given) asks it anew, `compareNow` runs a comparison of this answer.
  constructor(request, run, { prompt = "", again = null, compareNow }) {
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
    this.verdict = make("p", "verdict");
    this.comparison = make("p", "comparison");
    this.comparison.hidden = true;
    this.actions = make("div", "actions");
    this.actions.hidden = true;
    this.actions.append(
      button("Copy", async (pressed) => {
        await copy(this.run.text);
        pressed.textContent = "Copied";
        setTimeout(() => (pressed.textContent = "Copy"), 1500);
      }),
    );
    if (request.speculative.method) {
      this.actions.append(button("Compare with plain decoding", () => compareNow(this)));
    }
    if (again) this.actions.append(button("Again", again));
    this.element.append(this.tokens, this.verdict, this.comparison, this.actions);
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
  }

  // Of the tokens shown, the first characters are the answer; a stop text cut the rest off.
  end(note = "") {
    let left = this.run.text.length;
    for (const { element, token } of this.emitted) {
      if (token.text.length > left) {
        element.after(span({ ...token, text: token.text.slice(left), kind: "dropped" }));
        element.textContent = token.text.slice(0, left);
      }
      left -= element.textContent.length;
    }
    const failed = this.run.metrics?.speculative_decoding.draft_error;
    const notes = [note, failed && `the drafter failed: ${failed}`].filter(Boolean);
    this.verdict.textContent = [this.run.verdict, ...notes].join(" · ");
    this.actions.hidden = false;
  }

  // Gives what came of it, in two parts; `onPair` is told the speeds so far and the words to show.
  async compare(key, signal, onPair) {
    const found = await compare(this.request, this.run.text, key, signal, (so_far, pair) =>
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
