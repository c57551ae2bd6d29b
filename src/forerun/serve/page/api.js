// Requests to the server that this page came from.

// What the server says is wrong; `param` is the field of the request that it is about.
export class ApiError extends Error {
  constructor(message, param, status) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

async function send(path, key, options) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const { error } = await response.json();
  throw new ApiError(error.message, error.param, response.status);
}

const get = async (path, key) => (await send(path, key, {})).json();

export const servedModels = async (key) => (await get("/v1/models", key)).data;

// A model, loaded if it was not, and its own sampling settings.
export async function readyModel(name, key) {
  const { default_generation_settings } = await get(`/props?model=${encodeURIComponent(name)}`, key);
  const card = (await servedModels(key)).find(({ id }) => id === name);
  return { ...card, own: default_generation_settings.params };
}

function ask(request, key, signal) {
  const path = request.messages ? "/v1/chat/completions" : "/v1/completions";
  return send(path, key, { method: "POST", body: JSON.stringify(request), signal });
}

// The whole answer.
export async function answerOf(request, key, signal) {
  return (await ask(request, key, signal)).json();
}

// The events of a streamed answer.
export async function* eventsOf(request, key, signal) {
  const streamed = { ...request, stream: true, stream_options: { include_usage: true } };
  const response = await ask(streamed, key, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.param, 200);
      yield event;
    }
  }
}
