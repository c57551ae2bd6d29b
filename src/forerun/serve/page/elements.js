// Small elements that several parts of the page make.

export function make(name, className = "", text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

export function button(text, action) {
  const element = make("button", "quiet", text);
  element.type = "button";
  element.addEventListener("click", () => action(element));
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

// A button that copies what `text()` gives.
export const copyButton = (text) =>
  button("Copy", async (pressed) => {
    await copy(text());
    pressed.textContent = "Copied";
    setTimeout(() => (pressed.textContent = "Copy"), 1500);
  });
