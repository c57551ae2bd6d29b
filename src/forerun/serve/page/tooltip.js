// What is known of a token, shown on hover, on tap and, from token to token by arrow keys, on focus.

const tip = document.getElementById("tip");
const known = new WeakMap(); // element to token
const STEPS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
let shown = null;

export function describe(element, token) {
  known.set(element, token);
  element.tabIndex = -1;
}

const quoted = (text) => `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣")}”`;
const percent = (share) => (share >= 0.0995 ? `${Math.round(100 * share)} %` : `${(100 * share).toPrecision(1)} %`);

function happened({ kind, round }) {
  const drafted = round.rejected.map(({ text }) => quoted(text)).join(" ");
  return {
    accepted: `Accepted: drafted by ${round.method}, and what the model would have written.`,
    corrected: `Corrected: the model wrote this where the draft went wrong (${drafted} rejected).`,
    bonus: "Bonus: the whole draft was right, and the same pass gave one more token.",
    plain: "Plain: nothing was drafted in this round.",
    rejected: `Rejected: drafted by ${round.method}, not what the model wrote.`,
    dropped: "Dropped: behind the end that a stop text made.",
  }[kind];
}

// The lines of a tooltip.
function lines(token) {
  const { round } = token;
  const found = [`${quoted(token.text)} · token ${token.id}`, happened(token)];
  found.push(`Round ${round.number}` + (round.drafted ? `: ${round.accepted} of ${round.drafted} drafted accepted` : ""));
  if (token.probability !== undefined) {
    const others = token.others.map(([text, share]) => `${quoted(text)} ${percent(share)}`).join(", ");
    found.push(`The model's probability ${percent(token.probability)}` + (others ? `; ${others}` : ""));
  }
  return found;
}

export function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip.hidden = true;
}

function show(element) {
  hide();
  shown = element;
  element.setAttribute("aria-describedby", tip.id);
  const line = (text) => Object.assign(document.createElement("span"), { textContent: text });
  tip.replaceChildren(...lines(known.get(element)).map(line));
  tip.hidden = false;
  place();
}

// Above the token, or below it where there is no room.
function place() {
  const [at] = shown.getClientRects();
  if (!at) return hide();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8));
  const above = at.top - height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 6}px`;
}

// Details belong to the colours: who reads only is not disturbed.
const tokenAt = (target) => (document.body.classList.contains("colours") && known.has(target) ? target : null);

// From token to token; hidden ones and those without text are passed over.
function move(event) {
  const region = event.target.closest(".tokens");
  if (!region || !document.body.classList.contains("colours") || event.ctrlKey || event.metaKey || event.altKey || !(event.key in STEPS)) return;
  const reached = (each) => known.has(each) && each.getClientRects().length && each.textContent;
  const tokens = [...region.children].filter(reached);
  const at = tokens.indexOf(event.target);
  const next = at < 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, at + STEPS[event.key]));
  if (!tokens[next]) return;
  event.preventDefault();
  tokens[next].focus();
}

// Escape closes a tooltip before it stops a run.
function escape(event) {
  if (event.key !== "Escape" || !shown) return;
  hide();
  event.stopImmediatePropagation();
}

document.addEventListener("pointerover", (event) => {
  if (event.pointerType !== "mouse") return;
  const token = tokenAt(event.target);
  if (token) show(token);
  else if (shown !== document.activeElement) hide();
});
document.addEventListener("click", (event) => (tokenAt(event.target) ? show(event.target) : hide()));
document.addEventListener("focusin", (event) => (tokenAt(event.target) ? show(event.target) : hide()));
document.addEventListener("keydown", move);
document.addEventListener("keydown", escape, true);
document.addEventListener("scroll", () => shown && place(), true);
