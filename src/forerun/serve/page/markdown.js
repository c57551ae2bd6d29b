// Markdown as elements. Text becomes text nodes, never HTML, and links lead to web and mail addresses only: an answer
// can bring no script, no markup and no picture into the page.

import { copyButton, make } from "/page/elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/;
const COLUMNS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12; // of lists and quotes in each other

const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<ticks>`+)(?<code>[^`]|[^`][^]*?[^`])\k<ticks>(?!`)/,
    /!?\[(?<label>(?:[^[\]]|\[[^[\]]*\])*)\]\(\s*<?(?<to>(?:[^\s()<>]|\([^\s()]*\))+)>?(?:\s+"[^"]*")?\s*\)/,
    /(?<bare>https?:\/\/[^\s<>]*[^\s<>.,:;!?'")\]*_])/,
    /(?<stars>\*{1,3})(?=[^\s*])(?<starred>[^]*?[^\s*])\k<stars>(?!\*)/,
    /(?<!\w)(?<lines>_{1,3})(?=[^\s_])(?<lined>[^]*?[^\s_])\k<lines>(?!\w)/,
    /~~(?=\S)(?<struck>[^]*?\S)~~/,
  ].map(({ source }) => source).join("|"),
  "g",
);

const isTable = (lines, at) => lines[at].includes("|") && lines[at + 1]?.includes("|") && COLUMNS.test(lines[at + 1]);
const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));
const isOrdered = (line) => /\d/.test(ITEM.exec(line)[2]);

// Where the list that begins at `begin` ends.
function endOfList(lines, begin) {
  const base = ITEM.exec(lines[begin])[1].length;
  let at = begin + 1;
  for (let next = at; next < lines.length; next++) {
    const line = lines[next], indent = line.search(/\S/);
    if (indent < 0) continue;
    const item = ITEM.test(line) && !RULE.test(line);
    const belongs = indent >= base + 2 || (item && isOrdered(line) === isOrdered(lines[begin]));
    if (!belongs && (next > at || item || begins(line))) break;
    at = next + 1;
  }
  return at;
}

// The blocks of a text: a kind and its lines.
function* blocks(lines, depth) {
  for (let at = 0, begin; at < lines.length; ) {
    const line = lines[(begin = at++)];
    const fence = FENCE.exec(line);
    let kind = "paragraph";
    if (!line.trim()) continue;
    if (fence) {
      const end = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (at < lines.length && !end.test(lines[at])) at++;
      at++;
      kind = "code";
    } else if (HEADING.test(line)) kind = "heading";
    else if (RULE.test(line)) kind = "rule";
    else if (QUOTE.test(line) && depth < DEEPEST) {
      while (at < lines.length && QUOTE.test(lines[at])) at++;
      kind = "quote";
    } else if (ITEM.test(line) && depth < DEEPEST) {
      at = endOfList(lines, begin);
      kind = "list";
    } else if (isTable(lines, begin)) {
      while (at < lines.length && lines[at].includes("|")) at++;
      kind = "table";
    } else while (at < lines.length && lines[at].trim() && !begins(lines[at]) && !isTable(lines, at)) at++;
    yield [kind, lines.slice(begin, at)];
  }
}

const fill = (element, lines, depth) => {
  for (const [kind, part] of blocks(lines, depth)) element.append(MAKE[kind](part, depth + 1));
  return element;
};

const MAKE = {
  paragraph: (lines) => inline(make("p"), lines.map((line) => line.trim()).join("\n")),
  rule: () => make("hr"),
  quote: (lines, depth) => fill(make("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth),
  heading([line]) {
    const [, marks, text] = HEADING.exec(line);
    return inline(make(`h${Math.min(6, marks.length + 2)}`), text); // the page itself has two levels
  },
  code(lines) {
    const [, marks, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(marks);
    const text = lines.slice(1, closed ? -1 : undefined).join("\n");
    const element = make("div", "code"), bar = make("div", "bar"), pre = make("pre");
    pre.tabIndex = 0; // it may scroll
    pre.append(make("code", "", text));
    bar.append(make("span", "", language.trim().split(/\s/)[0]), copyButton(() => text));
    element.append(bar, pre);
    return element;
  },
  list(lines, depth) {
    const [, spaces, mark] = ITEM.exec(lines[0]);
    const list = make(isOrdered(lines[0]) ? "ol" : "ul");
    if (list.tagName === "OL") list.start = parseInt(mark);
    const items = [];
    let width = 0;
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length < spaces.length + 2) {
        width = item[1].length + item[2].length + 1;
        items.push([item[3] ?? ""]);
      } else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${width}}`), ""));
    }
    list.append(...items.map((item) => fill(make("li"), item, depth)));
    return list;
  },
  table([head, columns, ...rows]) {
    const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
    const sides = cells(columns).map((cell) => (/:$/.test(cell) ? (/^:/.test(cell) ? "center" : "right") : ""));
    const row = (line, name) => {
      const made = make("tr"), found = cells(line);
      for (const [i, side] of sides.entries()) {
        const cell = inline(make(name), (found[i] ?? "").replaceAll("\\|", "|"));
        cell.style.textAlign = side;
        made.append(cell);
      }
      return made;
    };
    const element = make("div", "wide_table"), table = make("table");
    element.tabIndex = 0; // it may scroll
    table.createTHead().append(row(head, "th"));
    table.createTBody().append(...rows.map((line) => row(line, "td")));
    element.append(table);
    return element;
  },
};

function link(to, label) {
  const element = make("a", "", label);
  return Object.assign(element, { href: to, target: "_blank", rel: "noopener noreferrer" });
}

function inline(element, text) {
  let at = 0;
  for (const { 0: source, index, groups: found } of text.matchAll(INLINE)) {
    element.append(text.slice(at, index));
    at = index + source.length;
    if (found.escaped) element.append(found.escaped);
    else if (found.ticks) element.append(make("code", "", found.code.replaceAll("\n", " ")));
    else if (found.bare) element.append(link(found.bare, found.bare));
    else if (found.struck) element.append(inline(make("del"), found.struck));
    else if (found.to) {
      const safe = /^(https?:\/\/|mailto:)/i.test(found.to);
      element.append(safe ? inline(link(found.to, ""), found.label || found.to) : source);
    } else {
      const marks = (found.stars ?? found.lines).length, text = found.starred ?? found.lined;
      const inside = make(marks === 2 ? "strong" : "em");
      if (marks === 3) inside.append(inline(make("strong"), text));
      else inline(inside, text);
      element.append(inside);
    }
  }
  element.append(text.slice(at));
  return element;
}

const sources = new WeakMap(); // of the elements made

// Shows `text` in `element`; blocks that were there already stay as they are.
export function render(element, text) {
  let index = 0;
  for (const [kind, lines] of blocks(text.split("\n"), 0)) {
    const source = lines.join("\n"), old = element.children[index++];
    if (old && sources.get(old) === source) continue;
    const made = MAKE[kind](lines, 1);
    sources.set(made, source);
    old ? old.replaceWith(made) : element.append(made);
  }
  while (element.children.length > index) element.lastElementChild.remove();
}
