// Three small charts with axes, drawn anew from the numbers of a run and whenever their width changes.

import { median } from "/page/compare.js";

const SVG = "http://www.w3.org/2000/svg";
const SHOWN = 80; // rounds
const LEFT = 38, BOTTOM = 20, TOP = 6, RIGHT = 8;

const paint = new WeakMap();
const watcher = new ResizeObserver((entries) => entries.forEach(({ target }) => paint.get(target)?.()));

// `draw(put, width)` puts shapes into an image as wide as its element. Nothing is scaled, so that text keeps its size.
function drawInto(element, height, label, draw) {
  const repaint = () => {
    const width = element.clientWidth;
    if (!width) return;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const put = (name, attributes, text) => {
      const shape = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
      if (text !== undefined) shape.textContent = text;
      svg.append(shape);
    };
    draw(put, width);
    element.replaceChildren(svg);
  };
  element.setAttribute("aria-label", label);
  paint.set(element, repaint);
  watcher.observe(element);
  repaint();
}

// About `count` round numbers from 0 to at least `most`.
function ticks(most, count) {
  const rough = Math.max(most, 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
  const found = [];
  for (let i = 0; (i - 1) * step < most; i++) found.push(Number((i * step).toPrecision(6)));
  return found;
}

// Columns over numbered places, with a y axis of `levels` and at most ten numbers below. A column is a list of parts,
// from its foot upwards: [size, kind].
function columns(put, width, height, { stacks, first, slots, levels, name }) {
  const [right, low] = [width - RIGHT, height - BOTTOM];
  const most = levels.at(-1);
  const y = (value) => low - ((low - TOP) * value) / most;
  for (const level of levels) {
    put("line", { x1: LEFT, x2: right, y1: y(level), y2: y(level) });
    put("text", { x: LEFT - 5, y: y(level) + 3.5, "text-anchor": "end" }, name(level));
  }
  const slot = (right - LEFT) / slots;
  const every = [1, 2, 5, 10, 20, 50].find((step) => slots / step <= 10) ?? 100;
  stacks.forEach((parts, i) => {
    const thick = Math.min(28, 0.8 * slot);
    const middle = LEFT + (i + 0.5) * slot;
    let foot = 0;
    for (const [size, kind] of parts) {
      const top = y(foot + size);
      put("rect", { x: middle - thick / 2, y: top, width: thick, height: y(foot) - top, class: `of-${kind}` });
      foot += size;
    }
    if ((first + i) % every === 0 || slots <= 10) {
      put("text", { x: middle, y: height - 5, "text-anchor": "middle" }, first + i);
    }
  });
}

function drawNothing(element, words) {
  watcher.unobserve(element);
  element.setAttribute("aria-label", words);
  element.replaceChildren(Object.assign(document.createElement("p"), { className: "nothing", textContent: words }));
}

// Share of the drafts that long which were accepted up to a position (vLLM's definition: not conditional on the
// positions before). Counts of {drafted, accepted} per position.
export function drawPositions(element, positions) {
  if (!positions.length) return drawNothing(element, "Nothing was drafted.");
  const shares = positions.map(({ drafted, accepted }) => (drafted ? (100 * accepted) / drafted : 0));
  const said = shares.map((share, i) => `token ${i + 1}: ${Math.round(share)} %`).join(", ");
  drawInto(element, 110, said, (put, width) => {
    const [slots, levels] = [Math.max(2, shares.length), [0, 50, 100]];
    const stacks = shares.map((share) => [[share, "accepted"]]);
    columns(put, width, 110, { stacks, first: 1, slots, levels, name: (level) => `${level}%` });
  });
}

// One column per round, the latest ones: accepted tokens, and on top the model's own.
export function drawRounds(element, rounds) {
  const lengths = rounds.map(({ tokens }) => tokens.length);
  const mean = lengths.reduce((a, b) => a + b, 0) / Math.max(1, lengths.length);
  const label = `${rounds.length} rounds, ${mean.toFixed(2)} tokens each`;
  const shown = rounds.slice(-SHOWN);
  drawInto(element, 110, label, (put, width) => {
    const stacks = shown.map(({ accepted, tokens }) => [
      [accepted, "accepted"],
      ...tokens.slice(accepted).map(({ kind }) => [1, kind]),
    ]);
    const levels = ticks(Math.max(2, ...lengths), 4).filter(Number.isInteger);
    const slots = Math.max(20, shown.length);
    columns(put, width, 110, { stacks, first: rounds.length - shown.length + 1, slots, levels, name: String });
  });
}

// Every run a dot, the line from the slowest to the fastest, the median a bar across it. Tokens per second.
export function drawSpeeds(element, { on, off }) {
  const rows = [["speculating", on, "on"], ["plain", off, "off"]].filter(([, speeds]) => speeds.length);
  const number = (speed) => speed.toFixed(speed < 100 ? 1 : 0);
  const said = rows.map(([name, speeds]) => {
    const range = `${number(Math.min(...speeds))} to ${number(Math.max(...speeds))}`;
    return `${name}: median ${number(median(speeds))}, ${range} tokens per second`;
  });
  const height = 30 * rows.length + BOTTOM + TOP;
  drawInto(element, height, said.join("; "), (put, width) => {
    const start = 82;
    const most = 1.05 * Math.max(...on, ...off);
    const levels = ticks(most, Math.max(2, Math.floor((width - start) / 45)));
    const x = (speed) => start + ((width - RIGHT - start) * speed) / most;
    for (const level of levels.filter((each) => each <= most)) {
      put("line", { x1: x(level), x2: x(level), y1: TOP, y2: height - BOTTOM });
      put("text", { x: x(level), y: height - 5, "text-anchor": "middle" }, level);
    }
    rows.forEach(([name, speeds, kind], row) => {
      const y = TOP + 30 * row + 15;
      put("text", { x: start - 8, y: y + 3.5, "text-anchor": "end" }, name);
      put("line", { x1: x(Math.min(...speeds)), x2: x(Math.max(...speeds)), y1: y, y2: y, class: `range ${kind}` });
      for (const speed of speeds) put("circle", { cx: x(speed), cy: y, r: 3.5, class: `run ${kind}` });
      put("rect", { x: x(median(speeds)) - 1.25, y: y - 9, width: 2.5, height: 18, class: `median ${kind}` });
    });
  });
}
