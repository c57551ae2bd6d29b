// The options as a request has them, and what is wrong with them, each beside its field.

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const MILD = { temperature: 0.7, min_p: 0.05 };
const placeholders = Object.fromEntries(NUMBERS.map((name) => [name, $(name).placeholder]));
export const MOST_CONTINUED = 256; // tokens: models without a template seldom end
let drafters = {}; // the server's, by method

export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// A model without settings of its own gets mild ones.
export function offer(model) {
  for (const name of NUMBERS) $(name).placeholder = model.own[name] ?? placeholders[name];
  const mild = Object.keys(model.own).length === 0;
  for (const [name, value] of Object.entries(MILD)) {
    if (mild) $(name).value ||= value;
    else if ($(name).value === String(value)) $(name).value = ""; // of the model before
  }
  drafters = model.speculative;
  $("method").replaceChildren(...[...Object.keys(drafters), "none"].map((name) => new Option(name, name)));
  offerLengths();
}

// What the chosen method leaves to choose.
function offerLengths() {
  const drafter = drafters[$("method").value];
  $("tokens").disabled = !drafter;
  $("tokens").placeholder = drafter ? `up to ${drafter.num_speculative_tokens}` : "none";
}

// A field's number; an empty one is left to the server, which also says what is out of its bounds.
function number(field) {
  if (field.validity.badInput) throw new FieldError(field, "must be a number");
  return field.value === "" ? undefined : Number(field.value);
}

// Sampling and speculation as the fields say. Where no seed is given, one is drawn: a comparison asks with it again.
export function asked() {
  const request = {};
  for (const name of NUMBERS) {
    const value = number($(name));
    if (value !== undefined) request[name] = value;
  }
  request.seed = number($("seed")) ?? crypto.getRandomValues(new Uint32Array(1))[0];
  if ($("stop_text").value) request.stop = [$("stop_text").value];
  if ($("regex").value) request.structured_outputs = { regex: $("regex").value };
  const method = $("method").value;
  request.speculative = method === "none" ? { enabled: false } : { method };
  const length = method === "none" ? undefined : number($("tokens"));
  if (length !== undefined) request.speculative.num_speculative_tokens = length;
  request.speculative.trace = true;
  return request;
}

// The tools that a conversation offers.
export function tools() {
  const text = $("tools").value.trim();
  if (!text) return {};
  try {
    return { tools: JSON.parse(text) };
  } catch (error) {
    throw new FieldError($("tools"), `must be JSON: ${error.message}`);
  }
}

// Fields are compared with the server's `param`, which may name more (stop.0) or less (structured_outputs) than they.
function fieldOf(param) {
  const within = (whole, part) => whole === part || whole.startsWith(`${part}.`);
  return [...document.querySelectorAll("[data-param]")].find(({ dataset, offsetParent }) => {
    const known = dataset.param;
    return offsetParent !== null && (within(param, known) || within(known, param));
  });
}

export function clearErrors() {
  for (const note of document.querySelectorAll(".wrong")) {
    const field = $(note.dataset.field);
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
    note.remove();
  }
}

// Says it under the field that it is about, or under `otherwise`.
export function showError(error, otherwise) {
  if (error.status === 401) $("access").open = true;
  const named = error.field ?? (error.status === 401 ? $("key") : error.param && fieldOf(error.param));
  const field = named || otherwise;
  const note = document.createElement("p");
  note.className = "wrong";
  note.id = `${field.id}_wrong`;
  note.dataset.field = field.id;
  note.setAttribute("role", "alert");
  note.textContent = field.dataset.param ? error.message.replace(`${error.param}: `, "") : error.message;
  (field.closest(".field") ?? field).append(note);
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", note.id);
  field.focus({ preventScroll: true });
  (field.closest(".field") ?? field).scrollIntoView({ block: "nearest" });
}

$("method").addEventListener("change", offerLengths);
