// Three small charts, drawn anew from the numbers of a run.

const SVG = "http://www.w3.org/2000/svg";
const SHOWN = 80;

function bar(label, share, text, kind) {
  const row = document.createElement("div");
  row.className = "bar";
  const name = document.createElement("span");
  name.textContent = label;
  const track = document.createElement("i");
  const fill = document.createElement("b");
  fill.style.width = `${Math.round(1000 * Math.min(1, share)) / 10}%`;
  if (kind) fill.className = kind;
  track.append(fill);
  const value = document.createElement("span");
  value.textContent = text;
  row.append(name, track, value);
  return row;
}

// Share of the drafts that long which were accepted up to a position (vLLM's definition: not conditional on the
// positions before). Counts of {drafted, accepted} per position.
export function drawPositions(element, positions) {
  const share = ({ drafted, accepted }) => (drafted ? accepted / drafted : 0);
  element.replaceChildren(
    ...positions.map((p, i) => bar(`token ${i + 1}`, share(p), `${Math.round(100 * share(p))}%`)),
  );
  const words = positions.map((p, i) => `token ${i + 1}: ${Math.round(100 * share(p))} %`);
  element.setAttribute("aria-label", words.join(", ") || "nothing was drafted");
}

// One column per round, the latest ones.
export function drawRounds(element, output, lengths) {
  if (!lengths.length) {
    element.replaceChildren();
    element.setAttribute("aria-label", "nothing yet");
    output.textContent = "";
    return;
  }
  const shown = lengths.slice(-SHOWN);
  const tallest = Math.max(2, ...shown);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${SHOWN} ${tallest}`);
  svg.setAttribute("preserveAspectRatio", "none");
  for (let level = 1; level < tallest; level++) {
    const line = document.createElementNS(SVG, "line");
    const place = { x1: 0, x2: SHOWN, y1: tallest - level, y2: tallest - level, "stroke-width": 0.02 * tallest };
    for (const [key, value] of Object.entries(place)) line.setAttribute(key, value);
    svg.append(line);
  }
  shown.forEach((length, i) => {
    const rect = document.createElementNS(SVG, "rect");
    const place = { x: i + 0.1, y: tallest - length, width: 0.8, height: length };
    for (const [key, value] of Object.entries(place)) rect.setAttribute(key, value);
    svg.append(rect);
  });
  element.replaceChildren(svg);
  const mean = lengths.reduce((a, b) => a + b, 0) / lengths.length;
  output.textContent = `mean ${mean.toFixed(2)}`;
  element.setAttribute("aria-label", `${lengths.length} rounds, ${mean.toFixed(2)} tokens each`);
}

export function drawSpeeds(element, speeds) {
  const rows = [
    ["on", "speculating", ""],
    ["off", "plain", "off"],
  ].filter(([key]) => speeds[key] > 0);
  const fastest = Math.max(...rows.map(([key]) => speeds[key]), 1e-9);
  const words = (speed) => speed.toFixed(speed < 100 ? 1 : 0);
  element.replaceChildren(
    ...rows.map(([key, label, kind]) => bar(label, speeds[key] / fastest, words(speeds[key]), kind)),
  );
  const said = rows.map(([key, label]) => `${label}: ${words(speeds[key])} tokens per second`);
  element.setAttribute("aria-label", said.join(", ") || "nothing yet");
}
